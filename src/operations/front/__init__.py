"""What the entry points share: arrivals become calls, and errors become replies."""
