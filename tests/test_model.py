"""Planner and movers over real files, against a plain dict, while everything goes wrong.

A state machine plays an engine with one or two ranks: it saves and loads prompts, is killed
and restarted with another rank count, is reset, and runs into its cap, while files are
deleted, damaged and swapped, calls of the medium fail, time passes, and the background work
is turned by hand at odd moments. Whatever happens:

- what a load delivers is what the dict says for that key, and lands in no other block;
- bytes on the medium, counted from its files, never exceed the cap;
- every job ends exactly once, and every accepted save gets one last word of every rank;
- when all is quiet nothing is pinned, leased, reserved or pending.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from fx_kvbackend.records import (
    ChunkKey,
    Found,
    JobDone,
    LoadChunk,
    LoadFailure,
    Reason,
    SaveChunk,
    Shard,
)
from fx_kvbackend.store.chores import Chores
from fx_kvbackend.store.mover import Mover, MoverSettings
from fx_kvbackend.store.planner import Answer, Planner, PlannerSettings
from fx_kvbackend.testing.faults import Faulty, Over
from fx_kvbackend.tiers.directory import DirectoryTier
from tests.rig import CHUNK_BYTES, NAMESPACE, WHOLE, ArrayPages, Clock, geometry, kv_bytes, name

CAPACITY_BYTES = 8 * CHUNK_BYTES
BLOCKS = 20
BLOCKS_PER_CHUNK = 2
PAGES = {0: [64, 32], 1: [128]}
"""Canonical page sizes of the layers of each KV group; a chunk's number gives its group."""
PROMPTS = [[0, 1, 2, 3, 4, 5], [0, 1, 6, 7], [8, 9, 10, 11, 12], [13]]
"""Chunk numbers, heads first; two prompts share their head."""
RANKS = {
    "one rank": [(WHOLE, True)],
    "two ranks": [(Shard(0, 2), True), (Shard(1, 2), True)],
    "two ranks with the same bytes": [(WHOLE, True), (WHOLE, False)],
}
"""(its shard, whether it writes) of each rank."""
POISON = 0xDB
"""What lies in blocks that belong to nobody."""


def group_of(number: int) -> int:
    return number % len(PAGES)


def computed(weights: int, number: int, block: int, shard: Shard) -> bytes:
    """A rank's share of what the model computes for one block of a chunk."""
    out = b""
    for layer, size in enumerate(PAGES[group_of(number)]):
        page = kv_bytes((weights, number, block, layer), size)
        share = size // shard.count
        out += page[shard.index * share : (shard.index + 1) * share]
    return out


@dataclass(eq=False)
class Job:
    """A save or load under way: on which blocks of which chunks, and who is not done yet."""

    job_id: int
    is_load: bool
    blocks: dict[ChunkKey, tuple[int, ...]]
    first_blocks: dict[ChunkKey, int]
    weights: int
    ranks_left: set[int]
    failed: list[set[ChunkKey]]
    forgotten: bool = False
    """The host was reset meanwhile and asks for no more."""


class Meanwhile(Over):
    """A tier during whose next scan something happens, after the medium was read."""

    happens: Callable[[], None] | None = None

    def scan(self) -> Iterator[Found]:
        yield from list(self.tier.scan())
        happens, self.happens = self.happens, None
        if happens is not None:
            happens()


@dataclass
class Rank:
    """One worker process."""

    shard: Shard
    tier: Faulty
    pages: ArrayPages
    mover: Mover


@dataclass
class Engine:
    """One run of an engine, from start to stop or kill."""

    planner_tier: Faulty
    meanwhile: Meanwhile
    chores: Chores
    planner: Planner
    ranks: list[Rank]
    weights: int = 0
    free_blocks: list[int] = field(default_factory=lambda: list(range(BLOCKS)))
    jobs: dict[int, Job] = field(default_factory=dict)
    words_left: Counter[ChunkKey] = field(default_factory=Counter)
    requests: list[str] = field(default_factory=list)


class StoreMachine(RuleBasedStateMachine):
    seen: ClassVar[Counter[str]] = Counter()
    """What happened over all runs: a test in which nothing happens proves nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="fxkv-model-"))
        self.clock = Clock()
        self.ids = itertools.count(1)
        self.truth: dict[ChunkKey, int] = {}
        """The dict: with which weights each key was ever saved; `computed` gives the bytes."""
        self.engine = self.start("one rank")
        self.engine.chores.run_chores()

    def start(self, layout: str) -> Engine:
        meanwhile = Meanwhile(DirectoryTier(self.root, writable=False))
        planner_tier = Faulty(meanwhile)
        chores = Chores(planner_tier, clock=self.clock)
        shards = [shard for shard, _ in RANKS[layout]]
        planner = Planner(
            PlannerSettings(
                namespace=NAMESPACE,
                rank_count=len(shards),
                shard_count=shards[0].count,
                chunk_bytes=shards[0].count * CHUNK_BYTES,
                capacity_bytes=self.told_capacity_bytes(),
                free_floor_bytes=0,
            ),
            chores,
            clock=self.clock,
            new_namespace=lambda: f"{next(self.ids):032x}",
        )
        ranks = [self.start_rank(shard, writes) for shard, writes in RANKS[layout]]
        return Engine(planner_tier, meanwhile, chores, planner, ranks)

    def start_rank(self, shard: Shard, writes: bool) -> Rank:
        tier = Faulty(DirectoryTier(self.root, allow_direct=False))
        geometries = {
            group: geometry(sizes, group=group, blocks=BLOCKS_PER_CHUNK, shard=shard)
            for group, sizes in PAGES.items()
        }
        pages = ArrayPages(geometries, BLOCKS)
        for group, layers in pages.layers.items():
            for rows in layers:
                rows[:] = POISON
            assert pages.block(group, 0) == bytes([POISON] * geometries[group].block_bytes)
        mover = Mover(
            tier,
            pages,
            geometries,
            MoverSettings(shard, writes, 3 * CHUNK_BYTES, 30.0, 1, 1),
            clock=self.clock,
            start=False,
        )
        assert mover.arena.slot_count == 3
        return Rank(shard, tier, pages, mover)

    def told_capacity_bytes(self) -> int:
        return CAPACITY_BYTES

    # --- the host ---------------------------------------------------------------------

    def take_blocks(self, count: int) -> tuple[int, ...]:
        free = self.engine.free_blocks
        taken, self.engine.free_blocks = free[:count], free[count:]
        assert len(taken) == count
        return tuple(taken)

    def give_back(self, job: Job) -> None:
        for blocks in job.blocks.values():
            for block in blocks:
                for rank in self.engine.ranks:
                    for layers in rank.pages.layers.values():
                        for rows in layers:
                            rows[block] = POISON
            self.engine.free_blocks += blocks

    def save(self, numbers: list[int], request: str) -> None:
        engine = self.engine
        accepted = engine.planner.prepare_save([name(n) for n in numbers], request)
        if not accepted:
            self.seen["put off" if accepted is None else "nothing to save"] += 1
            return
        blocks = {chunk: self.take_blocks(BLOCKS_PER_CHUNK) for chunk, _ in accepted}
        self.seen["saves"] += len(accepted)
        self.seen["replacements"] += sum(overwrite for _, overwrite in accepted)
        job = self.new_job(False, blocks, {})
        for chunk, _ in accepted:
            assert engine.words_left[chunk] == 0, "accepted while it was being saved"
            engine.words_left[chunk] = len(engine.ranks)
            self.truth[chunk] = engine.weights
        for rank in engine.ranks:
            chunks = []
            for chunk, overwrite in accepted:
                number = number_of(chunk)
                group = group_of(number)
                for i, block in enumerate(blocks[chunk]):
                    kv = computed(engine.weights, number, i, rank.shard)
                    rank.pages.fill(group, block, kv)
                chunks.append(SaveChunk(chunk, group, blocks[chunk], overwrite))
            rank.mover.submit_save(job.job_id, chunks)

    def load(self, numbers: list[int], skip_blocks: int) -> None:
        """Load hits; the first `skip_blocks` blocks of the first chunk are there already."""
        engine = self.engine
        loads = engine.planner.prepare_load([name(n) for n in numbers])
        blocks, first_blocks = {}, {}
        for i, (chunk, count) in enumerate(loads):
            assert chunk in self.truth, "a hit for what was never saved"
            first_blocks[chunk] = 0 if i else skip_blocks
            blocks[chunk] = self.take_blocks(BLOCKS_PER_CHUNK - first_blocks[chunk])
            self.seen["loads from another rank count"] += count != engine.ranks[0].shard.count
        job = self.new_job(True, blocks, first_blocks)
        for rank in engine.ranks:
            rank.mover.submit_load(
                job.job_id,
                [
                    LoadChunk(
                        chunk, group_of(number_of(chunk)), first_blocks[chunk], blocks[chunk], count
                    )
                    for chunk, count in loads
                ],
            )

    def new_job(
        self,
        is_load: bool,
        blocks: dict[ChunkKey, tuple[int, ...]],
        first_blocks: dict[ChunkKey, int],
    ) -> Job:
        engine = self.engine
        ranks_left = set(range(len(engine.ranks)))
        failed: list[set[ChunkKey]] = [set() for _ in engine.ranks]
        job = Job(next(self.ids), is_load, blocks, first_blocks, engine.weights, ranks_left, failed)
        engine.jobs[job.job_id] = job
        return job

    def step(self) -> None:
        """One step of the engine: news of all ranks go to the planner."""
        engine = self.engine
        failures: list[LoadFailure] = []
        arrived = 0
        ended: list[Job] = []
        for number, rank in enumerate(engine.ranks):
            for done in rank.mover.poll():
                job = self.rank_done(number, done)
                arrived += done.is_load and len(job.blocks) - len(done.failures)
                failures += done.failures
                if not job.ranks_left:
                    ended.append(job)
            for report in rank.mover.take_reports():
                assert engine.words_left[report.key] > 0, "one word too many"
                engine.words_left[report.key] -= 1
                engine.planner.save_reported(report)
        if arrived:
            engine.planner.loads_succeeded()
        for failure in failures:
            self.seen[f"failed: {failure.reason}"] += 1
            engine.planner.load_failed(failure.key, failure.reason)
        for job in ended:
            if job.is_load:
                self.check_arrived(job)
                if not job.forgotten:
                    # As the host does it: in no order.
                    engine.planner.complete_load({chunk.name for chunk in job.blocks})
            self.give_back(job)
            del engine.jobs[job.job_id]
        engine.planner.tick()

    def rank_done(self, number: int, done: JobDone) -> Job:
        job = self.engine.jobs[done.job_id]
        assert number in job.ranks_left, "a job ended twice"
        assert done.is_load is job.is_load
        job.ranks_left.remove(number)
        for failure in done.failures:
            assert failure.block_ids == job.blocks[failure.key]
            assert failure.key not in job.failed[number]
            job.failed[number].add(failure.key)
        return job

    def check_arrived(self, job: Job) -> None:
        for number, rank in enumerate(self.engine.ranks):
            for chunk in job.blocks.keys() - job.failed[number]:
                for i, block in enumerate(job.blocks[chunk]):
                    at = job.first_blocks[chunk] + i
                    got = rank.pages.block(group_of(number_of(chunk)), block)
                    wanted = computed(self.truth[chunk], number_of(chunk), at, rank.shard)
                    assert got == wanted, "a hit returned other bytes"
                assert self.truth[chunk] == job.weights, "a hit of other weights"
                self.seen["chunks verified"] += 1

    # --- rules: the engine at work ----------------------------------------------------

    # Few rules with several ways each: the fewer there are, the more of them meet.

    @rule(
        prompt=st.sampled_from(PROMPTS),
        count=st.integers(1, 6),
        patient=st.sampled_from([True, True, False]),
        ahead=st.booleans(),
        skip_blocks=st.integers(0, BLOCKS_PER_CHUNK - 1),
        through=st.sampled_from(["", "load", "load save", "save", "load save finish", "finish"]),
    )
    def a_request(
        self,
        prompt: list[int],
        count: int,
        patient: bool,
        ahead: bool,
        skip_blocks: int,
        through: str,
    ) -> None:
        """It looks for its prompt, loads the hits and saves the rest, some of it at once."""
        engine = self.engine
        request = f"request {next(self.ids)}"
        engine.requests.append(request)
        if len(engine.free_blocks) < BLOCKS_PER_CHUNK * count:
            self.work()
        numbers = prompt[: min(count, len(engine.free_blocks) // BLOCKS_PER_CHUNK)]
        if ahead:
            engine.planner.expect([name(n) for n in prompt], request)
        hits = self.look(numbers, request, patient)
        if hits:
            self.load(hits, skip_blocks)
        if "load" in through:
            self.work()
        if len(hits) < len(numbers):
            self.save(numbers[len(hits) :], request)
        if "save" in through:
            self.work()
        if "finish" in through:
            engine.planner.finish_request(request)
            engine.requests.remove(request)

    def look(self, numbers: list[int], request: str, patient: bool) -> list[int]:
        """Those of the leading chunks that are hits."""
        hits: list[int] = []
        planner = self.engine.planner
        for number in numbers:
            answer = planner.lookup(name(number), request)
            if answer is Answer.RETRY and patient:
                self.engine.chores.run_probes()
                answer = planner.lookup(name(number), request)
                assert answer is not Answer.RETRY
            self.seen[f"answer: {answer.value}"] += 1
            if answer is not Answer.HIT:
                break
            hits.append(number)
        return hits

    @rule(
        what=st.lists(
            st.sampled_from(
                ["step", "copy", "write", "load", "movers", "probes", "chores", "finish", "wait"]
            ),
            min_size=1,
            max_size=4,
        ),
        which=st.integers(0, 100),
    )
    def the_engine_works(self, what: list[str], which: int) -> None:
        for one in what:
            self.work_on(one, which)

    def work_on(self, what: str, which: int) -> None:
        engine = self.engine
        rank = engine.ranks[which % len(engine.ranks)]
        match what:
            case "step":
                self.step()
            case "copy" | "write" | "load":
                getattr(rank.mover, f"run_{what}")()
            case "movers":
                for each in engine.ranks:
                    while each.mover.run_copy() | each.mover.run_write() | each.mover.run_load():
                        pass
            case "probes":
                engine.chores.run_probes()
            case "chores":
                engine.chores.run_chores()
            case "finish":
                if engine.requests:
                    request = engine.requests.pop(which % len(engine.requests))
                    engine.planner.finish_request(request)
            case "wait":  # as the host does before it reuses the blocks of an aborted load
                loads = [job.job_id for job in engine.jobs.values() if job.is_load]
                for each in engine.ranks:
                    each.mover.wait(loads)
            case _:
                raise AssertionError(what)

    def work(self) -> None:
        """All there is to do at the movers, and what came of it."""
        self.work_on("movers", 0)
        self.step()

    @rule(
        steps=st.lists(st.sampled_from(["movers", "step", "write", "probes", "load"]), max_size=4)
    )
    def scan_while_things_happen(self, steps: list[str]) -> None:
        engine = self.engine

        def happens() -> None:
            for step in steps:
                self.work_on(step, 0)

        engine.meanwhile.happens = happens
        with contextlib.suppress(OSError):
            engine.chores.scan()
        engine.meanwhile.happens = None

    @rule(seconds=st.sampled_from([0.5, 3.0, 6.0, 31.0, 61.0, 400.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.engine.chores.run_chores()

    # --- rules: what goes wrong -------------------------------------------------------

    @rule(
        kind=st.sampled_from(["delete", "flip", "cut", "swap"]),
        which=st.integers(0, 1000),
        other=st.integers(0, 1000),
        at=st.integers(0, CHUNK_BYTES - 1),
    )
    def a_file_suffers(self, kind: str, which: int, other: int, at: int) -> None:
        files = sorted(self.root.rglob("*.kv"))
        if not files:
            return
        path = files[which % len(files)]
        data = path.read_bytes()
        self.seen[f"a file suffers: {kind}"] += 1
        match kind:
            case "delete":
                path.unlink()
            case "flip" if at < len(data):
                flipped = data[at] ^ (1 << which % 8)
                rewrite(path, data[:at] + bytes([flipped]) + data[at + 1 :])
            case "cut":
                rewrite(path, data[:at])
            case "swap":
                second = files[other % len(files)]
                theirs = second.read_bytes()
                if len(theirs) == len(data):  # files do not grow by themselves
                    rewrite(path, theirs)
                    rewrite(second, data)

    @rule(
        rank=st.integers(0, 1),
        verb=st.sampled_from(["read", "write", "stored_bytes"]),
        fault=st.sampled_from([Reason.IO_ERROR, Reason.NO_FDS, Reason.NO_SPACE, "exception"]),
        times=st.integers(1, 3),
    )
    def calls_of_a_rank_will_fail(self, rank: int, verb: str, fault: str, times: int) -> None:
        tier = self.engine.ranks[rank % len(self.engine.ranks)].tier
        raised = ZeroDivisionError("injected")
        tier.fail(verb, raised if fault == "exception" else Reason(fault), times=times)

    # Not "delete": what cannot be deleted takes room until a scan has seen it again.
    @rule(
        verb=st.sampled_from(["find", "scan", "space", "touch", "sweep"]),
        raising=st.booleans(),
    )
    def a_call_of_the_planner_will_fail(self, verb: str, raising: bool) -> None:
        self.engine.planner_tier.fail(verb, OSError("injected") if raising else Reason.IO_ERROR)

    @rule(
        how=st.sampled_from(["carry on", "carry on", "carry on", "kill", "stop", "reset"]),
        layout=st.sampled_from(sorted(RANKS)),
        scanned=st.sampled_from([True, True, True, False]),
    )
    def the_end_of_a_run(self, how: str, layout: str, scanned: bool) -> None:
        self.seen[how] += 1
        match how:
            case "carry on":
                return
            case "reset":
                self.reset()
                return
            case "stop":
                self.settle()
        self.stop()
        self.engine = self.start(layout)
        if scanned:
            self.engine.chores.run_chores()

    def reset(self) -> None:
        engine = self.engine
        engine.planner.reset()
        engine.weights = next(self.ids)  # the reason for a reset
        for job in engine.jobs.values():
            job.forgotten = True

    # --- what always holds ------------------------------------------------------------

    def medium_bytes(self) -> int:
        """Counted from the files, temporary ones too, by nothing of ours."""
        total = 0
        for directory, _, files in os.walk(self.root):
            total += sum(
                os.stat(os.path.join(directory, file)).st_size
                for file in files
                if not file.endswith((".lock", ".json"))
            )
        return total

    @invariant()
    def the_cap_holds(self) -> None:
        assert self.medium_bytes() <= CAPACITY_BYTES, "more bytes than the cap allows"

    @invariant()
    def the_books_never_say_less_than_there_is(self) -> None:
        if self.engine.planner._limits_known:  # the first scan has been taken in
            assert self.engine.planner.used_bytes >= self.medium_bytes()

    @invariant()
    def free_blocks_are_left_alone(self) -> None:
        for rank in self.engine.ranks:
            for group, layers in rank.pages.layers.items():
                for rows in layers:
                    touched = (rows[self.engine.free_blocks] != POISON).any()
                    assert not touched, f"group {group}: written into blocks of nobody"

    @invariant()
    def numbers_are_plausible(self) -> None:
        engine = self.engine
        left = sum(1 for count in engine.words_left.values() if count)
        assert engine.planner.pending_saves >= left
        assert engine.planner.used_bytes >= 0
        assert engine.planner._evicting_bytes >= 0
        assert all(entry.pins >= 0 for _, entry in engine.planner._index)
        for rank in engine.ranks:
            assert 0 <= rank.mover.arena.free_count <= rank.mover.arena.slot_count

    # --- the end ----------------------------------------------------------------------

    def settle(self) -> None:
        """Let everything come to rest, and check that nothing is left over."""
        engine = self.engine
        for request in engine.requests:
            engine.planner.finish_request(request)
        engine.requests.clear()
        for _ in range(4):
            self.work()
            engine.chores.run_probes()
            engine.chores.run_chores()
            engine.planner.tick()
        assert engine.jobs == {}, "a job never ended"
        assert +engine.words_left == Counter(), "a save without its last word"
        assert engine.planner.pending_saves == 0
        assert not engine.planner.has_pending_work()
        assert sum(entry.pins for _, entry in engine.planner._index) == 0, "pinned for ever"
        assert engine.planner._evicting_bytes == 0
        assert engine.planner._requests == {}
        assert engine.planner._asking == {}
        assert sorted(engine.free_blocks) == list(range(BLOCKS))
        for rank in engine.ranks:
            assert rank.mover.arena.free_count == rank.mover.arena.slot_count, "a slot leaked"
        self.the_cap_holds()

    def stop(self) -> None:
        for rank in self.engine.ranks:
            rank.mover.close()
        for metric, _, value in self.engine.planner.tally.drain():
            if metric.name == "fxkv:evictions" and isinstance(value, int | float):
                self.seen["evictions"] += int(value)
        self.engine.planner.close()

    def read_all_back(self) -> None:
        """Whatever is a hit at the end is right, and the books agree with the medium."""
        engine = self.engine
        self.clock.advance(1000.0)  # over any pause
        for rank in engine.ranks:
            rank.tier._scripts.clear()
        engine.planner_tier._scripts.clear()
        for _ in range(3):
            self.clock.advance(61.0)
            self.settle()
        assert engine.planner.used_bytes == self.medium_bytes()
        for number in sorted({n for prompt in PROMPTS for n in prompt}):
            if self.look([number], f"{number} at the end", patient=True):
                self.load([number], 0)
                self.work()

    def teardown(self) -> None:
        try:
            if sys.exc_info()[0] is None:  # a failure in a rule must not be hidden by another
                self.settle()
                self.read_all_back()
            self.stop()
        finally:
            shutil.rmtree(self.root, ignore_errors=True)


def number_of(chunk: ChunkKey) -> int:
    return int.from_bytes(chunk.name[:4], "big")


def rewrite(path: Path, data: bytes) -> None:
    """Change a file's bytes, but not when it was last used."""
    info = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))


_SETTINGS = settings(
    stateful_step_count=80,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Thousands of injected failures would be thousands of warnings."""
    caplog.set_level(logging.CRITICAL, logger="fx_kvbackend")


def test_a_hit_never_returns_other_bytes_and_the_books_are_right() -> None:
    seen = StoreMachine.seen
    seen.clear()
    run_state_machine_as_test(StoreMachine, settings=_SETTINGS)
    assert seen["chunks verified"] > 100, "nothing was tested"
    assert seen["evictions"] > 10, "the cap was never reached"


def test_everything_the_machine_is_about_comes_about() -> None:
    """A run by hand through all that chance may or may not meet."""
    machine = StoreMachine()
    seen = machine.seen
    seen.clear()

    def request(prompt: list[int], through: str = "load save finish") -> None:
        machine.a_request(
            prompt=prompt, count=6, patient=True, ahead=True, skip_blocks=1, through=through
        )
        machine.the_engine_works(what=["probes"], which=0)

    prompt = PROMPTS[2]
    request(prompt)
    request(prompt)
    assert (seen["saves"], seen["answer: hit"], seen["chunks verified"]) == (5, 5, 5)
    damage = [("flip", 4100, "corrupt"), ("cut", 100, "truncated"), ("swap", 0, "mismatch")]
    for kind, at, reason in [*damage, ("delete", 0, "absent")]:
        machine.a_file_suffers(kind=kind, which=0, other=1, at=at)
        request(prompt)
        assert seen[f"failed: {reason}"] > 0
        request(prompt)  # saves them anew
        before = seen["chunks verified"]
        request(prompt)
        assert seen["chunks verified"] == before + 5
    assert seen["replacements"] >= 3
    for rank_count in ("two ranks", "two ranks with the same bytes", "one rank"):
        machine.the_end_of_a_run(how="kill", layout=rank_count, scanned=True)
        request(prompt, "load")
        assert seen["loads from another rank count"] == 5
    machine.the_end_of_a_run(how="reset", layout="", scanned=True)
    hits = seen["answer: hit"]
    request(prompt)
    assert seen["answer: hit"] == hits, "a hit of other weights"
    for other in PROMPTS:
        request(other, "save")
        machine.time_passes(seconds=3.0)
    machine.the_engine_works(what=["movers", "step", "finish", "chores", "step"], which=0)
    machine.scan_while_things_happen(steps=["step"])
    machine.the_cap_holds()
    machine.the_books_never_say_less_than_there_is()
    machine.teardown()
    assert seen["evictions"] > 0


# --- negative controls: what the machine must not let pass -------------------------------


class OverALiar(StoreMachine):
    """The tier hands out other bytes and calls them verified."""

    def start_rank(self, shard: Shard, writes: bool) -> Rank:
        rank = super().start_rank(shard, writes)
        rank.tier.lie()
        return rank


class WithAGreedyPlanner(StoreMachine):
    """The planner thinks the cap is twice as high."""

    def told_capacity_bytes(self) -> int:
        return 2 * CAPACITY_BYTES


class WithoutReports(StoreMachine):
    """What the movers say of their saves is lost."""

    def start_rank(self, shard: Shard, writes: bool) -> Rank:
        rank = super().start_rank(shard, writes)
        rank.mover.take_reports = list  # type: ignore[method-assign]
        return rank


@pytest.mark.parametrize(
    ("machine", "complaint"),
    [
        (OverALiar, "a hit returned other bytes"),
        (WithAGreedyPlanner, "more bytes than the cap allows"),
        (WithoutReports, "a save without its last word"),
    ],
)
def test_the_machine_fails_over_what_is_broken_on_purpose(
    machine: type[StoreMachine], complaint: str
) -> None:
    once = settings(_SETTINGS, phases=[Phase.generate], report_multiple_bugs=False)
    with pytest.raises(AssertionError, match=complaint):
        run_state_machine_as_test(machine, settings=once)
