"""vLLM's OffloadingWorker over our mover: block lists become chunks here.

vLLM asserts that no transfer fails, so every job is reported as a success and failures
travel beside it: blocks or requests to the engine (`take_failed_blocks`,
`take_failed_requests`), chunks to the planner (`take_news`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from fx_kvbackend.core.geometry import Geometry, Page, Run
from fx_kvbackend.errors import Bug, HostError
from fx_kvbackend.records import (
    LoadChunk,
    LoadFailure,
    Reason,
    SaveChunk,
    SaveReport,
    Shard,
)
from fx_kvbackend.store.mover import Mover
from fx_kvbackend.vllm_adapter.manager import LoadSpec, SaveSpec

log = logging.getLogger(__name__)


@dataclass
class News:
    """What one worker tells the planner after a step; sums up over workers."""

    reports: list[SaveReport] = field(default_factory=list)
    failures: list[tuple[str, LoadFailure]] = field(default_factory=list)
    """(request id, failure)"""
    loaded_chunks: int = 0
    loaded_bytes: int = 0
    load_seconds: list[float] = field(default_factory=list)
    cpu_seconds: float = 0.0

    def add(self, other: News) -> None:
        """Take in another worker's news."""
        self.reports += other.reports
        self.failures += other.failures
        self.loaded_chunks += other.loaded_chunks
        self.loaded_bytes += other.loaded_bytes
        self.load_seconds += other.load_seconds
        self.cpu_seconds += other.cpu_seconds

    def __bool__(self) -> bool:
        return bool(self.reports or self.failures or self.load_seconds)


class FxWorker(OffloadingWorker):
    """Runs in each worker process, on its main thread."""

    def __init__(self, mover: Mover, geometries: dict[int, Geometry]) -> None:
        self._mover = mover
        self._geometries = geometries
        """by group id, in the order of the host's group lists"""
        self._loads: dict[int, LoadSpec] = {}
        self._results: list[TransferResult] = []
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self._news = News()
        self._cpu_sent_s = 0.0

    @override
    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        if not isinstance(dst_spec, SaveSpec):
            raise Bug(f"store job with {type(dst_spec).__name__}")
        chunks: list[SaveChunk] = []
        for group, start, block_ids in self._by_group(src_spec):
            wanted = [c for c in dst_spec.chunks if c[1] == group]
            pieces = _cut(start, block_ids, self._geometries[group].blocks)
            if len(pieces) != len(wanted):
                pieces = [(0, ())] * len(wanted)
            for (key, _, overwrite), (_, blocks) in zip(wanted, pieces, strict=True):
                if len(blocks) == self._geometries[group].blocks:
                    chunks.append(SaveChunk(key, group, blocks, overwrite))
                else:
                    # A sliding window has moved past the front of this chunk.
                    self._news.reports.append(SaveReport(key, Reason.PARTIAL, 0, 0))
        self._mover.submit_save(job_id, chunks)
        return True

    @override
    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        # `expedited` (vLLM 0.33) is for loads within a step, which need a setting that we refuse.
        if not isinstance(src_spec, LoadSpec):
            raise Bug(f"load job with {type(src_spec).__name__}")
        chunks: list[LoadChunk] = []
        for group, start, block_ids in self._by_group(dst_spec):
            wanted = [c for c in src_spec.chunks if c[1] == group]
            pieces = _cut(start, block_ids, self._geometries[group].blocks)
            if len(pieces) != len(wanted):
                raise Bug(f"group {group}: {len(wanted)} chunks for {len(pieces)} stretches")
            for (key, _, count), (first, blocks) in zip(wanted, pieces, strict=True):
                chunks.append(LoadChunk(key, group, first, blocks, count))
        self._loads[job_id] = src_spec
        self._mover.submit_load(job_id, chunks)
        return True

    @override
    def get_finished(self) -> list[TransferResult]:
        for done in self._mover.poll():
            if done.is_load:
                spec = self._loads.pop(done.job_id)
                self._news.loaded_chunks += len(spec.chunks) - len(done.failures)
                self._news.loaded_bytes += done.moved_bytes
                self._news.load_seconds.append(done.duration_s)
                for failure in done.failures:
                    self._failed_blocks.update(failure.block_ids)
                    self._failed_requests.add(spec.req_id)
                    self._news.failures.append((spec.req_id, failure))
            self._results.append(
                TransferResult(done.job_id, True, done.moved_bytes, done.duration_s)
            )
        results, self._results = self._results, []
        return results

    @override
    def wait(self, job_ids: set[int]) -> None:
        self._mover.wait(job_ids)

    @override
    def shutdown(self) -> None:
        self._mover.close()

    def take_failed_blocks(self) -> set[int]:
        """Blocks that hold no KV although their load is over; emptied by the call."""
        blocks, self._failed_blocks = self._failed_blocks, set()
        return blocks

    def take_failed_requests(self) -> set[str]:
        """Requests of which some chunk did not arrive; emptied by the call."""
        requests, self._failed_requests = self._failed_requests, set()
        return requests

    def take_news(self) -> News | None:
        """What the planner must hear; emptied by the call, None when there is nothing."""
        self._news.reports += self._mover.take_reports()
        if not self._news:
            return None
        cpu_s = self._mover.cpu_seconds()
        self._news.cpu_seconds, self._cpu_sent_s = cpu_s - self._cpu_sent_s, cpu_s
        news, self._news = self._news, News()
        return news

    def _by_group(self, spec: GPULoadStoreSpec) -> list[tuple[int, int, tuple[int, ...]]]:
        """(group, index of its first block in the request, block ids) of each group."""
        out, at = [], 0
        for group, size, start in zip(
            self._geometries, spec.group_sizes, spec.block_indices, strict=True
        ):
            ids = tuple(int(b) for b in spec.block_ids[at : at + size])
            out.append((group, start, ids))
            at += size
        return out


def _cut(
    start: int, block_ids: Sequence[int], blocks_per_chunk: int
) -> list[tuple[int, tuple[int, ...]]]:
    """Blocks of a request, from its block `start` on, by chunk: (first block in it, ids)."""
    out: list[tuple[int, tuple[int, ...]]] = []
    at, first = 0, start % blocks_per_chunk
    while at < len(block_ids):
        take = blocks_per_chunk - first
        out.append((first, tuple(block_ids[at : at + take])))
        at, first = at + take, 0
    return out


def geometries_of(
    kv_caches: CanonicalKVCaches, group_ids: Sequence[int], blocks: int, *, canonical: bool
) -> tuple[dict[int, Geometry], Any | None]:
    """Chunk geometry by group, and one page's canonical mapping when all are certified.

    With `canonical` and a layer that vLLM cannot map, pages carry no runs: such chunks are
    read back by the same tensor-parallel size only.
    """
    refs = [ref for group in kv_caches.group_data_refs for ref in group]
    mappings = [ref.mapping for ref in refs]
    first = mappings[0]
    certified = canonical and all(
        m is not None
        and first is not None
        and m.parallelism_agnostic
        and (m.num_writers, m.writer_index) == (first.num_writers, first.writer_index)
        for m in mappings
    )
    geometries = {
        group_id: Geometry(
            group_id,
            blocks,
            tuple(
                _page(ref.mapping) if certified else Page(ref.page_size_bytes) for ref in group_refs
            ),
        )
        for group_id, group_refs in zip(group_ids, kv_caches.group_data_refs, strict=True)
    }
    return geometries, first if certified else None


def shard_of(
    mapping: Any | None, rank: int, world_size: int, *, replicated: bool
) -> tuple[Shard, bool]:
    """This rank's share of every chunk, and whether it is the one that writes it."""
    if mapping is not None:
        writers = mapping.num_writers
        return Shard(rank // writers, world_size // writers), mapping.writer_index == 0
    if replicated:
        return Shard(0, 1), rank == 0
    return Shard(rank, world_size), True


def require_canonical(mapping: Any | None) -> None:
    """Raise HostError when the canonical layout was asked for and cannot be had."""
    if mapping is None:
        raise HostError(
            "vLLM cannot certify parallelism-free KV pages for this model and attention "
            'backend; set layout to "direct" or "auto"'
        )


def _page(mapping: Any) -> Page:
    runs = tuple(
        Run(
            run.local_offset,
            run.canonical_offset,
            run.fragment_size,
            run.num_fragments,
            run.local_stride,
            run.canonical_stride,
        )
        for run in mapping.runs
    )
    return Page(mapping.local_page_size_bytes, mapping.canonical_page_size_bytes, runs)
