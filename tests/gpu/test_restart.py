"""SIGKILL, and a second process answers from what the first one stored."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import stored_files
from tests.engine.models import BLOCK
from tests.gpu.device import needs_engine
from tests.gpu.one_engine import PROMPTS

pytestmark = [pytest.mark.gpu, needs_engine]

ROOT = Path(__file__).resolve().parents[2]


def answers_then_killed(model: str, store: Path, log: Path) -> dict[str, Any]:
    """What an engine in a process of its own says before SIGKILL ends it."""
    command = [sys.executable, "-m", "tests.gpu.one_engine", model, str(store)]
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "VLLM_NO_USAGE_STATS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith('{"rounds"'):
                    said: dict[str, Any] = json.loads(line)
                    return said
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    raise AssertionError(f"the engine ended early:\n{log.read_text()[-3000:]}")


def test_a_killed_engines_chunks_are_hits(llama: str, store: Path, tmp_path: Path) -> None:
    first = answers_then_killed(llama, store, tmp_path / "first.log")
    cold, local = first["rounds"]
    hits = [(len(one) - 1) // BLOCK * BLOCK for one in PROMPTS]
    assert [a["cached"] for a in cold] == [0] * len(PROMPTS)
    assert [a["cached"] for a in local] == hits
    assert first["loads"] == 0
    before = {file: file.stat().st_mtime_ns for file in stored_files(store)}

    second = answers_then_killed(llama, store, tmp_path / "second.log")
    external, _ = second["rounds"]
    assert external == local, "restored answers differ from those of a local hit"
    assert second["loads"] > 0
    assert {file: file.stat().st_mtime_ns for file in stored_files(store)} == before
    # A killed writer cannot clean up; the next one's sweep did, and its own place is all there is.
    assert len(list(store.glob("tmp/*.lock"))) <= 1
