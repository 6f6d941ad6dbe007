"""Schemas from what Python code says: annotations, classes, signatures; and typed values from JSON."""
