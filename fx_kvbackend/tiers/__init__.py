"""Places where chunks live."""
