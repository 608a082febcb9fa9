"""The models and stores of the engine tests."""

from tests.engine.conftest import hybrid, llama, store

__all__ = ["hybrid", "llama", "store"]
