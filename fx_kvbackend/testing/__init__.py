"""Contracts and fault injectors, for this package's tests and for outside authors."""
