"""Operations for others: as tools of a model provider, and as a typed Python client."""
