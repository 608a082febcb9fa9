"""Every kind of failed load costs a recomputation: never the answer, never the engine.

A failed chunk k must give the answer of a clean load of k chunks (vLLM's max_load_tokens),
the same request saves what it recomputed, and the next one hits all of it.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fx_kvbackend import metrics
from fx_kvbackend.records import Reason
from tests.engine import chunks
from tests.engine.damage import BAD, DAMAGE, TOKENS
from tests.engine.harness import Answer, Engine, engine
from tests.engine.models import BLOCK, prompt

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("failures") / "store"


@pytest.fixture(scope="module")
def running(llama: str, store: Path) -> Iterator[Engine]:
    with engine(llama, store, extra={"load_deadline_s": 2.0}) as one:
        yield one


@pytest.fixture
def fresh(running: Engine) -> Engine:
    """The shared engine, with a tier that is well."""
    running.planner._sick_until_s = 0.0
    return running


def _clean_load_of(running: Engine, one: list[int], chunks_loaded: int) -> Answer:
    """The answer when exactly so many chunks are loaded and nothing fails."""
    running.reset_local()
    params = running.params(8)
    params.extra_args = {"kv_transfer_params": {"max_load_tokens": chunks_loaded * BLOCK}}
    prompts: Any = [{"prompt_token_ids": one}]
    (out,) = running.llm.generate(prompts, params, use_tqdm=False)
    running.settle()
    answer = Answer(tuple(out.outputs[0].token_ids), out.num_cached_tokens or 0)
    assert answer.cached == chunks_loaded * BLOCK
    return answer


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_chunk_is_recomputed(kind: str, fresh: Engine, store: Path) -> None:
    damage, reason = DAMAGE[kind]
    one = prompt(1000 + list(DAMAGE).index(kind), TOKENS)
    fresh.ask_one(one)
    files = chunks.of_prompt(store, fresh.block_hashes(one))
    expected = _clean_load_of(fresh, one, BAD)
    damage(files)
    before, blocks = fresh.failed_loads(), fresh.free_blocks()
    counted = fresh.counter(metrics.FAILED_LOADS, reason.value)
    fresh.reset_local()
    answer = fresh.ask_one(one)
    assert answer.tokens == expected.tokens
    assert fresh.counter(metrics.FAILED_LOADS, reason.value) > counted
    assert fresh.free_blocks() == blocks
    # What was recomputed is saved again by the same request, over the damage.
    for file in files:
        chunks.read(file)
    failed = fresh.failed_loads()
    assert failed > before
    fresh.reset_local()
    again = fresh.ask_one(one)
    assert again.cached == 7 * BLOCK
    assert fresh.failed_loads() == failed, "a second try met the same damage"


def test_the_whole_prompt_failing_still_answers(fresh: Engine, store: Path) -> None:
    one = prompt(2000, 4 * BLOCK)
    cold = fresh.ask_one(one)
    for file in chunks.of_prompt(store, fresh.block_hashes(one)):
        os.truncate(file, 100)
    fresh.reset_local()
    assert fresh.ask_one(one).tokens == cold.tokens


@pytest.mark.parametrize(
    ("number", "reason"),
    [(errno.EIO, Reason.IO_ERROR), (errno.EMFILE, Reason.NO_FDS), (errno.EACCES, Reason.IO_ERROR)],
    ids=["EIO", "EMFILE", "EACCES"],
)
def test_errors_of_the_medium(
    number: int, reason: Reason, fresh: Engine, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = prompt(3000 + number, TOKENS)
    fresh.ask_one(one)
    bad = str(chunks.of_prompt(store, fresh.block_hashes(one))[BAD])
    expected = _clean_load_of(fresh, one, BAD)
    counted = fresh.counter(metrics.FAILED_LOADS, reason.value)
    open_file = os.open

    def failing_open(path: Any, flags: int, mode: int = 0o777) -> int:
        if path == bad and not flags & os.O_CREAT:
            raise OSError(number, os.strerror(number), path)
        return open_file(path, flags, mode)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", failing_open)
        fresh.reset_local()
        assert fresh.ask_one(one).tokens == expected.tokens
    assert fresh.counter(metrics.FAILED_LOADS, reason.value) == counted + 1


def test_an_exception_in_an_io_thread(
    fresh: Engine, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = prompt(4000, TOKENS)
    fresh.ask_one(one)
    expected = _clean_load_of(fresh, one, 0)

    def broken(*args: object) -> None:
        raise RuntimeError("not an OSError")

    counted = fresh.counter(metrics.FAILED_LOADS, Reason.INTERNAL.value)
    with monkeypatch.context() as patch:
        patch.setattr(fresh.worker._mover._tier, "read", broken)
        fresh.reset_local()
        assert fresh.ask_one(one).tokens == expected.tokens
    assert fresh.counter(metrics.FAILED_LOADS, Reason.INTERNAL.value) > counted


def test_a_load_that_hangs_ends_at_its_deadline_and_its_bytes_stay_out(
    fresh: Engine, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = prompt(5000, TOKENS), prompt(5001, TOKENS)
    fresh.ask([one, other])
    expected = _clean_load_of(fresh, one, 0)
    undisturbed = _clean_load_of(fresh, other, 0)
    tier = fresh.worker._mover._tier
    read, gate = tier.read, threading.Event()

    def hanging(*args: Any) -> Any:
        result = read(*args)
        gate.wait()
        return result

    counted = fresh.counter(metrics.FAILED_LOADS, Reason.DEADLINE.value)
    with monkeypatch.context() as patch:
        patch.setattr(tier, "read", hanging)
        fresh.reset_local()
        assert fresh.ask_one(one).tokens == expected.tokens
        assert fresh.counter(metrics.FAILED_LOADS, Reason.DEADLINE.value) > counted
        # The store is left alone now: the next request does not wait for it.
        assert fresh.ask_one(other).tokens == undisturbed.tokens
        assert fresh.counter(metrics.TIER_SICK) == 1
        pages = fresh.page_bytes(one), fresh.page_bytes(other)
        gate.set()
        _wait_for_idle_threads(fresh)
        assert (fresh.page_bytes(one), fresh.page_bytes(other)) == pages
    assert fresh.worker._mover.arena.free_count == fresh.worker._mover.arena.slot_count


def _wait_for_idle_threads(running: Engine) -> None:
    """Until every slot came back, which is the last thing that a late read does."""
    arena = running.worker._mover.arena
    pause = threading.Event()
    for _ in range(1000):
        if arena.free_count == arena.slot_count:
            return
        pause.wait(0.01)
    raise AssertionError("late reads did not end")


def test_several_requests_over_damaged_chunks(fresh: Engine, store: Path) -> None:
    prompts = [prompt(6000 + i, TOKENS) for i in range(4)]
    fresh.ask(prompts)
    expected = [_clean_load_of(fresh, one, i + 1) for i, one in enumerate(prompts)]
    for i, one in enumerate(prompts):
        chunks.of_prompt(store, fresh.block_hashes(one))[i + 1].unlink()
    fresh.reset_local()
    assert [a.tokens for a in fresh.ask(prompts)] == [e.tokens for e in expected]
