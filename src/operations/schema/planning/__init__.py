"""Merge the schemas that apply to one value, for casting and explaining."""
