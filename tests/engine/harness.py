"""A real vLLM engine in this process, and the oracle that judges it.

The oracle: vLLM itself may answer differently after a cold run and after a cached one, so an
answer from stored KV is compared with one from a *local* prefix-cache hit at the same depth.
The order matters: cold, local hit, reset, external hit. A local hit taken later would be on
blocks that were loaded, and compare them with themselves.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

# Far above what any test needs, on a machine that is busy with other work too.
_LIMIT_S = 300.0


def _steps() -> Iterator[None]:
    """Goes on for a long time, pausing like vLLM's own loop when there is nothing to compute."""
    give_up_s = time.monotonic() + _LIMIT_S
    while time.monotonic() < give_up_s:
        yield
        time.sleep(0.001)


@dataclass(frozen=True)
class Answer:
    """Tokens of one answer, and how many prompt tokens came from a cache."""

    tokens: tuple[int, ...]
    cached: int


class Engine:
    """One engine; `close` makes room for the next in the same process."""

    def __init__(
        self,
        model: str,
        store: Path | None,
        *,
        extra: dict[str, Any] | None = None,
        connector: str = "FxKVConnector",
        module: str | None = None,
        policy: str | None = None,
        role: str = "kv_both",
        **kwargs: Any,
    ) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        if store is not None:
            settings: dict[str, Any] = {
                "local": {"path": str(store), "capacity": "2GiB", "free_floor": 0},
                "staging": "64MiB",
                "chunk_tokens": 128,
            }
            for name, value in (extra or {}).items():
                if isinstance(value, dict):
                    settings[name] = {**settings.get(name, {}), **value}
                else:
                    settings[name] = value
            more: dict[str, Any] = {} if policy is None else {"kv_load_failure_policy": policy}
            kwargs["kv_transfer_config"] = KVTransferConfig(
                kv_connector=connector,
                kv_role=role,  # type: ignore[arg-type]
                kv_connector_module_path=module,
                kv_connector_extra_config=settings,
                **more,
            )
        options: dict[str, Any] = {
            "dtype": "float32",
            "max_model_len": 8192,
            "max_num_seqs": 32,
            "disable_log_stats": False,
            **kwargs,
        }
        try:
            self.llm = LLM(model, skip_tokenizer_init=True, enforce_eager=True, **options)
        except BaseException:
            _forget_engine()
            raise
        self.core: Any = self.llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
        self.scheduler: Any = self.core.scheduler
        self._requests = 0

    # --- asking -----------------------------------------------------------------------

    def params(self, max_tokens: int) -> Any:
        """Greedy, and never stopping early."""
        from vllm import SamplingParams

        return SamplingParams(
            temperature=0, max_tokens=max_tokens, detokenize=False, ignore_eos=True
        )

    def ask(
        self, prompts: Sequence[Sequence[int]], max_tokens: int = 8, **prompt_fields: Any
    ) -> list[Answer]:
        """Answers to all prompts, run together; returns with every save published."""
        outputs = self.llm.generate(
            [{"prompt_token_ids": list(p), **prompt_fields} for p in prompts],  # type: ignore[arg-type]
            self.params(max_tokens),
            use_tqdm=False,
        )
        self.settle()
        return [Answer(tuple(o.outputs[0].token_ids), o.num_cached_tokens or 0) for o in outputs]

    def ask_one(self, prompt: Sequence[int], max_tokens: int = 8, **fields: Any) -> Answer:
        """The answer to one prompt."""
        return self.ask([prompt], max_tokens, **fields)[0]

    def add(self, prompt: Sequence[int], max_tokens: int = 8) -> str:
        """Queue a request without running the engine; its id."""
        self._requests += 1
        request_id = f"r{self._requests}"
        self.llm.llm_engine.add_request(
            request_id,
            {"prompt_token_ids": list(prompt)},
            self.params(max_tokens),
        )
        return request_id

    def step(self) -> list[Any]:
        """One step; the finished outputs."""
        return [o for o in self.llm.llm_engine.step() if o.finished]

    def abort(self, request_ids: Sequence[str]) -> None:
        """Abort requests as a client that hangs up does."""
        self.llm.llm_engine.abort_request(list(request_ids))

    def finish(self) -> dict[str, Any]:
        """Step until nothing is left; finished outputs by request id."""
        done: dict[str, Any] = {}
        for _ in _steps():
            if not self.llm.llm_engine.has_unfinished_requests():
                self.settle()
                return done
            done.update({o.request_id: o for o in self.step()})
        raise AssertionError("requests did not finish")

    def settle(self) -> None:
        """Step until every accepted save is published."""
        for _ in _steps():
            if not self.scheduler.has_requests():
                return
            self.llm.llm_engine.step()
        raise AssertionError("the engine does not come to rest")

    def reset_local(self) -> None:
        """Empty vLLM's own prefix cache, and not the store."""
        assert self.llm.reset_prefix_cache(reset_connector=False)

    # --- looking in -------------------------------------------------------------------

    @property
    def planner(self) -> Any:
        """The connector's planner."""
        return self.scheduler.connector._manager.planner

    @property
    def worker(self) -> Any:
        """The connector's worker (of this process's only rank)."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        group: Any = get_kv_transfer_group()
        return group._worker

    def counter(self, metric: Any, *labels: str) -> float:
        """Value of one exported counter or gauge."""
        return self.totals().get((metric.name, labels), 0.0)

    def totals(self) -> dict[tuple[str, tuple[str, ...]], float]:
        """The product's exported counters and gauges, by name and labels."""
        from prometheus_client import REGISTRY

        from fx_kvbackend import metrics

        exported = {m.name + ("_total" if m.kind == "counter" else ""): m for m in metrics.ALL}
        out: dict[tuple[str, tuple[str, ...]], float] = {}
        for family in REGISTRY.collect():
            for sample in family.samples:
                metric = exported.get(sample.name)
                if metric is not None:
                    labels = tuple(sample.labels[name] for name in metric.labels)
                    out[metric.name, labels] = sample.value
        return out

    def failed_loads(self) -> float:
        """Chunks that failed to load, for any reason."""
        return sum(v for (name, _), v in self.totals().items() if name == "fxkv:failed_loads")

    def free_blocks(self) -> int:
        """Free blocks of vLLM's pool; equal before and after when nothing leaks."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def page_bytes(self, prompt: Sequence[int], group: int = 0) -> list[bytes]:
        """KV of every full block of `prompt` that the engine computed or loaded itself."""
        mover = self.worker._mover
        out = []
        for block in self.cached_blocks(prompt, group):
            buffer = memoryview(bytearray(mover._geometries[group].block_bytes))
            mover._pages.gather(group, (block,), buffer, None)
            out.append(bytes(buffer))
        return out

    def cached_blocks(self, prompt: Sequence[int], group: int = 0) -> list[int]:
        """Block ids of vLLM's prefix cache that hold `prompt`."""
        pool = self.scheduler.kv_cache_manager.block_pool
        out = []
        for block_hash in self.block_hashes(prompt):
            found = pool.get_cached_block(block_hash, [group])
            if found is None:
                break
            out.append(found[0].block_id)
        return out

    def block_hashes(self, prompt: Sequence[int]) -> list[bytes]:
        """vLLM's hashes of the full blocks of `prompt`."""
        from vllm.v1.request import Request

        request = Request(
            request_id="hashes",
            prompt_token_ids=list(prompt),
            sampling_params=self.params(1),
            pooling_params=None,
            block_hasher=self.core.request_block_hasher,
        )
        return list(request.block_hashes)

    def close(self) -> None:
        """Shut the engine down and free what it holds in this process."""
        self.core.shutdown()
        del self.llm, self.core, self.scheduler
        _forget_engine()


def _forget_engine() -> None:
    """Clear what vLLM keeps per process, also after a start that failed half-way."""
    from vllm.distributed import destroy_distributed_environment, destroy_model_parallel
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    ensure_kv_transfer_shutdown()
    destroy_model_parallel()
    destroy_distributed_environment()
    gc.collect()


@contextmanager
def engine(model: str, store: Path | None, **kwargs: Any) -> Iterator[Engine]:
    """An engine that is closed at the end, also when the test fails."""
    running = Engine(model, store, **kwargs)
    try:
        yield running
    finally:
        running.close()


def stored_files(store: Path) -> list[Path]:
    """Chunk files under a store."""
    return sorted(store.glob("*/of*/*/*.kv"))
