"""FxKVConnector: vLLM's OffloadingConnector with our planner and mover behind it.

vLLM keeps its scheduler side (sliding windows, Mamba, preemption fences). Added here: one
connector name is the whole configuration, and a failed load is recomputed instead of
ending the engine.
"""

from __future__ import annotations

import copy
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
    build_offloading_config,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.kv_offload.base import make_offload_key

from fx_kvbackend import config as settings
from fx_kvbackend import metrics
from fx_kvbackend.config import AUTO, Config
from fx_kvbackend.errors import Bug, ConfigError
from fx_kvbackend.vllm_adapter import identity
from fx_kvbackend.vllm_adapter.host import check_host
from fx_kvbackend.vllm_adapter.manager import FxManager
from fx_kvbackend.vllm_adapter.plugin import use_host_logging
from fx_kvbackend.vllm_adapter.spec import FxSpec, Setup, building
from fx_kvbackend.vllm_adapter.worker import FxWorker, News

log = logging.getLogger(__name__)

_AUTO_CHUNK_BYTES = 4 << 20
_AUTO_CHUNK_TOKENS = 256
_SPEC = {"spec_name": FxSpec.__name__, "spec_module_path": FxSpec.__module__}
_LOGGED: set[int] = set()


@dataclass
class FxWorkerMetadata(OffloadingWorkerMetadata):
    """vLLM's completions of a step, and our news beside them."""

    news: News = field(default_factory=News)

    @override
    def aggregate(self, other: KVConnectorWorkerMetadata) -> FxWorkerMetadata:
        merged = super().aggregate(other)
        if not isinstance(merged, OffloadingWorkerMetadata):
            raise Bug(f"merged into {type(merged).__name__}")
        news = News()
        for part in (self, other):
            if isinstance(part, FxWorkerMetadata):
                news.add(part.news)
        return FxWorkerMetadata(merged.completed_jobs, merged.transfer_stats, news)


class FxKVConnector(OffloadingConnector):
    """KV cache in tiers outside the GPU, for vLLM's `--kv-transfer-config`."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        use_host_logging()
        check_host()
        transfer = vllm_config.kv_transfer_config
        loaded = settings.load(_ours(transfer.kv_connector_extra_config), os.environ)
        config = loaded.config
        _log_once(loaded)
        if role == KVConnectorRole.SCHEDULER:
            _choose_failure_policy(transfer, config)
        setup_config = _prepare(vllm_config, kv_cache_config, config)
        with building(Setup(config, setup_config, kv_cache_config)):
            super().__init__(setup_config, role, kv_cache_config)
        self._group_count = len(kv_cache_config.kv_cache_groups)
        self._salts: dict[tuple[int, str], bytes] = {}

    # --- scheduler side ---------------------------------------------------------------

    @property
    def _manager(self) -> FxManager:
        manager = self.scheduler.manager
        if not isinstance(manager, FxManager):
            raise Bug(f"manager is {type(manager).__name__}")
        return manager

    @override
    def on_new_request(self, request: Any) -> None:
        lora = request.lora_request
        if lora is not None:
            at = (lora.lora_int_id, lora.lora_path)
            if lora.load_inplace or at not in self._salts:
                self._salts[at] = identity.lora_salt(lora)
            self._manager.salt_request(request.request_id, self._salts[at])
        super().on_new_request(request)
        # Ask for the chunks now: the answers are there when the request is scheduled.
        for group in self.scheduler.config.kv_group_configs:
            step = group.hashes_per_chunk
            hashes = request.block_hashes[step - 1 :: step]
            keys = [make_offload_key(block_hash, group.group_idx) for block_hash in hashes]
            self._manager.expect(request.request_id, keys)

    @override
    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, FxWorkerMetadata):
            self._take_in(meta.news)
        super().update_connector_output(connector_output)

    def _take_in(self, news: News) -> None:
        planner = self._manager.planner
        for report in news.reports:
            planner.save_reported(report)
        if news.loaded_chunks:
            planner.loads_succeeded()
        for req_id, failure in news.failures:
            planner.load_failed(failure.key, failure.reason)
            self._save_again(req_id)
        planner.tally.add(metrics.LOADS, news.loaded_chunks)
        planner.tally.add(metrics.LOADED_BYTES, news.loaded_bytes)
        planner.tally.add(metrics.THREAD_CPU_SECONDS, news.cpu_seconds)
        for seconds in news.load_seconds:
            planner.tally.observe(metrics.LOAD_SECONDS, seconds)

    def _save_again(self, req_id: str) -> None:
        """Let a request offer its chunks anew: those that failed are being recomputed.

        vLLM has moved its mark past them already. The request is parked now and its block
        lists are empty, so every block in them later is checked for reuse from here on.
        """
        status = self.scheduler._req_status.get(req_id)
        for state in status.group_states if status is not None else ():
            state.next_stored_chunk_idx = 0

    # --- worker side ------------------------------------------------------------------

    @property
    def _worker(self) -> FxWorker:
        worker = self.connector_worker.worker if self.connector_worker is not None else None
        if not isinstance(worker, FxWorker):
            raise Bug(f"worker is {type(worker).__name__}")
        return worker

    @override
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        failed = self._worker.take_failed_requests()
        if self._group_count > 1:
            results.failed_recving |= failed
        return results

    @override
    def get_block_ids_with_load_errors(self) -> set[int]:
        blocks = self._worker.take_failed_blocks()
        # Block ids name a request's blocks only where there is one group of them.
        return blocks if self._group_count == 1 else set()

    @override
    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        meta = super().build_connector_worker_meta()
        news = self._worker.take_news() if self.connector_worker is not None else None
        if meta is None and news is None:
            return None
        # Ours even without news: a plain one would lose those of the rank it is merged with.
        meta = meta or OffloadingWorkerMetadata()
        return FxWorkerMetadata(meta.completed_jobs, meta.transfer_stats, news or News())

    # --- front end --------------------------------------------------------------------

    @classmethod
    @override
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> Any:
        _unregister_metrics()
        with_spec = _with_extra(vllm_config, _SPEC)
        return super().build_prom_metrics(
            with_spec, metric_types, labelnames, per_engine_labelvalues
        )


def _unregister_metrics() -> None:
    """Make room for the metrics of another engine in this process, as vLLM does for its own."""
    import prometheus_client

    ours = {metric.name for metric in metrics.ALL}
    for collector in list(prometheus_client.REGISTRY._collector_to_names):
        if getattr(collector, "_name", None) in ours:
            prometheus_client.REGISTRY.unregister(collector)


def _ours(extra: Mapping[str, Any]) -> dict[str, Any]:
    """The operator's settings, without names of vLLM's own offloading.

    Raises ConfigError for those that we set ourselves.
    """
    instead = {
        "block_size": "chunk_tokens",
        "blocks_per_chunk": "chunk_tokens",
        "canonical_layout": "layout",
        "offload_prompt_only": "save_generated",
        "cpu_bytes_to_use": "staging",
    }
    for name, ours in instead.items():
        if name in extra:
            raise ConfigError(
                f'kv_connector_extra_config: {name}: unknown setting, did you mean "{ours}"?'
            )
    return {k: v for k, v in extra.items() if k != "self_describing_kv_events"}


def _log_once(loaded: settings.Loaded) -> None:
    """Log the effective configuration once per process (a fork is another process)."""
    if os.getpid() in _LOGGED:
        return
    _LOGGED.add(os.getpid())
    for line in loaded.lines():
        log.info("setting %s", line)


def _choose_failure_policy(transfer: Any, config: Config) -> None:
    """Make vLLM recompute what fails to load, unless the operator wants requests to fail.

    vLLM's own default is "fail", made for disaggregated prefill. An operator's "fail" can be
    told from the default only where it stands on the command line.
    """
    explicit = any("kv_load_failure_policy" in argument for argument in sys.argv)
    if config.load_failure_policy == "fail" or (
        explicit and transfer.kv_load_failure_policy == "fail"
    ):
        transfer.kv_load_failure_policy = "fail"
        log.warning("requests whose KV fails to load will end with an error, as configured")
    elif transfer.kv_load_failure_policy != "recompute":
        transfer.kv_load_failure_policy = "recompute"
        log.info(
            "kv_load_failure_policy is now recompute: a bad or missing chunk costs its "
            'recomputation, not the request (load_failure_policy = "fail" keeps vLLM\'s default)'
        )


def _with_extra(vllm_config: Any, extra: Mapping[str, Any]) -> Any:
    """A shallow copy of the configuration whose connector settings are `extra`."""
    out = copy.copy(vllm_config)
    out.kv_transfer_config = copy.copy(vllm_config.kv_transfer_config)
    out.kv_transfer_config.kv_connector_extra_config = dict(extra)
    return out


def _prepare(vllm_config: Any, kv_cache_config: Any, config: Config) -> Any:
    """The configuration that vLLM's offloading is to see: its names, our choices."""
    theirs = vllm_config.kv_transfer_config.kv_connector_extra_config
    extra: dict[str, Any] = {
        **_SPEC,
        "offload_prompt_only": not config.save_generated,
        "self_describing_kv_events": theirs.get("self_describing_kv_events", False),
        "canonical_layout": config.layout != "direct",
        "blocks_per_chunk": 1,
    }
    trial = build_offloading_config(_with_extra(vllm_config, extra), kv_cache_config)
    if config.layout == AUTO:
        extra["canonical_layout"] = trial.parallel.is_parallelism_agnostic
    extra["blocks_per_chunk"] = _blocks_per_chunk(trial, kv_cache_config, config)
    return _with_extra(vllm_config, extra)


def _blocks_per_chunk(offloading: Any, kv_cache_config: Any, config: Config) -> int:
    block_tokens = {group.tokens_per_block for group in offloading.groups}
    recurrent = any(
        isinstance(kv_cache_config.kv_cache_groups[g.group_id].kv_cache_spec, MambaSpec)
        for g in offloading.groups
    )
    if config.chunk_tokens == AUTO:
        if recurrent:
            return 1  # a recurrent state is stored at block ends; a chunk has one end
        wanted = -(-_AUTO_CHUNK_BYTES // max(1, offloading.worker_kv_bytes_per_block))
        return int(max(1, min(wanted, _AUTO_CHUNK_TOKENS // max(block_tokens))))
    if len(block_tokens) != 1 or recurrent:
        raise ConfigError(
            f"chunk_tokens: this model's KV groups have blocks of {sorted(block_tokens)} tokens; "
            'leave it at "auto"'
        )
    (tokens,) = block_tokens
    if config.chunk_tokens % tokens:
        nearest = max(1, round(config.chunk_tokens / tokens)) * tokens
        raise ConfigError(
            f"chunk_tokens: {config.chunk_tokens} is not a multiple of the engine's block of "
            f"{tokens} tokens; the nearest is {nearest}"
        )
    return int(config.chunk_tokens // tokens)
