"""What a package of its own adds: a kind of source, a store, a sink, and the form of a model provider."""
