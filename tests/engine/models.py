"""Tiny models with real random weights: their outputs change when any KV byte does.

Weights of scale 1/sqrt(fan-in) and up, in float32: with dummy or tied weights the greedy
output is constant and hides corruption.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

VOCAB = 512
BLOCK = 128
"""Tokens per KV block of vLLM's CPU backend."""


def llama(path: Path, *, layers: int = 4, heads: int = 4, kv_heads: int = 2, seed: int = 1) -> str:
    """One full-attention group."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=64,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )
    return _save(LlamaForCausalLM(config), path, seed)


def olmo3(path: Path, *, window: int = 512, seed: int = 1) -> str:
    """Two sliding-window groups and a full one."""
    from transformers import Olmo3Config, Olmo3ForCausalLM

    config = Olmo3Config(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        sliding_window=window,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        tie_word_embeddings=False,
    )
    return _save(Olmo3ForCausalLM(config), path, seed)


def qwen3_next(path: Path, *, seed: int = 1) -> str:
    """Recurrent layers (a state per request, stored at block ends) and attention layers."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )
    return _save(Qwen3NextForCausalLM(config), path, seed)


def _save(model: Any, path: Path, seed: int) -> str:
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.08)
            elif "norm" in name:
                parameter.fill_(1.0)
    model.to(torch.float32).save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    config["dtype"] = config["torch_dtype"] = "float32"
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def prompt(seed: int, tokens: int) -> list[int]:
    """Token ids of a prompt that shares no prefix with one of another seed."""
    generator = torch.Generator().manual_seed(seed)
    return [int(t) for t in torch.randint(3, VOCAB, (tokens,), generator=generator)]
