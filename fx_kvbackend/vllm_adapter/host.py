"""What we ask of vLLM's interfaces, checked at start and by the signature test.

`USED` lists every vLLM name that this room overrides, calls or reads, with the parameters
that we rely on. An upgrade that renames one is refused in one sentence instead of failing
in the middle of a request.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from fx_kvbackend.errors import HostError

MIN_VERSION = (0, 32)
BELOW_VERSION = (0, 34)

_OFFLOAD = "vllm.v1.kv_offload"
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector"
_SCHEDULER = f"{_CONNECTOR}.v1.offloading.scheduler"

USED: dict[str, dict[str, tuple[str, ...]]] = {
    # module -> dotted name -> parameters, or fields of a dataclass; () asks for the name only
    f"{_CONNECTOR}.v1.offloading_connector": {
        "OffloadingConnector.__init__": ("vllm_config", "role", "kv_cache_config"),
        "OffloadingConnector.build_connector_worker_meta": (),
        "OffloadingConnector.update_connector_output": ("connector_output",),
        "OffloadingConnector.on_new_request": ("request",),
        "OffloadingConnector.build_prom_metrics": (
            "vllm_config",
            "metric_types",
            "labelnames",
            "per_engine_labelvalues",
        ),
    },
    f"{_CONNECTOR}.v1.base": {
        "KVConnectorBase_V1.get_transfer_results": ("finished_req_ids",),
        "KVConnectorBase_V1.get_block_ids_with_load_errors": (),
        "KVConnectorTransferResults": ("finished_recving", "failed_recving"),
        "KVConnectorRole.SCHEDULER": (),
        "KVConnectorWorkerMetadata": (),
    },
    f"{_CONNECTOR}.factory": {
        "KVConnectorFactory.register_connector": ("name", "module_path", "class_name"),
        "KVConnectorFactory._registry": (),
    },
    f"{_CONNECTOR}.v1.offloading.common": {
        "OffloadingWorkerMetadata": ("completed_jobs", "transfer_stats"),
        "OffloadingWorkerMetadata.aggregate": ("other",),
    },
    f"{_CONNECTOR}.v1.offloading.config": {
        "build_offloading_config": ("vllm_config", "kv_cache_config"),
    },
    f"{_CONNECTOR}.v1.offloading.canonical_mapping": {
        "canonical_format_id": ("kv_cache_layout",),
    },
    f"{_CONNECTOR}.v1.offloading.metrics": {
        "OffloadingConnectorStats.increase_counter": (
            "counter_name",
            "counter_increase_value",
            "labelvalues",
        ),
        "OffloadingConnectorStats.set_gauge": ("gauge_name", "gauge_value", "labelvalues"),
        "OffloadingConnectorStats.observe_histogram": (
            "histogram_name",
            "histogram_value",
            "labelvalues",
        ),
    },
    _SCHEDULER: {
        "GroupOffloadConfig": ("group_idx", "hashes_per_chunk"),
        "RequestGroupState": ("next_stored_chunk_idx",),
        "RequestOffloadState": ("group_states",),
        "OffloadingConnectorScheduler.__init__": ("spec", "vllm_config", "kv_cache_config"),
    },
    f"{_OFFLOAD}.base": {
        "OffloadingManager.lookup": ("key", "req_context"),
        "OffloadingManager.get_load_source": ("key", "req_context"),
        "OffloadingManager.prepare_load": ("keys", "req_context"),
        "OffloadingManager.complete_load": ("keys", "req_context"),
        "OffloadingManager.prepare_store": ("keys", "req_context"),
        "OffloadingManager.on_new_request": ("req_context",),
        "OffloadingManager.on_request_finished": ("req_context",),
        "OffloadingManager.on_schedule_end": ("context",),
        "OffloadingManager.has_pending_work": (),
        "OffloadingManager.take_events": (),
        "OffloadingManager.reset_cache": (),
        "OffloadingManager.get_stats": (),
        "OffloadingManager.shutdown": (),
        "OffloadingWorker.submit_store": ("job_id", "src_spec", "dst_spec"),
        "OffloadingWorker.submit_load": ("job_id", "src_spec", "dst_spec"),
        "OffloadingWorker.get_finished": (),
        "OffloadingWorker.wait": ("job_ids",),
        "OffloadingWorker.shutdown": (),
        "OffloadingSpec.__init__": ("config",),
        "OffloadingSpec.build_metric_definitions": ("extra_config",),
        "OffloadingSpec.get_manager": (),
        "OffloadingSpec.get_worker": ("kv_caches",),
        "GPULoadStoreSpec.__init__": ("block_ids", "group_sizes", "block_indices"),
        "LoadStoreSpec": (),
        "LookupResult.HIT": (),
        "LookupResult.HIT_PENDING": (),
        "LookupResult.RETRY": (),
        "LookupResult.MISS": (),
        "Locality.LOCAL": (),
        "Medium.STORAGE": (),
        "OffloadKey": (),
        "OffloadingEvent": ("keys", "medium", "removed", "locality"),
        "PrepareStoreOutput": ("keys_to_store", "store_spec", "evicted_keys"),
        "ReqContext": ("req_id",),
        "ReqContext.set_state": ("val",),
        "ReqContext.get_state": ("cls",),
        "RequestOffloadingContext": (),
        "ScheduleEndContext": (),
        "TransferResult": ("job_id", "success", "transfer_size", "transfer_time"),
        "CanonicalKVCaches": ("tensors", "group_data_refs"),
        "CanonicalKVCacheTensor": ("tensor", "page_size_bytes"),
        "CanonicalKVCacheRef": ("tensor_idx", "page_size_bytes", "mapping"),
        "CanonicalPageMapping": (
            "canonical_page_size_bytes",
            "local_page_size_bytes",
            "runs",
            "num_writers",
            "writer_index",
            "parallelism_agnostic",
        ),
        "CopyRun": (
            "local_offset",
            "canonical_offset",
            "fragment_size",
            "num_fragments",
            "local_stride",
            "canonical_stride",
        ),
        "OffloadingMetricMetadata": ("documentation", "labelnames"),
        "OffloadingCounterMetadata": ("documentation", "labelnames"),
        "OffloadingGaugeMetadata": ("documentation", "labelnames"),
        "OffloadingHistogramMetadata": ("documentation", "labelnames", "buckets"),
        "get_offload_group_idx": ("key",),
        "make_offload_key": ("block_hash", "group_idx"),
    },
    f"{_OFFLOAD}.config": {
        "OffloadingConfig": (
            "groups",
            "worker_kv_bytes_per_block",
            "extra_config",
            "cache",
            "parallel",
            "replicated_layout",
            "canonical_layout",
            "kv_cache_layout",
        ),
        "OffloadingParallelConfig": ("rank", "world_size", "tp_size", "is_parallelism_agnostic"),
    },
    "vllm.lora.request": {"LoRARequest": ("lora_int_id", "lora_path", "load_inplace")},
    "vllm.platforms": {"current_platform": ()},
    "vllm.v1.core.kv_cache_utils": {"resolve_none_hash_seed": ("hash_fn",)},
    "vllm.config.kv_transfer": {
        "KVTransferConfig": ("kv_connector_extra_config", "kv_load_failure_policy"),
        "KVTransferConfig.is_kv_consumer": (),
        "KVTransferConfig.is_kv_producer": (),
    },
    "vllm.utils.hashing": {"get_hash_fn_by_name": ("hash_fn_name",)},
    "vllm.v1.metrics.cache_hit_source": {"CacheHitSource.DISK": ()},
    "vllm.v1.kv_cache_interface": {"MambaSpec": (), "FullAttentionSpec": ()},
}


def check_host() -> str:
    """The version of vLLM around us, when we can work with it.

    Raises HostError in one sentence otherwise.
    """
    import vllm

    version = str(vllm.__version__)
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    supported = (
        f"{'.'.join(map(str, MIN_VERSION))} up to but not including "
        f"{'.'.join(map(str, BELOW_VERSION))}"
    )
    if not MIN_VERSION <= numbers < BELOW_VERSION:
        raise HostError(f"vLLM {version} is not supported; install vLLM {supported}")
    missing = missing_names()
    if missing:
        raise HostError(
            f"vLLM {version} lacks what this connector builds on ({', '.join(missing)}); "
            f"install an unmodified vLLM {supported}"
        )
    return version


def missing_names() -> list[str]:
    """Names and parameters of `USED` that the installed vLLM does not have."""
    out = []
    for module_name, names in USED.items():
        module = importlib.import_module(module_name)
        for dotted, parameters in names.items():
            try:
                found: Any = module
                for part in dotted.split("."):
                    found = getattr(found, part)
            except AttributeError:
                out.append(f"{module_name}.{dotted}")
                continue
            known = _parameters(found) if parameters else set()
            out += [f"{module_name}.{dotted}({p})" for p in parameters if p not in known]
    return out


def _parameters(found: Any) -> set[str]:
    fields = getattr(found, "__dataclass_fields__", None) or getattr(found, "_fields", None)
    if fields is not None:
        return set(fields)
    return set(inspect.signature(found).parameters)
