"""The table of metrics, and the tally that carries changes to whoever exports them."""

from __future__ import annotations

import re

from fx_kvbackend import metrics
from fx_kvbackend.metrics import Tally


def test_the_table_is_what_prometheus_takes() -> None:
    names = [metric.name for metric in metrics.ALL]
    assert len(set(names)) == len(names) >= 15
    for metric in metrics.ALL:
        assert re.fullmatch(r"fxkv:[a-z_]+", metric.name)
        assert not metric.name.endswith("_total"), "the client library adds it"
        assert metric.doc.endswith(".") or metric.doc.startswith("1 while")
        assert (metric.kind == "histogram") == (metric.buckets is not None)
        if metric.buckets:
            assert list(metric.buckets) == sorted(set(metric.buckets))
        assert len(set(metric.labels)) == len(metric.labels)


def test_counters_add_up_and_are_handed_on_once() -> None:
    tally = Tally()
    tally.add(metrics.SAVES)
    tally.add(metrics.SAVES, 2)
    tally.add(metrics.DROPPED_SAVES, 3, "full")
    tally.add(metrics.DROPPED_SAVES, 1, "no_space")
    assert sorted(tally.drain(), key=str) == sorted(
        [
            (metrics.SAVES, (), 3),
            (metrics.DROPPED_SAVES, ("full",), 3),
            (metrics.DROPPED_SAVES, ("no_space",), 1),
        ],
        key=str,
    )
    assert tally.drain() == []


def test_histograms_keep_every_value() -> None:
    tally = Tally()
    tally.observe(metrics.LOAD_SECONDS, 0.5)
    tally.observe(metrics.LOAD_SECONDS, 0.25)
    assert tally.drain() == [(metrics.LOAD_SECONDS, (), [0.5, 0.25])]
    assert tally.drain() == []


def test_gauges_are_handed_on_when_they_change() -> None:
    tally = Tally()
    tally.set(metrics.USED_BYTES, 5)
    tally.set(metrics.PENDING_SAVES, 0)
    assert tally.drain() == [(metrics.USED_BYTES, (), 5), (metrics.PENDING_SAVES, (), 0)]
    tally.set(metrics.USED_BYTES, 5)
    tally.set(metrics.PENDING_SAVES, 1)
    tally.set(metrics.PENDING_SAVES, 2)
    assert tally.drain() == [(metrics.PENDING_SAVES, (), 2)]
    tally.set(metrics.USED_BYTES, 0)
    assert tally.drain() == [(metrics.USED_BYTES, (), 0)]
