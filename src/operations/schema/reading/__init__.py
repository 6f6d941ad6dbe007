"""Reading a JSON Schema document: its dialect, references, limits, and the validator it becomes."""
