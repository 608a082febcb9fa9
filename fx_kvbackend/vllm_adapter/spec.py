"""vLLM's OffloadingSpec: builds planner and mover from what the connector prepared."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from typing_extensions import override
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig

from fx_kvbackend import metrics
from fx_kvbackend.config import Config
from fx_kvbackend.core import format as chunkfile
from fx_kvbackend.engines.pages import pages_for
from fx_kvbackend.errors import Bug
from fx_kvbackend.store.build import build_mover, build_planner
from fx_kvbackend.vllm_adapter.identity import build_manifest, namespace_of
from fx_kvbackend.vllm_adapter.manager import FxManager
from fx_kvbackend.vllm_adapter.plugin import unbound_threads
from fx_kvbackend.vllm_adapter.worker import (
    FxWorker,
    geometries_of,
    require_canonical,
    shard_of,
)

log = logging.getLogger(__name__)

# Room for the header of a chunk file, beyond its first page, in the planner's upper bound.
_HEADER_BOUND_BYTES = 4 * chunkfile.ALIGN_BYTES


@dataclass(frozen=True)
class Setup:
    """What the connector knows and vLLM does not pass through to a spec."""

    config: Config
    vllm_config: Any
    kv_cache_config: Any


_setup: ContextVar[Setup] = ContextVar("fx_kvbackend_setup")


@contextlib.contextmanager
def building(setup: Setup) -> Iterator[None]:
    """While inside, FxSpec is built from `setup`."""
    token = _setup.set(setup)
    try:
        yield
    finally:
        _setup.reset(token)


class FxSpec(OffloadingSpec):
    """See OffloadingSpec. Built by FxKVConnector only."""

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self._setup = _setup.get()
        # With one copy of equal bytes, vLLM hands saves to rank 0 only.
        self.replicated_layout = config.replicated_layout and not config.canonical_layout

    @classmethod
    @override
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        out: dict[str, OffloadingMetricMetadata] = {}
        for metric in metrics.ALL:
            match metric.kind:
                case "counter":
                    out[metric.name] = OffloadingCounterMetadata(metric.doc, metric.labels)
                case "gauge":
                    out[metric.name] = OffloadingGaugeMetadata(metric.doc, metric.labels)
                case "histogram":
                    out[metric.name] = OffloadingHistogramMetadata(
                        metric.doc, metric.labels, metric.buckets
                    )
        return out

    @override
    def get_manager(self) -> OffloadingManager:
        setup, parallel = self._setup, self.config.parallel
        manifest = build_manifest(setup.vllm_config, setup.kv_cache_config, self.config)
        namespace = namespace_of(manifest)
        log.info("namespace %s (what it stands for: namespace.json in it)", namespace)
        page_bytes = self.config.worker_kv_bytes_per_block * self.blocks_per_chunk
        per_rank = chunkfile.align_up(page_bytes) + _HEADER_BOUND_BYTES
        ranks = 1 if self.replicated_layout else parallel.world_size
        planner = build_planner(
            setup.config,
            namespace,
            manifest,
            rank_count=ranks,
            shard_count=ranks,
            chunk_bytes=per_rank * ranks,
            wants_events=self.kv_events_config.enable_kv_cache_events,
        )
        transfer = setup.vllm_config.kv_transfer_config
        return FxManager(
            planner,
            loads=transfer.is_kv_consumer,
            saves=transfer.is_kv_producer,
        )

    @override
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        config, parallel = self._setup.config, self.config.parallel
        group_ids = [group.group_id for group in self.config.groups]
        geometries, mapping = geometries_of(
            kv_caches, group_ids, self.blocks_per_chunk, canonical=self.config.canonical_layout
        )
        if config.layout == "canonical":
            require_canonical(mapping)
        elif self.config.canonical_layout and mapping is None:
            log.info("KV pages are not certified: chunks are for this tensor-parallel size only")
        shard, writes = shard_of(
            mapping, parallel.rank, parallel.world_size, replicated=self.replicated_layout
        )
        groups = {
            group_id: [
                (kv_caches.tensors[ref.tensor_idx].tensor, ref.page_size_bytes) for ref in refs
            ]
            for group_id, refs in zip(group_ids, kv_caches.group_data_refs, strict=True)
        }
        for group_id, geometry in geometries.items():
            if geometry.block_bytes > self.config.worker_kv_bytes_per_block:
                raise Bug(
                    f"group {group_id}: {geometry.block_bytes} bytes per block, planned with "
                    f"{self.config.worker_kv_bytes_per_block}"
                )
        with unbound_threads():
            mover = build_mover(config, pages_for(groups), geometries, shard, writes=writes)
        return FxWorker(mover, geometries)
