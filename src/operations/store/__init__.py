"""What a hub remembers: bytes under keys, with an end."""
