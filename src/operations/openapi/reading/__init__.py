"""From a document of any version to what each of its operations says."""
