"""With several KV groups vLLM knows failed requests only: they are recomputed whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine import chunks
from tests.engine.damage import DAMAGE, TOKENS
from tests.engine.harness import Engine, engine
from tests.engine.models import BLOCK, prompt

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hybrid") / "store"


@pytest.fixture(scope="module")
def running(hybrid: str, store: Path) -> Iterator[Engine]:
    with engine(hybrid, store) as one:
        yield one


def _full_group(running: Engine) -> int:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    groups = running.scheduler.kv_cache_config.kv_cache_groups
    (full,) = [i for i, g in enumerate(groups) if type(g.kv_cache_spec) is FullAttentionSpec]
    return full


@pytest.mark.parametrize("kind", DAMAGE)
def test_hybrid_models_recompute_the_whole_request(kind: str, running: Engine, store: Path) -> None:
    damage, _ = DAMAGE[kind]
    one = prompt(7000 + list(DAMAGE).index(kind), TOKENS)
    cold = running.ask_one(one)
    before = running.failed_loads()
    full = _full_group(running)
    damage(chunks.of_prompt(store, running.block_hashes(one), full))
    running.reset_local()
    assert running.ask_one(one).tokens == cold.tokens
    assert running.failed_loads() > before
    running.reset_local()
    failed = running.failed_loads()
    assert running.ask_one(one).cached == 7 * BLOCK
    assert running.failed_loads() == failed
