"""Answers a long prompt with vLLM's Python interface, and shows what came from stored KV.

    python examples/offline.py MODEL [--text FILE] [--store DIRECTORY]

The first run computes the prompt, then empties vLLM's own prefix cache and asks again: this time
the prompt comes from the store. Run it a second time and the first question is a hit as well.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

QUESTION = "\n\nIn one sentence, what is this text about?\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Answers a long prompt twice.")
    parser.add_argument("model", help="directory or name of a model")
    parser.add_argument("--text", type=Path, default=Path(__file__), help="file to ask about")
    parser.add_argument("--store", help="directory of the store, instead of the default one")
    parser.add_argument(
        "--repeat", type=int, default=4, help="times that the text is in the prompt"
    )
    arguments = parser.parse_args()

    settings: dict[str, Any] = {}
    if arguments.store:
        settings["local"] = {"path": arguments.store}
    llm = LLM(
        arguments.model,
        enforce_eager=True,
        kv_transfer_config=KVTransferConfig(
            kv_connector="FxKVConnector",
            kv_role="kv_both",
            kv_connector_extra_config=settings,
        ),
    )
    prompt = arguments.text.read_text(encoding="utf-8") * arguments.repeat + QUESTION

    ask(llm, prompt, "first question ")
    # Empties vLLM's own cache and not the store.
    llm.reset_prefix_cache()
    ask(llm, prompt, "second question")


def ask(llm: LLM, prompt: str, title: str) -> None:
    """Answer the prompt and print where its tokens came from."""
    started_s = time.perf_counter()
    [output] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=32), use_tqdm=False)
    took_s = time.perf_counter() - started_s
    tokens = len(output.prompt_token_ids or ())
    print(f"{title}: {output.num_cached_tokens or 0} of {tokens} tokens cached, {took_s:.2f} s")


if __name__ == "__main__":
    main()
