"""What the schemas that meet one value say together, laid out for casting and explaining."""
