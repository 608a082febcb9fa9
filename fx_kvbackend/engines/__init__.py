"""Bytes between a buffer, a local file and the host's KV pages."""
