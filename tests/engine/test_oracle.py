"""Answers from stored KV are right, byte for byte, and the tests that say so can see."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from fx_kvbackend import metrics
from tests.engine import chunks
from tests.engine.harness import Answer, Engine, engine, stored_files
from tests.engine.models import BLOCK, prompt

pytestmark = pytest.mark.vllm

PROMPTS = [prompt(seed, 500 + 97 * seed) for seed in range(12)]


def _hits(prompts: list[list[int]]) -> list[int]:
    return [(len(p) - 1) // BLOCK * BLOCK for p in prompts]


def _local_then_external(running: Engine) -> tuple[list[Answer], list[Answer]]:
    """Cold, local hit, reset, external hit; the two hits. Never vacuous."""
    cold = running.ask(PROMPTS)
    assert [a.cached for a in cold] == [0] * len(PROMPTS)
    local = running.ask(PROMPTS)
    assert running.counter(metrics.LOADS) == 0, "the local hit came from the store"
    running.reset_local()
    external = running.ask(PROMPTS)
    assert running.counter(metrics.LOADS) > 0, "nothing was read back"
    return local, external


@pytest.mark.parametrize("model", ["llama", "hybrid"])
def test_external_hit_equals_local_hit_at_equal_depth(
    model: str, store: Path, request: pytest.FixtureRequest
) -> None:
    with engine(request.getfixturevalue(model), store) as running:
        local, external = _local_then_external(running)
        assert [a.cached for a in external] == _hits(PROMPTS)
        assert external == local
        assert running.counter(metrics.FAILED_LOADS) == 0


def test_recurrent_state_comes_back(recurrent: str, store: Path, tmp_path: Path) -> None:
    """Linear attention keeps one state per request: a hit needs exactly the one at its end."""
    prompts = [prompt(seed, 3000 + 300 * seed) for seed in range(3)]
    options = {"dtype": "bfloat16", "enable_prefix_caching": True}
    with engine(recurrent, store, extra={"chunk_tokens": "auto"}, **options) as running:
        running.ask(prompts)
        local = running.ask(prompts)
        assert all(a.cached > 0 for a in local)
        assert running.counter(metrics.LOADS) == 0
        running.reset_local()
        assert running.ask(prompts) == local
        assert running.counter(metrics.LOADS) > 0
        assert running.counter(metrics.FAILED_LOADS) == 0
        for file in stored_files(store):
            _, payload = chunks.read(file)
            chunks.replace_payload(file, bytes(len(payload)))
        running.reset_local()
        answers = running.ask(prompts)
        assert [a.cached for a in answers] == [a.cached for a in local]
        assert all(e.tokens != a.tokens for e, a in zip(answers, local, strict=True))


def test_a_connector_that_moves_nothing_is_caught(llama: str, store: Path) -> None:
    with engine(llama, store, connector="LyingConnector", module="tests.engine.lying") as running:
        running.ask(PROMPTS)
        local = running.ask(PROMPTS)
        running.reset_local()
        # Blocks that still hold the right KV would make the lie come true.
        for layer in running.worker._mover._pages._groups[0]:
            layer[0][:] = 0
        external = running.ask(PROMPTS)
        assert [a.cached for a in external] == [a.cached for a in local]
        assert all(e.tokens != a.tokens for e, a in zip(external, local, strict=True))


def test_one_chunk_of_noise_is_caught(llama: str, store: Path) -> None:
    dice = random.Random(7)
    with engine(llama, store) as running:
        running.ask(PROMPTS)
        local = running.ask(PROMPTS)
        for one in PROMPTS:
            file = dice.choice(chunks.of_prompt(store, running.block_hashes(one)))
            _, payload = chunks.read(file)
            noise = np.random.default_rng(1).normal(0, 1, len(payload) // 4).astype(np.float32)
            chunks.replace_payload(file, noise.tobytes())
        running.reset_local()
        external = running.ask(PROMPTS)
        assert running.counter(metrics.FAILED_LOADS) == 0, "checksums were right"
        assert all(e.tokens != a.tokens for e, a in zip(external, local, strict=True))


def test_stored_bytes_are_the_kv_that_was_computed(llama: str, store: Path, tmp_path: Path) -> None:
    with engine(llama, store) as running:
        running.ask(PROMPTS)
        files = {i: chunks.of_prompt(store, running.block_hashes(p)) for i, p in enumerate(PROMPTS)}
    with engine(llama, tmp_path / "other") as fresh:
        fresh.ask(PROMPTS)
        compared = 0
        for i, one in enumerate(PROMPTS):
            pages = fresh.page_bytes(one)
            stored = [chunks.read(file)[1] for file in files[i]]
            assert len(pages) == len(stored) > 0
            for page, payload in zip(pages, stored, strict=True):
                assert _cosine(page, payload) > 0.99999
                compared += 1
            assert _cosine(pages[0], stored[1]) < 0.9, "any chunk would have passed"
        assert compared == sum(len(of_one) for of_one in files.values()) > 80


def _cosine(left: bytes, right: bytes) -> float:
    a, b = (np.frombuffer(x, np.float32).astype(np.float64) for x in (left, right))
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))
