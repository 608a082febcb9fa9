"""Planner (what is where) and mover (bytes), put together in `build`."""
