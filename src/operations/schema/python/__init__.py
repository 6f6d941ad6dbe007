"""Schemas from Python annotations, classes and signatures; and typed values from JSON."""
