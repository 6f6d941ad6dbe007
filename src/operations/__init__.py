"""Typed operations."""

__version__ = "0.1.0"
