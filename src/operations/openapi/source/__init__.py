"""Operations of an HTTP service: from its document to its responses."""
