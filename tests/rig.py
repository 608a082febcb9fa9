"""What tests of planner and mover share: a clock, KV pages in numpy, and a planner on a tier.

Nothing here has threads: the crank of the planner's background work is turned by hand.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from fx_kvbackend.core import format as chunkfile
from fx_kvbackend.core.geometry import Copy, Geometry, Page, Run
from fx_kvbackend.core.index import Entry
from fx_kvbackend.engines.buffers import aligned
from fx_kvbackend.metrics import Metric
from fx_kvbackend.records import ChunkKey, Reason, SaveReport, Shard
from fx_kvbackend.store.chores import Chores
from fx_kvbackend.store.planner import Answer, Planner, PlannerSettings
from fx_kvbackend.testing.faults import DictTier, Faulty, Medium
from fx_kvbackend.tiers.base import Tier

NAMESPACE = "ab" * 16
WHOLE = Shard(0, 1)
CHUNK_BYTES = 2 * chunkfile.ALIGN_BYTES
"""What one shard of the small chunks here takes on a medium: a page of header, one of data."""


def name(number: int) -> bytes:
    """A chunk's name, as long as a host's digest with a group number."""
    return number.to_bytes(4, "big") * 8 + bytes(4)


def names(*numbers: int) -> list[bytes]:
    return [name(number) for number in numbers]


def key(number: int, namespace: str = NAMESPACE) -> ChunkKey:
    return ChunkKey(namespace, name(number))


def kv_bytes(seed: object, n_bytes: int) -> bytes:
    """Bytes that depend on `seed` alone: what a model would compute for it."""
    digest = xxhash.xxh3_64_intdigest(repr(seed).encode())
    return np.random.Generator(np.random.PCG64(digest)).bytes(n_bytes)


def chunk_file(chunk: ChunkKey, shard: Shard = WHOLE, payload: bytes = b"kv") -> memoryview:
    """A sealed chunk file of CHUNK_BYTES."""
    buffer = aligned(CHUNK_BYTES)
    head = chunkfile.header_bytes(len(chunk.name), 2, len(payload))
    buffer[head : head + len(payload)] = payload
    assert chunkfile.seal(buffer, chunk, shard, b"{}", len(payload)) == CHUNK_BYTES
    return buffer


class Clock:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


class ArrayPages:
    """KV pages in numpy. Implements `engines.pages.Pages` without torch."""

    def __init__(self, geometries: Mapping[int, Geometry], blocks: int) -> None:
        self.layers = {
            group: [np.zeros((blocks, page.page_bytes), np.uint8) for page in geometry.pages]
            for group, geometry in geometries.items()
        }

    def mark(self) -> Any:
        return None

    def block(self, group: int, block: int) -> bytes:
        return b"".join(rows[block].tobytes() for rows in self.layers[group])

    def fill(self, group: int, block: int, data: bytes) -> None:
        at = 0
        for rows in self.layers[group]:
            rows[block] = np.frombuffer(data[at : at + rows.shape[1]], np.uint8)
            at += rows.shape[1]
        assert at == len(data)

    def gather(self, group: int, block_ids: Sequence[int], out: memoryview, after: Any) -> None:
        out[:] = b"".join(self.block(group, block) for block in block_ids)

    def scatter(
        self, group: int, block_ids: Sequence[int], payload: memoryview, after: Any = None
    ) -> None:
        size = len(payload) // len(block_ids)
        for i, block in enumerate(block_ids):
            self.fill(group, block, bytes(payload[i * size : (i + 1) * size]))

    def scatter_pieces(
        self,
        group: int,
        block_ids: Sequence[int],
        payload: memoryview,
        stored_block_bytes: int,
        copies: Sequence[Copy],
        after: Any = None,
    ) -> None:
        for i, block in enumerate(block_ids):
            for layer, start, to, length in copies:
                at = i * stored_block_bytes + start
                piece = np.frombuffer(payload[at : at + length], np.uint8)
                self.layers[group][layer][block, to : to + length] = piece


def geometry(
    page_bytes: Iterable[int], *, group: int = 0, blocks: int = 2, shard: Shard = WHOLE
) -> Geometry:
    """One rank's share of layers whose canonical pages have these sizes."""
    pages = []
    for canonical in page_bytes:
        size = canonical // shard.count
        run = Run(0, shard.index * size, size, 1, size, size)
        pages.append(Page(size, canonical, (run,)))
    return Geometry(group, blocks, tuple(pages))


class Bench:
    """A planner over a tier, its background work turned by hand, its ranks played here."""

    def __init__(
        self,
        *,
        medium: Medium | None = None,
        tier: Tier | None = None,
        clock: Clock | None = None,
        ranks: int = 1,
        capacity_bytes: int | None = 100 * CHUNK_BYTES,
        free_floor_bytes: int | None = 0,
        scanned: bool = True,
        wants_events: bool = True,
    ) -> None:
        self.medium = medium or Medium()
        self.clock = clock or Clock()
        self.ranks = ranks
        ticks = itertools.count()
        first = max((stored.used_s for stored in self.medium.shards.values()), default=0.0) + 1
        # Every look at this clock is later: two uses never happen at the same time.
        self.tier = Faulty(tier or DictTier(self.medium, clock=lambda: first + next(ticks)))
        self.chores = Chores(self.tier, clock=self.clock)
        namespaces = itertools.count(1)
        self.planner = Planner(
            PlannerSettings(
                namespace=NAMESPACE,
                rank_count=ranks,
                shard_count=ranks,
                chunk_bytes=ranks * CHUNK_BYTES,
                capacity_bytes=capacity_bytes,
                free_floor_bytes=free_floor_bytes,
            ),
            self.chores,
            clock=self.clock,
            new_namespace=lambda: f"{next(namespaces):032x}",
            wants_events=wants_events,
        )
        if scanned:
            self.chores.run_chores()
            self.planner.tick()

    # --- one step ---------------------------------------------------------------------

    def crank(self) -> None:
        """Do all background work that is asked for, and take in what it says."""
        self.chores.run_probes()
        self.chores.run_chores()
        self.planner.tick()

    def scan(self) -> None:
        """Let the time for a scan come, and scan."""
        self.clock.advance(61.0)
        self.crank()

    def lookup(self, number: int, request: str = "r") -> Answer:
        return self.planner.lookup(name(number), request)

    def found(self, number: int, request: str = "asking") -> Answer:
        """The answer when everybody has had time to look."""
        if self.lookup(number, request) is Answer.RETRY:
            self.chores.run_probes()
        return self.lookup(number, request)

    def hits(self, numbers: Iterable[int], request: str = "asking") -> list[int]:
        """Those that are a hit once everybody has looked."""
        return [n for n in numbers if self.found(n, request) is Answer.HIT]

    def prepare(self, *numbers: int, request: str = "r") -> list[tuple[ChunkKey, bool]]:
        accepted = self.planner.prepare_save(names(*numbers), request)
        assert accepted is not None, "put off"
        return accepted

    def write(self, chunk: ChunkKey, *, overwrite: bool = False) -> None:
        """What every rank's mover does with an accepted save."""
        for rank in range(self.ranks):
            shard = Shard(rank, self.ranks)
            assert (
                self.tier.write(chunk, shard, chunk_file(chunk, shard), overwrite=overwrite) is None
            )
            self.report(chunk)

    def report(self, chunk: ChunkKey, reason: Reason | None = None) -> None:
        """One rank's last word on a save."""
        stored = 0 if reason else CHUNK_BYTES
        self.planner.save_reported(SaveReport(chunk, reason, self.ranks, stored))

    # --- whole flows ------------------------------------------------------------------

    def save(self, *numbers: int, request: str = "saving") -> list[int]:
        """Save chunks in one request, as often as it is put off; those that were accepted."""
        out = []
        accepted = self.planner.prepare_save(names(*numbers), request)
        for _ in range(10):
            if accepted is not None:
                break
            self.crank()
            accepted = self.planner.prepare_save(names(*numbers), request)
        assert accepted is not None, "put off again and again"
        for chunk, overwrite in accepted:
            self.write(chunk, overwrite=overwrite)
            out.append(int.from_bytes(chunk.name[:4], "big"))
        self.planner.finish_request(request)
        return out

    def load(self, *numbers: int, fail: Reason | None = None) -> list[tuple[ChunkKey, int]]:
        """Load chunks, all of which fail with `fail` when that is given."""
        loads = self.planner.prepare_load(names(*numbers))
        if fail is None:
            self.planner.loads_succeeded()
        for chunk, _ in loads:
            if fail is not None:
                self.planner.load_failed(chunk, fail)
        self.planner.complete_load(names(*numbers))
        return loads

    # --- what there is ----------------------------------------------------------------

    def stored(self, namespace: str = NAMESPACE) -> set[int]:
        """Numbers of the chunks on the medium, whole or in part."""
        return {
            int.from_bytes(chunk.name[:4], "big")
            for chunk, _ in self.medium.shards
            if chunk.namespace == namespace
        }

    def entry(self, number: int) -> Entry | None:
        return self.planner._index.get(ChunkKey(self.planner.namespace, name(number)))

    @property
    def pins(self) -> int:
        return sum(entry.pins for _, entry in self.planner._index)

    def counts(self) -> dict[tuple[str, ...], float | list[float]]:
        """(metric, labels...) -> change since the last call."""
        self.planner.refresh_gauges()
        return {(m.name, *labels): value for m, labels, value in self.planner.tally.drain()}

    def count(self, metric: Metric, *labels: str) -> float:
        """Change of one metric since the last call of `counts` or `count`."""
        value = self.counts().get((metric.name, *labels), 0)
        assert isinstance(value, int | float)
        return value
