"""Read documents of any OpenAPI version, and describe their operations."""
