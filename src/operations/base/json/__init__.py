"""The only rules of JSON: values, decoding, objects and references."""
