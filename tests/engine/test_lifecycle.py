"""Preemption, aborts in every phase, slow media: nothing leaks, nothing is wrong."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fx_kvbackend import metrics
from fx_kvbackend.records import Reason, Refusal
from tests.engine import chunks
from tests.engine.harness import Engine, engine
from tests.engine.models import BLOCK, prompt

pytestmark = pytest.mark.vllm

FEW = {"num_gpu_blocks_override": 40, "max_model_len": 2048}
"""So few KV blocks that concurrent requests preempt each other."""


def _slow(running: Engine, verb: str, seconds: float) -> None:
    """Make one verb of the tier slow. The delay is the scenario, no test waits for it."""
    tier = running.worker._mover._tier
    honest = getattr(tier, verb)

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return honest(*args, **kwargs)

    setattr(tier, verb, slow)


def _at_rest(running: Engine, free_blocks: int) -> None:
    """Nothing is held by anybody once all requests are over."""
    running.settle()
    mover, planner = running.worker._mover, running.planner
    assert running.free_blocks() == free_blocks
    assert mover.arena.free_count == mover.arena.slot_count
    assert planner.pending_saves == 0
    assert all(entry.pins == 0 for _, entry in planner._index)
    assert not planner._requests
    assert not mover._loads
    assert not mover._saves
    assert not running.scheduler.connector.scheduler._req_status


@pytest.mark.parametrize("slow", ["write", "read"])
def test_preemption_with_transfers_in_flight(llama: str, store: Path, slow: str) -> None:
    prompts = [prompt(seed, 1000) for seed in range(8)]
    with engine(llama, None) as plain:
        expected = plain.ask(prompts, max_tokens=300)
    with engine(llama, store, **FEW) as running:
        free = running.free_blocks()
        for _ in range(2):
            _slow(running, slow, 0.1)
            answers = running.ask(prompts, max_tokens=300)
            # A preempted request may resume from stored KV; greedy answers of these float32
            # weights do not depend on how often that happened.
            assert [a.tokens for a in answers] == [e.tokens for e in expected]
            running.reset_local()
        _at_rest(running, free)
        assert running.counter(metrics.LOADS) > 0
        assert _preemptions() > 0


def _preemptions() -> float:
    from prometheus_client import REGISTRY

    return sum(
        sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == "vllm:num_preemptions_total"
    )


def test_blocks_are_given_back_at_once_when_staging_is_full(llama: str, store: Path) -> None:
    """vLLM wants blocks back while the disk hangs: saves are dropped, the engine goes on."""
    prompts = [prompt(seed, 1000) for seed in range(6)]
    with engine(
        llama,
        store,
        num_gpu_blocks_override=24,
        max_model_len=2048,
        extra={"staging": "2MiB"},
    ) as running:
        free = running.free_blocks()
        _slow(running, "write", 0.3)
        answers = running.ask(prompts, max_tokens=100)
        assert running.counter(metrics.DROPPED_SAVES, Reason.STAGING.value) > 0
        _at_rest(running, free)
        running.reset_local()
        again = running.ask(prompts, max_tokens=100)
        assert [a.tokens for a in again] == [a.tokens for a in answers]


@pytest.mark.parametrize("phase", ["queued", "loading", "prefill", "decode", "finished"])
def test_abort_in(phase: str, llama: str, store: Path) -> None:
    old, other = prompt(1, 4000), prompt(2, 700)
    with engine(llama, store, max_num_batched_tokens=512) as running:
        expected_old, expected_other = running.ask_one(old), running.ask_one(other)
        free = running.free_blocks()
        running.reset_local()
        _slow(running, "read", 0.05)
        _slow(running, "write", 0.05)
        one = prompt(3, 4000) if phase in ("prefill", "decode") else old
        victim = running.add(one, max_tokens=1 if phase == "finished" else 50)
        survivor = running.add(other)
        if phase != "queued":
            running.step()
        if phase == "loading":
            assert running.worker._mover._loads
        elif phase == "decode":
            request = _request(running, victim)
            assert request is not None
            while request.num_output_tokens < 2:
                running.step()
        elif phase == "finished":
            while _request(running, victim) is not None:
                running.step()
        running.abort([victim])
        done = running.finish()
        assert tuple(done[survivor].outputs[0].token_ids) == expected_other.tokens
        _at_rest(running, free)
        running.reset_local()
        assert running.ask_one(old).tokens == expected_old.tokens


def _request(running: Engine, request_id: str) -> Any:
    """The scheduler's request; it appends to the id that a client gave."""
    found = (r for i, r in running.scheduler.requests.items() if i.startswith(f"{request_id}-"))
    return next(found, None)


def test_aborting_everything_at_once(llama: str, store: Path) -> None:
    with engine(llama, store, **FEW) as running:
        free = running.free_blocks()
        for round_number in range(3):
            ids = [running.add(prompt(seed, 1500), max_tokens=100) for seed in range(10)]
            for _ in range(3 * round_number):
                running.step()
            running.abort(ids)
            running.finish()
            _at_rest(running, free)


def test_fuzz_with_failures(llama: str, store: Path, tmp_path: Path) -> None:
    """Random requests, aborts, resets, delays and failures; then every stored byte is checked."""
    dice = random.Random(20261201)
    heads = [prompt(seed, 600) for seed in range(4)]
    with engine(llama, store, **FEW) as running:
        free = running.free_blocks()
        tier = running.worker._mover._tier
        read, write = tier.read, tier.write

        def faulty_read(*args: Any) -> Any:
            time.sleep(dice.random() * 0.01)
            if dice.random() < 0.2:
                return Refusal(Reason.IO_ERROR, "by the dice")
            return read(*args)

        def faulty_write(*args: Any, **kwargs: Any) -> Any:
            time.sleep(dice.random() * 0.01)
            if dice.random() < 0.1:
                return Refusal(Reason.IO_ERROR, "by the dice")
            return write(*args, **kwargs)

        tier.read, tier.write = faulty_read, faulty_write
        prompts: list[list[int]] = []
        alive: list[str] = []
        for _ in range(400):
            roll = dice.random()
            if roll < 0.25 and len(alive) < 12:
                one = dice.choice(heads) + prompt(dice.randrange(50), dice.randrange(20, 900))
                prompts.append(one)
                alive.append(running.add(one, max_tokens=dice.randrange(1, 60)))
            elif roll < 0.30 and alive:
                running.abort([alive.pop(dice.randrange(len(alive)))])
            elif roll < 0.31:
                running.abort(alive)
                alive.clear()
            elif roll < 0.37:
                running.llm.reset_prefix_cache(reset_connector=False)
                running.planner._sick_until_s = 0.0
            running.step()
        running.finish()
        _at_rest(running, free)
        # How many depends on the order of threads; none would make this test blind.
        assert running.counter(metrics.LOADS) > 5
        assert running.counter(metrics.FAILED_LOADS, Reason.IO_ERROR.value) > 0
        hashes = [running.block_hashes(one) for one in prompts]
        stored = {h: chunks.of_prompt(store, [h]) for one in hashes for h in one}
    with engine(llama, tmp_path / "fresh") as fresh:
        compared = 0
        for one, names in zip(prompts, hashes, strict=True):
            fresh.reset_local()
            fresh.ask_one(one, max_tokens=1)
            for page, name in zip(fresh.page_bytes(one), names, strict=True):
                for file in stored.pop(name, []):
                    a, b = (np.frombuffer(x, np.float32) for x in (page, chunks.read(file)[1]))
                    assert np.allclose(a, b, rtol=1e-3, atol=1e-3)
                    compared += 1
        assert compared > 50


def test_prompts_around_block_edges_never_crash(llama: str, store: Path) -> None:
    lengths = [1, 2, 3, BLOCK - 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK]
    with engine(llama, store, max_num_batched_tokens=256) as running:
        free = running.free_blocks()
        for output in (1, 2, BLOCK - 1, BLOCK, BLOCK + 1):
            running.ask([prompt(n, n) for n in lengths], max_tokens=output)
        _at_rest(running, free)
        running.reset_local()
        again = running.ask([prompt(n, n) for n in lengths], max_tokens=1)
        assert [a.cached for a in again] == [n // BLOCK * BLOCK for n in lengths]
