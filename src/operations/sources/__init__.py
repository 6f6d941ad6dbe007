"""Where operations come from."""
