"""What the import and the export of documents share."""
