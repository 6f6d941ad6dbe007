"""HTTP APIs and OpenAPI documents, both ways."""
