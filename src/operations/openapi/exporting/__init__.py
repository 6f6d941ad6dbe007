"""From a registry to a document, and what an import needs to restore it."""
