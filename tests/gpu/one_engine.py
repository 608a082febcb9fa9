"""One engine in a process of its own, for tests that kill it.

    python -m tests.gpu.one_engine MODEL STORE

Asks the same prompts twice, prints one line of JSON with both rounds of answers once every save is
published, and then does nothing until it is killed.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from tests.engine.models import prompt
from tests.gpu.device import ask_each, engine

PROMPTS = [prompt(seed, 500 + 97 * seed) for seed in range(12)]


def main() -> None:
    model, store = sys.argv[1:]
    with engine(model, Path(store)) as running:
        rounds = [[asdict(a) for a in ask_each(running, PROMPTS)] for _ in range(2)]
        loads = sum(v for (name, _), v in running.totals().items() if name == "fxkv:loads")
        print(json.dumps({"rounds": rounds, "loads": loads}), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
