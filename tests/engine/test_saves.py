"""Saves that fail, and requests that the operator wants to fail."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from fx_kvbackend import metrics
from fx_kvbackend.records import Reason
from tests.engine import chunks
from tests.engine.damage import BAD, TOKENS
from tests.engine.harness import engine
from tests.engine.models import BLOCK, prompt

pytestmark = pytest.mark.vllm


def test_policy_fail_is_honoured(llama: str, tmp_path: Path) -> None:
    one = prompt(8000, TOKENS)
    with engine(llama, tmp_path, extra={"load_failure_policy": "fail"}) as running:
        running.ask_one(one)
        chunks.of_prompt(tmp_path, running.block_hashes(one))[BAD].unlink()
        running.reset_local()
        request_id = running.add(one)
        done = running.finish()[request_id]
        assert done.outputs[0].finish_reason == "error"
        assert len(done.outputs[0].token_ids) == 0
        assert running.ask_one(one).cached == BAD * BLOCK, "the engine lives, and forgot the chunk"


def test_saves_that_fail_cost_nothing_else(
    llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = prompt(9000, TOKENS)
    with engine(llama, tmp_path) as running:
        cold = running.ask_one(prompt(9001, TOKENS)), running.ask_one(one)
        del cold
        pwrite, full = os.pwrite, [True]

        def failing(fd: int, data: bytes, offset: int) -> int:
            if full[0]:
                raise OSError(errno.ENOSPC, "disk full")
            return pwrite(fd, data, offset)

        monkeypatch.setattr(os, "pwrite", failing)
        two = prompt(9002, TOKENS)
        running.ask_one(two)
        assert running.counter(metrics.DROPPED_SAVES, Reason.NO_SPACE.value) == 7
        assert not list(tmp_path.glob("tmp/*/*"))
        full[0] = False
        running.reset_local()
        assert running.ask_one(two).cached == 0
        running.reset_local()
        assert running.ask_one(two).cached == 7 * BLOCK, "saved at the next chance"
