"""vLLM's OffloadingManager over our planner: words are translated here, nothing decided."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_group_idx,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from fx_kvbackend.metrics import Tally
from fx_kvbackend.records import ChunkKey
from fx_kvbackend.store.planner import Answer, Planner

_RESULT = {
    Answer.HIT: LookupResult.HIT,
    Answer.PENDING: LookupResult.HIT_PENDING,
    Answer.RETRY: LookupResult.RETRY,
    Answer.MISS: LookupResult.MISS,
}
_GROUP_BYTES = 4


@dataclass
class LoadSpec(LoadStoreSpec):
    """Planner to worker: chunks to load, in the host's order, for one request."""

    req_id: str
    chunks: list[tuple[ChunkKey, int, int]]
    """(key, group, shard count of the stored copy)"""


@dataclass
class SaveSpec(LoadStoreSpec):
    """Planner to worker: chunks to save, in the host's order."""

    chunks: list[tuple[ChunkKey, int, bool]]
    """(key, group, replace what is stored)"""


@dataclass(frozen=True)
class _Salt:
    """Kept in a request's context: what its keys are mixed with."""

    salt: bytes


class FxManager(OffloadingManager):
    """Runs in the scheduler's process, on its thread."""

    def __init__(self, planner: Planner, *, loads: bool, saves: bool) -> None:
        self.planner = planner
        self._loads = loads
        self._saves = saves
        self._salts: dict[str, bytes] = {}

    def salt_request(self, req_id: str, salt: bytes) -> None:
        """Mix `salt` into all keys of a request that is about to be announced."""
        self._salts[req_id] = salt

    def expect(self, req_id: str, keys: Iterable[OffloadKey]) -> None:
        """Begin to look for the chunks of a request that was just announced."""
        if not self._loads:
            return
        salt = self._salts.get(req_id)
        self.planner.expect((_mix(key, salt) for key in keys), req_id)

    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        salt = self._salts.get(req_context.req_id)
        if salt is not None:
            req_context.set_state(_Salt(salt))
        return RequestOffloadingContext()

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if not self._loads:
            return LookupResult.MISS
        return _RESULT[self.planner.lookup(_name(key, req_context), req_context.req_id)]

    @override
    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        return CacheHitSource.DISK

    @override
    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadSpec:
        found = self.planner.prepare_load([_name(key, req_context) for key in keys])
        groups = (get_offload_group_idx(key) for key in keys)
        chunks = [(key, group, count) for (key, count), group in zip(found, groups, strict=True)]
        return LoadSpec(req_context.req_id, chunks)

    @override
    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.planner.complete_load([_name(key, req_context) for key in keys])

    @override
    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        names = {_name(key, req_context): key for key in keys if self._saves}
        accepted = self.planner.prepare_save(list(names), req_context.req_id)
        if accepted is None:
            return None
        keys_to_store = [names[key.name] for key, _ in accepted]
        chunks = [
            (key, get_offload_group_idx(names[key.name]), overwrite) for key, overwrite in accepted
        ]
        return PrepareStoreOutput(keys_to_store, SaveSpec(chunks), evicted_keys=[])

    # complete_store is not overridden: the host calls it when blocks are released, and a
    # chunk is a hit only when every rank reports it published.

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        self._salts.pop(req_context.req_id, None)
        self.planner.finish_request(req_context.req_id)

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self.planner.tick()

    @override
    def has_pending_work(self) -> bool:
        return self.planner.has_pending_work()

    @override
    def take_events(self) -> Iterable[OffloadingEvent]:
        events, self.planner.events = self.planner.events, []
        return [
            OffloadingEvent(
                [OffloadKey(key.name)], Medium.STORAGE, removed=removed, locality=Locality.LOCAL
            )
            for key, removed in events
            if key.namespace == self.planner.namespace
        ]

    @override
    def reset_cache(self) -> None:
        self.planner.reset()

    @override
    def get_stats(self) -> OffloadingConnectorStats | None:
        self.planner.refresh_gauges()
        return _stats(self.planner.tally)

    @override
    def shutdown(self) -> None:
        self.planner.close()


def _name(key: OffloadKey, req_context: ReqContext) -> bytes:
    state = req_context.get_state(_Salt)
    return _mix(key, state.salt if state else None)


def _mix(key: OffloadKey, salt: bytes | None) -> bytes:
    if salt is None:
        return bytes(key)
    block_hash, group = key[:-_GROUP_BYTES], key[-_GROUP_BYTES:]
    return hashlib.sha256(salt + block_hash).digest() + group


def _stats(tally: Tally) -> OffloadingConnectorStats | None:
    changes = tally.drain()
    if not changes:
        return None
    stats = OffloadingConnectorStats()
    for metric, labels, value in changes:
        if isinstance(value, list):
            for one in value:
                stats.observe_histogram(metric.name, one, labels)
        elif metric.kind == "gauge":
            stats.set_gauge(metric.name, value, labels)
        else:
            stats.increase_counter(metric.name, value, labels)
    return stats
