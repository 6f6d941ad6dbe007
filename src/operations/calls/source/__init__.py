"""Calling operations in other processes."""
