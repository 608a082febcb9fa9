"""Engines in processes of their own: killed, sharing a store, cut over two ranks."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from tests.engine import chunks
from tests.engine.child import Child
from tests.engine.harness import stored_files
from tests.engine.models import BLOCK, prompt

pytestmark = pytest.mark.vllm

TP2 = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
TP2_ENV = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
PROMPTS = [prompt(seed, 700 + 100 * seed) for seed in range(4)]
HITS = [len(p) // BLOCK * BLOCK for p in PROMPTS]


def test_killed_while_saving_then_asked_again(llama: str, store: Path) -> None:
    """SIGKILL at a random moment of a busy engine: what is published hits, all is right."""
    dice = random.Random(3)
    with Child(llama, store).ready() as child:
        child.start_asking(PROMPTS * 3, max_tokens=200)
        time.sleep(0.2 + dice.random())
        child.kill()
    published = stored_files(store)
    for file in published:
        chunks.read(file)
    with Child(llama, store).ready() as child:
        answers = child.ask(PROMPTS)
        assert sum(a.cached for a in answers) >= min(1, len(published))
        assert [a.tokens for a in child.ask(PROMPTS)] == [a.tokens for a in answers]
    assert not list(store.glob("tmp/*/*")) or _only_of_last_child(store)


def _only_of_last_child(store: Path) -> bool:
    """The second child was killed too; its own place is swept at the next start."""
    return len(list(store.glob("tmp/*.lock"))) <= 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["TERM", "KILL"])
def test_restart_with_the_engine_in_its_own_process(number: int, llama: str, store: Path) -> None:
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with Child(llama, store, env=env).ready() as first:
        assert [a.cached for a in first.ask(PROMPTS)] == [0] * 4
        local = first.ask(PROMPTS)
        first.stop(number)
    with Child(llama, store, env=env).ready() as second:
        assert second.ask(PROMPTS) == local
        assert [a.cached for a in local] == HITS


def test_two_servers_on_one_directory_hit_each_other_at_once(llama: str, store: Path) -> None:
    with Child(llama, store) as left, Child(llama, store) as right:
        left.ready()
        right.ready()
        for turn in range(3):
            ours, theirs = prompt(10 + turn, 900), prompt(20 + turn, 900)
            # Asked for before it is there: a miss must not be remembered for later requests.
            assert right.ask([ours])[0].cached == 0
            right.reset_local()
            written = left.ask([theirs])
            assert right.ask([theirs])[0].cached == 7 * BLOCK
            assert left.ask([ours])[0].cached == 7 * BLOCK
            assert written[0].tokens == right.ask([theirs])[0].tokens


def test_two_ranks_and_from_one_to_two_and_back(llama: str, store: Path) -> None:
    by_one, by_two = PROMPTS[:2], PROMPTS[2:]
    with Child(llama, store).ready() as one:
        one.ask(by_one)
    with Child(llama, store, env=TP2_ENV, **TP2).ready() as two:
        crossed = two.ask(by_one)
        assert [a.cached for a in crossed] == HITS[:2], "two ranks read what one wrote"
        reference = _local_answers(two, by_one)
        assert [a.tokens for a in crossed] == [a.tokens for a in reference]
        two.ask(by_two)
        local = two.ask(by_two)
        two.reset_local()
        assert two.ask(by_two) == local, "two ranks read what they wrote"
    assert any("of2" in file.parts for file in stored_files(store))
    with Child(llama, store).ready() as one:
        crossed = one.ask(by_two)
        assert [a.cached for a in crossed] == HITS[2:], "one rank reads what two wrote"
        reference = _local_answers(one, by_two)
        assert [a.tokens for a in crossed] == [a.tokens for a in reference]
    with Child(llama, store, env=TP2_ENV, **TP2).ready() as two:
        assert two.ask(by_two) == local, "after a restart too"
        # A chunk is a hit only when every rank has its part.
        lost = [f for f in stored_files(store) if f.name.endswith(".1.kv")]
        assert lost
        for file in lost:
            file.unlink()
        two.reset_local()
        assert [a.tokens for a in two.ask(by_two)] == [a.tokens for a in local]
    with Child(llama, store, env=TP2_ENV, **TP2).ready() as two:
        assert [a.cached for a in two.ask(by_two)] == HITS[2:], "recomputed and saved again"


def _local_answers(child: Child, prompts: list[list[int]]) -> list:
    """Answers on KV that this engine computed itself, at the depth of a hit."""
    child.ask(prompts, cache_salt="reference")
    return child.ask(prompts, cache_salt="reference")
