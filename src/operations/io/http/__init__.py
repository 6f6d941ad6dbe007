"""The HTTP client: requests, connections, redirects and bounded bodies."""
