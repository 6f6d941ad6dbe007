"""Bytes, addresses and processes: whom we may call, whom we may serve, and how we connect."""
