"""What several ranks tell in one step reaches the planner, whoever comes first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fx_kvbackend.records import ChunkKey, LoadFailure, Reason, SaveReport
from fx_kvbackend.vllm_adapter.connector import FxKVConnector, FxWorkerMetadata
from fx_kvbackend.vllm_adapter.worker import FxWorker, News

pytestmark = pytest.mark.vllm

KEY = ChunkKey("0" * 32, b"chunk")


def _connector(completed: dict[int, int], news: News | None) -> FxKVConnector:
    """A worker-side connector with these completions and this news in its hands."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
        OffloadingWorkerMetadata,
    )

    class Worker(FxWorker):
        def __init__(self) -> None:
            pass

        def take_news(self) -> News | None:
            return news

    meta = OffloadingWorkerMetadata(completed) if completed else None
    connector: Any = FxKVConnector.__new__(FxKVConnector)
    connector.connector_worker = SimpleNamespace(
        worker=Worker(), build_connector_worker_meta=lambda: meta
    )
    return connector


def _news() -> News:
    failure = LoadFailure(KEY, (1, 2), Reason.CORRUPT)
    return News([SaveReport(KEY, None, 2, 4096)], [("request", failure)], 3, 30, [0.5], 0.1)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("other", [None, {7: 1}], ids=["silent", "without news"])
def test_news_of_one_rank_survive_the_merge(order: tuple[int, int], other: Any) -> None:
    ranks = [_connector({7: 1}, _news()), _connector(other or {}, None)]
    metas = [ranks[i].build_connector_worker_meta() for i in order]
    merged: Any = None
    for meta in metas:  # as vLLM's aggregator does it
        merged = meta if merged is None else (merged.aggregate(meta) if meta else merged)
    assert isinstance(merged, FxWorkerMetadata)
    assert merged.news == _news()
    assert merged.completed_jobs == {7: 2 if other else 1}


def test_news_of_two_ranks_add_up() -> None:
    first, second = (_connector({}, _news()).build_connector_worker_meta() for _ in range(2))
    assert first is not None
    assert second is not None
    merged = first.aggregate(second)
    assert isinstance(merged, FxWorkerMetadata)
    assert len(merged.news.reports) == len(merged.news.failures) == 2
    assert merged.news.loaded_chunks == 6


def test_nothing_to_tell_is_told_by_nothing() -> None:
    assert _connector({}, None).build_connector_worker_meta() is None
