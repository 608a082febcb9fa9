"""Models that the engine tests share, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine import models


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with one full-attention group."""
    return models.llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with sliding-window groups and a full one."""
    return models.olmo3(tmp_path_factory.mktemp("olmo3"))


@pytest.fixture(scope="session")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with recurrent layers beside attention."""
    return models.qwen3_next(tmp_path_factory.mktemp("qwen3_next"))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A fresh directory for chunks."""
    return tmp_path / "store"
