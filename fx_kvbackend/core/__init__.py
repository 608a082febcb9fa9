"""Pure parts: no I/O, no torch, no threads, no clock."""
