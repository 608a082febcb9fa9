"""A new engine over an old store: what hits, and what stays as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fx_kvbackend import metrics
from tests.engine.harness import engine, stored_files
from tests.engine.models import BLOCK, prompt
from tests.engine.models import llama as make_llama

pytestmark = pytest.mark.vllm

FILLED = prompt(1, 600)
TAILS = [BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 77, 2000]


@pytest.fixture(scope="module")
def filled(llama: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that holds FILLED for the default set-up."""
    store = tmp_path_factory.mktemp("filled") / "store"
    with engine(llama, store) as running:
        running.ask_one(FILLED)
    return store


def test_first_request_after_restart_hits_and_rewrites_nothing(llama: str, store: Path) -> None:
    prompts = [prompt(100 + i, n) for i, n in enumerate(TAILS)]
    with engine(llama, store) as first:
        first.ask(prompts, max_tokens=2)
        # Saves cover every full block, also one that a prompt ends on.
        expected = sum((n + 1) // BLOCK for n in TAILS)
        assert len(stored_files(store)) == expected == first.counter(metrics.SAVES)
    before = {f: f.stat().st_mtime_ns for f in stored_files(store)}
    (store / "notes.txt").write_text("not ours")
    with engine(llama, store) as second:
        answers = second.ask(prompts, max_tokens=2)
        # vLLM counts a whole prompt as cached, and computes its last token all the same.
        assert [a.cached for a in answers] == [n // BLOCK * BLOCK for n in TAILS]
        assert second.counter(metrics.SAVES) == 0
    assert {f: f.stat().st_mtime_ns for f in stored_files(store)} == before
    assert (store / "notes.txt").read_text() == "not ours"
    assert not list(store.glob("tmp/*/*"))


def test_generated_tokens_are_saved_for_the_next_turn(llama: str, store: Path) -> None:
    first_turn = prompt(1, 300)
    with engine(llama, store) as running:
        answer = running.ask_one(first_turn, max_tokens=400)
    second_turn = first_turn + list(answer.tokens) + prompt(2, 50)
    with engine(llama, store) as running:
        assert running.ask_one(second_turn).cached == (300 + 400 - 1) // BLOCK * BLOCK


def test_generated_tokens_are_not_saved_when_switched_off(llama: str, store: Path) -> None:
    with engine(llama, store, extra={"save_generated": False}) as running:
        running.ask_one(prompt(1, 300), max_tokens=400)
        assert running.counter(metrics.SAVES) == 300 // BLOCK


def test_a_turn_that_ends_on_a_block_edge_is_hit_whole(llama: str, store: Path) -> None:
    first_turn = prompt(1, 2 * BLOCK)
    with engine(llama, store) as running:
        # The last generated token's KV is not computed before a next step would use it.
        answer = running.ask_one(first_turn, max_tokens=BLOCK + 1)
    second_turn = first_turn + list(answer.tokens) + prompt(2, 40)
    with engine(llama, store) as running:
        assert running.ask_one(second_turn).cached == 3 * BLOCK


def test_requests_share_a_prefix(llama: str, store: Path) -> None:
    head = prompt(1, 512)
    with engine(llama, store) as running:
        running.ask_one(head + prompt(2, 300))
    with engine(llama, store) as running:
        answers = running.ask([head + prompt(seed, 300) for seed in (3, 4, 5)])
        assert [a.cached for a in answers] == [512] * 3
        assert (
            running.counter(metrics.LOADED_BYTES) == 4 * running.worker._geometries[0].block_bytes
        )


def test_larger_chunks(llama: str, store: Path) -> None:
    one = prompt(1, 3 * 512 + 77)
    for cached in (0, 1536):
        with engine(llama, store, extra={"chunk_tokens": 512}) as running:
            assert running.ask_one(one).cached == cached
    assert len(stored_files(store)) == 3


def test_a_partly_local_hit_loads_only_the_rest(llama: str, store: Path) -> None:
    one = prompt(1, 3 * 512 + 10)
    with engine(llama, store, extra={"chunk_tokens": 512}) as running:
        running.ask_one(one)
        running.reset_local()
        running.ask_one(one[:700])
        loaded = running.counter(metrics.LOADED_BYTES)
        assert running.ask_one(one).cached == 3 * 512
        block = running.worker._geometries[0].block_bytes
        # 512 tokens were loaded and up to 640 computed for the shorter prompt.
        assert running.counter(metrics.LOADED_BYTES) - loaded == (12 - 5) * block


def test_other_weights_under_the_same_path_never_meet(store: Path, tmp_path: Path) -> None:
    path = tmp_path / "model"
    for seed in (1, 2):
        make_llama(path, seed=seed)
        with engine(str(path), store) as running:
            assert running.ask_one(prompt(1, 600)).cached == 0
    make_llama(path, seed=1)
    with engine(str(path), store) as running:
        assert running.ask_one(prompt(1, 600)).cached == 512


def test_the_same_weights_under_another_path_meet(llama: str, store: Path, tmp_path: Path) -> None:
    copy = make_llama(tmp_path / "copy")
    for model, cached in ((llama, 0), (copy, 512)):
        with engine(model, store) as running:
            assert running.ask_one(prompt(1, 600)).cached == cached


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": "bfloat16"},
        {"extra": {"chunk_tokens": 256}},
        {"block_size": 64},
        {"hf_overrides": {"rope_theta": 5000.0}},
        {"prefix_caching_hash_algo": "sha256_cbor"},
    ],
    ids=["dtype", "chunk", "block", "config", "hash"],
)
def test_what_changes_bytes_or_keys_separates(
    llama: str, filled: Path, other: dict[str, Any]
) -> None:
    with engine(llama, filled, **other) as running:
        assert running.ask_one(FILLED).cached == 0


def test_what_is_equal_does_not_separate(llama: str, filled: Path) -> None:
    with engine(llama, filled, max_num_seqs=8, max_num_batched_tokens=512) as running:
        assert running.ask_one(FILLED).cached == 512


def test_cache_salt_separates_tenants(llama: str, store: Path) -> None:
    one = prompt(1, 600)
    with engine(llama, store) as running:
        running.ask_one(one, cache_salt="tenant-a")
    with engine(llama, store) as running:
        assert running.ask_one(one).cached == 0
        running.reset_local()
        assert running.ask_one(one, cache_salt="tenant-b").cached == 0
        running.reset_local()
        assert running.ask_one(one, cache_salt="tenant-a").cached == 512


def test_reset_drops_the_store_for_this_process_only(llama: str, store: Path) -> None:
    one = prompt(1, 600)
    with engine(llama, store) as running:
        running.ask_one(one)
        assert running.llm.reset_prefix_cache(reset_connector=True)
        assert running.ask_one(one).cached == 0
        running.reset_local()
        assert running.ask_one(one).cached == 512, "later saves are found again"
    with engine(llama, store) as running:
        assert running.ask_one(one).cached == 512, "the old weights' chunks are still theirs"


def test_cap_holds_over_restarts(llama: str, store: Path) -> None:
    size = 8 << 20
    for round_number in range(4):
        with engine(llama, store, extra={"local": {"capacity": size}}) as running:
            for seed in range(4):
                running.ask_one(prompt(10 * round_number + seed, 1000))
                assert sum(f.stat().st_size for f in stored_files(store)) <= size
            assert running.counter(metrics.USED_BYTES) <= size
    with engine(llama, store, extra={"local": {"capacity": size}}) as running:
        assert running.ask_one(prompt(33, 1000)).cached == 896, "the latest is still there"
