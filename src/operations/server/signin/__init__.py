"""Who is calling: keys and tokens."""
