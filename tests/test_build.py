"""The composition root: planner and mover as an engine gets them, over a real directory."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fx_kvbackend import config as settings
from fx_kvbackend.errors import ConfigError, TierUnavailable
from fx_kvbackend.records import LoadChunk, SaveChunk, SaveReport, Shard
from fx_kvbackend.store.build import build_mover, build_planner, private_namespace
from fx_kvbackend.store.mover import Mover
from fx_kvbackend.store.planner import Answer, Planner
from tests.rig import CHUNK_BYTES, NAMESPACE, WHOLE, ArrayPages, geometry, key, kv_bytes, name

GEOMETRIES = {0: geometry([64, 32])}
MANIFEST = {"model": "tiny", "dtype": "bfloat16"}


@pytest.fixture
def running() -> Iterator[list[Planner | Mover]]:
    """What is put in is closed when the test ends, and leaves no thread behind."""
    started: list[Planner | Mover] = []
    yield started
    for one in started:
        one.close()
    assert [t.name for t in threading.enumerate() if t.name.startswith("fxkv-")] == []


def config(path: Path, **local: Any) -> settings.Config:
    extra = {"local": {"path": str(path), **local}, "staging": 16 * CHUNK_BYTES}
    return settings.load(extra, {}).config


def planner_of(config: settings.Config, manifest: dict[str, str] | None = None) -> Planner:
    return build_planner(
        config,
        NAMESPACE,
        manifest or MANIFEST,
        rank_count=1,
        shard_count=1,
        chunk_bytes=CHUNK_BYTES,
        wants_events=True,
    )


def save(planner: Planner, mover: Mover, number: int) -> None:
    """A whole save, from the question to the last word."""
    accepted = planner.prepare_save([name(number)], "r")
    assert accepted == [(key(number), False)]
    mover.submit_save(number, [SaveChunk(key(number), 0, (1, 2))])
    pause = threading.Event()
    reports: list[SaveReport] = []
    while not reports:
        mover.poll()
        reports = mover.take_reports()
        pause.wait(0.001)
    planner.save_reported(reports[0])
    assert planner.pending_saves == 0


def test_a_restart_hits_and_reads_back_what_was_saved(
    tmp_path: Path, running: list[Planner | Mover]
) -> None:
    pytest.importorskip("torch")
    pages = ArrayPages(GEOMETRIES, 8)
    for block in (1, 2):
        pages.fill(0, block, kv_bytes(block, 96))
    planner = planner_of(config(tmp_path))
    mover = build_mover(config(tmp_path), pages, GEOMETRIES, WHOLE, writes=True)
    running += [planner, mover]
    save(planner, mover, 1)
    again = planner_of(config(tmp_path))
    running.append(again)
    assert again.lookup(name(1), "r") is Answer.HIT, "a small store is known at the start"
    mover.submit_load(9, [LoadChunk(key(1), 0, 0, (5, 6), 1)])
    pause = threading.Event()
    while not (done := mover.poll()):
        pause.wait(0.001)
    assert done[0].failures == ()
    assert [pages.block(0, 5), pages.block(0, 6)] == [kv_bytes(1, 96), kv_bytes(2, 96)]


def test_settings_reach_planner_and_mover(tmp_path: Path, running: list[Planner | Mover]) -> None:
    pytest.importorskip("torch")
    chosen = config(tmp_path, capacity="3MiB", free_floor="1MiB", read_threads=3, write_threads=1)
    planner = planner_of(chosen)
    mover = build_mover(chosen, ArrayPages(GEOMETRIES, 8), GEOMETRIES, Shard(1, 2), writes=False)
    running += [planner, mover]
    assert planner.capacity_bytes == 3 << 20
    assert planner._free_floor_bytes == 1 << 20
    assert sorted(thread.name for thread in mover._threads) == [
        "fxkv-copy",
        "fxkv-load-0",
        "fxkv-load-1",
        "fxkv-load-2",
        "fxkv-save-0",
    ]
    assert mover.arena.slot_count == 16
    assert not mover._tier._sync  # type: ignore[attr-defined]
    durable = config(tmp_path, durability="data")
    running.append(build_mover(durable, ArrayPages(GEOMETRIES, 8), GEOMETRIES, WHOLE, writes=True))
    assert running[-1]._tier._sync  # type: ignore[union-attr]
    mover.submit_save(1, [SaveChunk(key(1), 0, (1, 2))])
    assert mover.take_reports() == [SaveReport(key(1), None, 2, 0)]


def test_what_is_left_open_is_a_share_of_the_medium(
    tmp_path: Path, running: list[Planner | Mover]
) -> None:
    planner = planner_of(config(tmp_path))
    running.append(planner)
    space = planner._space
    assert space is not None
    assert planner.capacity_bytes == space.free_bytes // 2
    assert planner._free_floor_bytes == space.total_bytes // 20


def test_the_path_of_bytes_is_said_with_its_reason(
    tmp_path: Path, running: list[Planner | Mover], caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("torch")
    caplog.set_level(logging.INFO)
    pages = ArrayPages(GEOMETRIES, 8)
    running.append(
        build_mover(config(tmp_path, direct_io="off"), pages, GEOMETRIES, WHOLE, writes=True)
    )
    (said,) = [r.getMessage() for r in caplog.records if "bytes travel" in r.getMessage()]
    for part in ("buffered (direct_io is off)", "GDS: not used", "staging 16 x", "pinned"):
        assert part in said


def test_a_namespace_that_differs_in_one_field_is_named(
    tmp_path: Path, running: list[Planner | Mover], caplog: pytest.LogCaptureFixture
) -> None:
    running.append(planner_of(config(tmp_path)))
    running.append(
        build_planner(
            config(tmp_path),
            "cd" * 16,
            {**MANIFEST, "dtype": "float16"},
            rank_count=1,
            shard_count=1,
            chunk_bytes=CHUNK_BYTES,
            wants_events=False,
        )
    )
    (note,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    for word in ("dtype", "bfloat16", "float16"):
        assert word in note


def test_a_store_that_cannot_be_opened_is_said_in_one_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    with pytest.raises(TierUnavailable, match=r"local\.path"):
        planner_of(config(blocked / "store"))


def test_a_mover_that_cannot_be_built_leaves_nothing_open(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pages = ArrayPages(GEOMETRIES, 8)
    tiny = settings.load({"local": {"path": str(tmp_path)}, "staging": CHUNK_BYTES}, {}).config
    with pytest.raises(ConfigError, match="staging"):
        build_mover(tiny, pages, GEOMETRIES, WHOLE, writes=True)
    assert list((tmp_path / "tmp").iterdir()) == []


def test_private_namespaces_are_namespaces_and_all_different() -> None:
    seen = {private_namespace() for _ in range(100)}
    assert len(seen) == 100
    assert all(len(bytes.fromhex(namespace)) == 16 for namespace in seen)
