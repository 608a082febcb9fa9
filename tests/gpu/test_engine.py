"""A real CUDA engine: stored KV is what was computed, and answers from it are right.

The same claims as the engine tests on CPU make, where a GPU can break them: streams, other
attention kernels and layouts, asynchronous scheduling.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fx_kvbackend import metrics
from tests.engine import chunks
from tests.engine.damage import BAD, DAMAGE, TOKENS
from tests.engine.harness import Answer, Engine, stored_files
from tests.engine.models import BLOCK, prompt
from tests.gpu.device import DTYPE, ask_each, cosine, engine, needs_engine, pages_by_torch, wipe

pytestmark = [pytest.mark.gpu, needs_engine]

PROMPTS = [prompt(seed, 500 + 97 * seed) for seed in range(12)]


def full_blocks(prompts: list[list[int]]) -> list[int]:
    return [(len(one) - 1) // BLOCK * BLOCK for one in prompts]


def local_hits(running: Engine) -> list[Answer]:
    """Cold, then hits on blocks that this engine computed itself."""
    assert [a.cached for a in ask_each(running, PROMPTS)] == [0] * len(PROMPTS)
    local = ask_each(running, PROMPTS)
    assert [a.cached for a in local] == full_blocks(PROMPTS)
    assert running.counter(metrics.LOADS) == 0, "the local hits came from the store"
    return local


def mostly_other(external: list[Answer], local: list[Answer]) -> bool:
    pairs = zip(external, local, strict=True)
    different = [restored.tokens != reference.tokens for restored, reference in pairs]
    return sum(different) >= 0.75 * len(different)


# --- the oracle, and what it must catch -----------------------------------------------------


@pytest.mark.parametrize("model", ["llama", "hybrid"])
def test_external_hit_equals_local_hit(
    model: str, store: Path, request: pytest.FixtureRequest
) -> None:
    with engine(request.getfixturevalue(model), store) as running:
        local = local_hits(running)
        running.reset_local()
        external = ask_each(running, PROMPTS)
        assert running.counter(metrics.LOADS) > 0, "nothing was read back"
        assert running.counter(metrics.FAILED_LOADS) == 0
        assert external == local


def test_a_connector_that_moves_nothing_is_caught(llama: str, store: Path) -> None:
    with engine(llama, store, connector="LyingConnector", module="tests.engine.lying") as running:
        local = local_hits(running)
        running.reset_local()
        wipe(running)  # blocks that still hold the right KV would make the lie come true
        external = ask_each(running, PROMPTS)
        assert [a.cached for a in external] == [a.cached for a in local]
        assert mostly_other(external, local)


def test_one_chunk_of_noise_is_caught(llama: str, store: Path) -> None:
    dice = random.Random(7)
    with engine(llama, store) as running:
        local = local_hits(running)
        for one in PROMPTS:
            file = dice.choice(chunks.of_prompt(store, running.block_hashes(one)))
            _, payload = chunks.read(file)
            values = len(payload) // torch.empty(0, dtype=DTYPE).element_size()
            noise = torch.randn(values, generator=torch.Generator().manual_seed(1)).to(DTYPE)
            chunks.replace_payload(file, noise.view(torch.uint8).numpy().tobytes())
        running.reset_local()
        external = ask_each(running, PROMPTS)
        assert running.counter(metrics.FAILED_LOADS) == 0, "checksums were right"
        assert mostly_other(external, local)


# --- stream ordering ------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["llama", "hybrid"])
def test_order_saved_bytes_are_the_kv_at_the_end_of_the_step(
    model: str, store: Path, request: pytest.FixtureRequest
) -> None:
    """Many short steps with saves in flight; then file by file against the pages, bit for bit."""
    prompts = [prompt(100 + seed, 1500 + 131 * seed) for seed in range(8)]
    with engine(
        request.getfixturevalue(model), store, max_num_batched_tokens=512, max_num_seqs=4
    ) as running:
        running.ask(prompts, max_tokens=40)
        assert running.counter(metrics.SAVES) > 0
        group, compared = _full_group(running), 0
        for one in prompts:
            pages = pages_by_torch(running, one, group)
            files = chunks.of_prompt(store, running.block_hashes(one), group)
            assert len(pages) == len(files) == len(one) // BLOCK
            for number, (page, file) in enumerate(zip(pages, files, strict=True)):
                assert chunks.read(file)[1] == page, f"chunk {number}"
                compared += 1
        assert compared > 80
        other = pages_by_torch(running, prompts[1], group)
        assert pages_by_torch(running, prompts[0], group)[0] != other[0], "all pages are alike"


def _full_group(running: Engine) -> int:
    """The group that keeps all blocks of a prompt; windows give theirs up."""
    groups = running.scheduler.kv_cache_config.kv_cache_groups
    [number] = [
        i for i, g in enumerate(groups) if type(g.kv_cache_spec).__name__ == "FullAttentionSpec"
    ]
    return number


def test_order_loaded_bytes_are_there_when_the_request_runs(llama: str, store: Path) -> None:
    """Loads into blocks that other requests wrote a moment ago, again and again."""
    with engine(llama, store, num_gpu_blocks_override=64, max_model_len=2048) as running:
        prompts = [prompt(300 + seed, 1200) for seed in range(6)]
        running.ask(prompts)
        files = {i: chunks.of_prompt(store, running.block_hashes(p)) for i, p in enumerate(prompts)}
        for round_number in range(4):
            running.reset_local()
            strangers = [prompt(1000 * round_number + 400 + i, 600) for i in range(4)]
            ids = [running.add(one, max_tokens=64) for one in strangers]
            for _ in range(8):
                running.step()
            running.abort(ids)  # their blocks are free while their last step may still run
            for one in prompts:
                running.add(one)
            running.finish()
            for i, one in enumerate(prompts):
                pages = pages_by_torch(running, one)
                for page, file in zip(pages, files[i], strict=False):
                    assert chunks.read(file)[1] == page
        assert running.counter(metrics.LOADS) > 0
        assert running.counter(metrics.FAILED_LOADS) == 0


# --- failures -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["missing", "truncated", "flipped"])
def test_a_damaged_chunk_is_recomputed(kind: str, llama: str, store: Path) -> None:
    damage, reason = DAMAGE[kind]
    one = prompt(1000, TOKENS)
    with engine(llama, store) as running:
        running.ask_one(one)
        files = chunks.of_prompt(store, running.block_hashes(one))
        expected = _clean_load_of(running, one, BAD)
        damage(files)
        blocks = running.free_blocks()
        running.reset_local()
        assert running.ask_one(one).tokens == expected.tokens
        assert running.counter(metrics.FAILED_LOADS, reason.value) > 0
        assert running.free_blocks() == blocks
        for file in files:
            chunks.read(file)  # what was recomputed was saved over the damage
        running.reset_local()
        assert running.ask_one(one).cached == TOKENS // BLOCK * BLOCK


def test_a_damaged_chunk_of_a_hybrid_model_is_recomputed(hybrid: str, store: Path) -> None:
    """With several KV groups the whole request is: its answer is the cold one."""
    one = prompt(1001, TOKENS)
    with engine(hybrid, store) as running:
        cold = running.ask_one(one)
        chunks.of_prompt(store, running.block_hashes(one))[BAD].unlink()
        running.reset_local()
        assert running.ask_one(one).tokens == cold.tokens
        assert sum(
            value
            for (name, _), value in running.totals().items()
            if name == metrics.FAILED_LOADS.name
        )


def _clean_load_of(running: Engine, one: list[int], chunk_count: int) -> Answer:
    """The answer when exactly so many chunks are loaded and nothing fails."""
    running.reset_local()
    params = running.params(8)
    params.extra_args = {"kv_transfer_params": {"max_load_tokens": chunk_count * BLOCK}}
    ask: list[Any] = [{"prompt_token_ids": one}]
    (out,) = running.llm.generate(ask, params, use_tqdm=False)
    running.settle()
    answer = Answer(tuple(out.outputs[0].token_ids), out.num_cached_tokens or 0)
    assert answer.cached == chunk_count * BLOCK
    return answer


# --- preemption -----------------------------------------------------------------------------


def test_preemption_with_saves_in_flight(llama: str, store: Path, tmp_path: Path) -> None:
    """Blocks change owners while their saves are under way: what is stored stays right.

    Judged by the stored bytes: answers of a batch may differ on a GPU by the batch alone.
    """
    prompts = [prompt(2000 + seed, 1000) for seed in range(8)]
    with engine(llama, store, num_gpu_blocks_override=40, max_model_len=2048) as running:
        free = running.free_blocks()
        before = _preemptions()
        for _ in range(2):
            _slow_writes(running, 0.1)
            running.ask(prompts, max_tokens=300)
            running.reset_local()
        assert _preemptions() > before
        assert running.free_blocks() == free
        assert running.planner.pending_saves == 0
        mover = running.worker._mover
        assert mover.arena.free_count == mover.arena.slot_count
        hashes = [running.block_hashes(one) for one in prompts]
    with engine(llama, tmp_path / "other") as fresh:
        ask_each(fresh, prompts)
        compared = 0
        for one, of_one in zip(prompts, hashes, strict=True):
            pages = pages_by_torch(fresh, one)
            for page, block_hash in zip(pages, of_one, strict=True):
                for file in chunks.of_prompt(store, [block_hash]):
                    assert cosine(page, chunks.read(file)[1]) > 0.999
                    compared += 1
            assert cosine(pages[0], pages[1]) < 0.9, "any chunk would have passed"
        assert compared >= 40
    assert len(stored_files(store)) >= compared


def _slow_writes(running: Engine, seconds: float) -> None:
    """Make the medium slow. The delay is the scenario, no test waits for it."""
    tier = running.worker._mover._tier
    honest = type(tier).write.__get__(tier)

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return honest(*args, **kwargs)

    tier.write = slow


def _preemptions() -> float:
    from prometheus_client import REGISTRY

    return sum(
        sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == "vllm:num_preemptions_total"
    )
