"""LoRA adapters: a name and a path are no identity, the content is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.harness import Engine, engine
from tests.engine.models import prompt

pytestmark = pytest.mark.vllm

ONE = prompt(1, 600)


def _adapter(path: Path, seed: int) -> str:
    """A rank-8 adapter of the key projections of the tiny llama, with random weights."""
    from safetensors.torch import save_file

    path.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(4):
        name = f"base_model.model.model.layers.{layer}.self_attn.k_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(8, 256, generator=generator) * 0.3
        tensors[f"{name}.lora_B.weight"] = torch.randn(128, 8, generator=generator) * 0.3
    save_file(tensors, path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 8,
        "target_modules": ["k_proj"],
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (path / "adapter_config.json").write_text(json.dumps(config))
    return str(path)


def _ask(running: Engine, adapter: str | None) -> tuple[int, tuple[int, ...]]:
    from vllm.lora.request import LoRARequest

    lora = LoRARequest("adapter", 1, adapter) if adapter else None
    prompts: Any = [{"prompt_token_ids": ONE}]
    (out,) = running.llm.generate(prompts, running.params(8), lora_request=lora, use_tqdm=False)
    running.settle()
    return out.num_cached_tokens or 0, tuple(out.outputs[0].token_ids)


def test_adapters_meet_only_their_own_content(llama: str, store: Path, tmp_path: Path) -> None:
    adapter = _adapter(tmp_path / "adapter", seed=1)
    options = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}
    with engine(llama, store, **options) as running:
        base, first = _ask(running, None), _ask(running, adapter)
        assert base[0] == first[0] == 0
        assert base[1] != first[1], "the adapter changes nothing, so this test sees nothing"
    with engine(llama, store, **options) as running:
        assert _ask(running, None) == (512, base[1])
        assert _ask(running, adapter) == (512, first[1])
    _adapter(tmp_path / "adapter", seed=2)
    with engine(llama, store, **options) as running:
        other = _ask(running, adapter)
        assert other[0] == 0, "the adapter was replaced under its name and path"
        assert other[1] != first[1]
