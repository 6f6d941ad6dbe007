"""The messages of a call between processes."""
