"""What makes stored bytes valid for an engine: the manifest, and the namespace digest.

Block hashes already cover tokens, LoRA name and path, multimodal inputs and cache_salt.
The manifest covers the rest. Two engines with equal manifests may read each other's
chunks; in any other case they never meet. The environment is read, never changed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import re
from pathlib import Path
from typing import Any

from fx_kvbackend.core import format as chunkfile
from fx_kvbackend.engines import weights
from fx_kvbackend.errors import HostError

log = logging.getLogger(__name__)

# Where a model came from and which library saved it do not change its KV.
_NOT_IDENTITY = frozenset(
    {"_name_or_path", "name_or_path", "transformers_version", "architectures"}
)


def namespace_of(manifest: dict[str, object]) -> str:
    """32 hex digits that name everything in the manifest."""
    canonical = json.dumps(manifest, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()[:32]


def build_manifest(vllm_config: Any, kv_cache_config: Any, offloading: Any) -> dict[str, object]:
    """Everything that makes bytes valid beyond the block hash, as plain JSON values.

    `offloading` is vLLM's OffloadingConfig. Raises HostError for set-ups under which keys
    or bytes differ from process to process.
    """
    import vllm

    model, cache = vllm_config.model_config, vllm_config.cache_config
    canonical = offloading.canonical_layout
    parallel = offloading.parallel
    manifest: dict[str, object] = {
        "format": chunkfile.VERSION,
        "vllm": ".".join(str(vllm.__version__).split(".")[:2]),
        "weights": _weights(model, vllm_config.load_config),
        "config": _config_digest(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv_dtype": str(cache.cache_dtype),
        "quantization": str(model.quantization),
        "groups": [
            _group(kv_cache_config.kv_cache_groups[g.group_id], canonical, model)
            for g in offloading.groups
        ],
        "chunk_tokens": [
            g.tokens_per_block * offloading.cache.blocks_per_chunk for g in offloading.groups
        ],
        "layout": _layout(offloading),
        "ranks": (
            "canonical"
            if canonical
            else f"tp{parallel.tp_size} pp{parallel.pp_size} pcp{parallel.pcp_size} "
            f"dcp{parallel.dcp_size}"
        ),
        "block_hash": f"{cache.prefix_caching_hash_algo} {_seed_digest(cache)}",
        "tokens_per_hash": offloading.cache.tokens_per_hash,
        "device": _device(model, cache),
    }
    return manifest


def lora_salt(lora_request: Any) -> bytes:
    """Digest of an adapter's content: the same name and path may hold other weights later."""
    path = Path(lora_request.lora_path)
    found = weights.fingerprint(path) if path.exists() else None
    return hashlib.sha256((found or f"name:{lora_request.lora_path}").encode()).digest()


def _weights(model: Any, load_config: Any) -> str:
    if str(load_config.load_format).endswith("dummy"):
        return f"dummy seed {model.seed}"
    path = Path(model.model)
    try:
        if not path.exists():
            path = _hub_snapshot(model) or path
        found = weights.fingerprint(path) if path.exists() else None
    except OSError as exc:
        log.warning("cannot read the weights under %s (%s)", path, exc)
        found = None
    if found is None:
        log.warning(
            "the weights of %s cannot be fingerprinted from here; its name and revision stand "
            "for them, so do not change the weights behind that name",
            model.model,
        )
        return f"name:{model.model}@{model.revision}"
    return found


def _hub_snapshot(model: Any) -> Path | None:
    """Where the hub cache holds this repository, if it does."""
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(model.model, "config.json", revision=model.revision)
    except ValueError:  # not a repository name
        return None
    return Path(found).parent if isinstance(found, str) else None


def _config_digest(model: Any) -> str:
    """Digest of the model configuration in force, with the operator's overrides."""
    tree = _without(model.hf_config.to_dict())
    if "longrope" in json.dumps(tree, default=str) or "dynamic" in json.dumps(tree, default=str):
        # These rotate keys differently beyond a length, so the limit is part of the bytes.
        tree["max_model_len"] = model.max_model_len
    canonical = json.dumps(tree, sort_keys=True, default=str)
    # Addresses of objects that only have a default repr would differ per process.
    canonical = re.sub(r" at 0x[0-9a-f]+", "", canonical)
    return hashlib.sha256(canonical.encode()).hexdigest()[:32]


def _without(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {k: _without(v) for k, v in tree.items() if k not in _NOT_IDENTITY}
    if isinstance(tree, list):
        return [_without(v) for v in tree]
    return tree


def _group(group: Any, canonical: bool, model: Any) -> dict[str, object]:
    spec = group.kv_cache_spec
    fields = {
        f.name: re.sub(r" at 0x[0-9a-f]+", "", str(getattr(spec, f.name)))
        for f in dataclasses.fields(spec)
    }
    if canonical:
        # Canonical pages hold all heads, however many one rank has.
        fields["num_kv_heads"] = f"all {model.get_total_num_kv_heads()}"
        fields.pop("page_size_padded", None)
    return {"kind": type(spec).__name__, "layers": len(group.layer_names), **fields}


def _layout(offloading: Any) -> str:
    if not offloading.canonical_layout:
        return f"direct {offloading.kv_cache_layout}"
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import (
        canonical_format_id,
    )

    return f"canonical {canonical_format_id(offloading.kv_cache_layout)}"


def _seed_digest(cache: Any) -> str:
    """Digest of the root of vLLM's block hash chain. The seed itself may be a secret.

    Raises HostError when the root is random, so that no other process could find a chunk.
    """
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

    hash_fn = get_hash_fn_by_name(cache.prefix_caching_hash_algo)
    # Resolved twice: a random root is the one that differs.
    seed, again = resolve_none_hash_seed(hash_fn), resolve_none_hash_seed(hash_fn)
    if seed != again:
        raise HostError(
            f"--prefix-caching-hash-algo {cache.prefix_caching_hash_algo} gives every process "
            "other block hashes, so nothing stored would be found again; use sha256 (the "
            "default), or set PYTHONHASHSEED to the same number for every engine"
        )
    return hashlib.sha256(seed.encode()).hexdigest()[:16]


def _device(model: Any, cache: Any) -> str:
    """Kind of device, as far as it decides how KV is laid out in a page."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return str(current_platform.device_type)
    # The CPU attention packs keys differently per instruction set.
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(model.dtype, cache.block_size, model.get_head_size(), cache.cache_dtype)
    return f"cpu {current_platform.get_cpu_architecture().name.lower()} {isa}"
