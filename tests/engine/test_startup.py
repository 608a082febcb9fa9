"""What is refused at the start, and what the log says."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fx_kvbackend import config as settings
from fx_kvbackend import metrics
from fx_kvbackend.errors import ConfigError, HostError, TierUnavailable
from fx_kvbackend.records import Reason
from fx_kvbackend.vllm_adapter import connector as connector_module
from fx_kvbackend.vllm_adapter import plugin
from tests.engine.harness import engine, stored_files
from tests.engine.models import prompt

pytestmark = pytest.mark.vllm

ONE = prompt(1, 600)


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """Messages of the product's loggers, from INFO on."""
    lines: list[str] = []

    class Recorder(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, recorder = logging.getLogger("fx_kvbackend"), Recorder()
    level = logger.level
    logger.addHandler(recorder)
    logger.setLevel(logging.INFO)
    yield lines
    logger.setLevel(level)
    logger.removeHandler(recorder)


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"local": {"pth": "/x"}}, 'local.pth: unknown setting, did you mean "local.path"'),
        ({"local": {"capacity": "10 gigs"}}, "is not a size"),
        ({"block_size": 256}, 'block_size: unknown setting, did you mean "chunk_tokens"'),
        ({"chunk_tokens": 200}, "200 is not a multiple of the engine's block of 128 tokens"),
        ({"staging": "64KiB"}, "staging: 65536 bytes hold 0 chunks"),
    ],
    ids=["key", "size", "host-key", "chunk", "staging"],
)
def test_a_wrong_setting_is_refused(
    llama: str, store: Path, extra: dict[str, object], text: str
) -> None:
    with (
        pytest.raises(ConfigError, match=text.replace("(", r"\(")),
        engine(llama, store, extra=extra),
    ):
        pass


def test_a_place_that_cannot_be_used_is_refused(llama: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(TierUnavailable, match=r"set local\.path to a directory"),
        engine(llama, tmp_path / "file"),
    ):
        pass


def test_hashes_that_differ_per_process_are_refused(
    llama: str, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with (
        pytest.raises(HostError, match="set PYTHONHASHSEED"),
        engine(llama, store, prefix_caching_hash_algo="xxhash"),
    ):
        pass
    assert "PYTHONHASHSEED" not in os.environ, "the environment is never changed"


def test_a_seed_makes_xxhash_usable_and_other_seeds_are_told(
    llama: str, store: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    for seed, cached in (("7", 0), ("7", 512), ("8", 0)):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        with engine(llama, store, prefix_caching_hash_algo="xxhash") as running:
            assert running.ask_one(ONE).cached == cached
    assert any("chunks stored with block_hash = 'xxhash" in line for line in logged)


def test_configuration_and_path_of_bytes_are_logged_once(
    llama: str, store: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    monkeypatch.setattr(connector_module, "_LOGGED", set())
    monkeypatch.setenv("FXKV_LOCAL_READ_THREADS", "3")
    with engine(llama, store):
        pass
    assert logged.count("setting local.read_threads = 3  (FXKV_LOCAL_READ_THREADS)") == 1
    assert logged.count("setting chunk_tokens = 128  (kv_connector_extra_config)") == 1
    assert sum(line.startswith("bytes travel: ") for line in logged) == 1
    assert any("kv_load_failure_policy is now recompute" in line for line in logged)


def test_a_read_only_store_serves_and_says_why_nothing_is_saved(
    llama: str, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(llama, store) as running:
        running.ask_one(ONE)
    open_file = os.open

    def read_only(path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
        if flags & os.O_CREAT and str(path).startswith(str(store)):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return open_file(path, flags, mode, **more)

    monkeypatch.setattr(os, "open", read_only)
    with engine(llama, store) as running:
        assert running.ask_one(ONE).cached == 512
        running.ask_one(prompt(2, 600))
        assert running.counter(metrics.DROPPED_SAVES, Reason.READ_ONLY.value) == 4


def test_zero_capacity_says_why_nothing_is_saved(llama: str, store: Path) -> None:
    with engine(llama, store, extra={"local": {"capacity": 0}}) as running:
        running.ask_one(ONE)
        assert running.counter(metrics.DROPPED_SAVES, Reason.FULL.value) == 4
        assert running.counter(metrics.SAVES) == 0


@pytest.mark.parametrize(
    ("argv", "ours", "theirs", "effective"),
    [
        ([], "recompute", "fail", "recompute"),
        (['{"kv_load_failure_policy":"fail"}'], "recompute", "fail", "fail"),
        (['{"kv_load_failure_policy":"recompute"}'], "recompute", "recompute", "recompute"),
        ([], "fail", "fail", "fail"),
        ([], "fail", "recompute", "fail"),
    ],
    ids=["nothing said", "theirs says fail", "theirs says recompute", "ours says fail", "both"],
)
def test_failure_policy(
    argv: list[str], ours: str, theirs: str, effective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import KVTransferConfig

    monkeypatch.setattr("sys.argv", ["vllm", "serve", *argv])
    transfer = KVTransferConfig(
        kv_connector="FxKVConnector",
        kv_role="kv_both",
        kv_load_failure_policy=theirs,  # type: ignore[arg-type]
    )
    config = settings.load({"load_failure_policy": ours}, {}).config
    connector_module._choose_failure_policy(transfer, config)
    assert transfer.kv_load_failure_policy == effective


def test_the_connectors_name_is_the_whole_configuration(
    llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import KVTransferConfig

    monkeypatch.setenv("HOME", str(tmp_path))
    for cached in (0, 512):
        config = KVTransferConfig(kv_connector="FxKVConnector", kv_role="kv_both")
        with engine(llama, None, kv_transfer_config=config) as running:
            assert running.ask_one(ONE).cached == cached
            assert running.counter(metrics.CAPACITY_BYTES) > 0
    assert len(stored_files(tmp_path / ".cache" / "fx_kvbackend")) > 0


def test_a_producer_saves_and_a_consumer_loads(llama: str, store: Path) -> None:
    with engine(llama, store, role="kv_producer") as running:
        running.ask_one(ONE)
        running.reset_local()
        assert running.ask_one(ONE).cached == 0
        assert running.counter(metrics.SAVES) == 4
    with engine(llama, store, role="kv_consumer") as running:
        assert running.ask_one(ONE).cached == 512
        running.ask_one(prompt(2, 600))
        assert running.counter(metrics.SAVES) == 0
    assert len(stored_files(store)) == 4


def test_our_threads_are_not_bound_to_the_cores_that_compute() -> None:
    cores = os.sched_getaffinity(0)
    one = {min(cores)}
    seen: list[set[int]] = []
    os.sched_setaffinity(0, one)
    try:
        with plugin.unbound_threads():
            thread = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
            thread.start()
            thread.join()
        assert os.sched_getaffinity(0) == one
    finally:
        os.sched_setaffinity(0, cores)
    assert seen == [cores]
