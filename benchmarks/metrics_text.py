"""Reads the text format that vLLM's /metrics endpoint speaks. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

Labels = frozenset[tuple[str, str]]
Metrics = dict[str, dict[Labels, float]]

_SAMPLE = re.compile(
    r"^(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+\d+)?$"
)
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


def parse_metrics(text: str) -> Metrics:
    """name -> {labels: value} of every sample; comments and unreadable lines are left out."""
    metrics: Metrics = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        match = _SAMPLE.match(line.strip())
        if match is None:
            continue
        labels = frozenset(
            (key, _unescape(value)) for key, value in _LABEL.findall(match["labels"] or "")
        )
        metrics.setdefault(match["name"], {})[labels] = float(match["value"])
    return metrics


def _unescape(value: str) -> str:
    return re.sub(r"\\[\\\"n]", lambda match: _ESCAPES[match[0]], value)


def total(metrics: Mapping[str, Mapping[Labels, float]], name: str) -> float | None:
    """Sum of one metric over all its label sets; None when the server does not export it.

    A counter is found with and without its `_total` suffix, since exporters differ in adding it.
    """
    for candidate in (name, f"{name}_total", name.removesuffix("_total")):
        if candidate in metrics:
            return sum(metrics[candidate].values())
    return None


def increase(before: Metrics, after: Metrics, name: str) -> float:
    """How much a counter grew between two scrapes of one server; 0 for one that is not there."""
    return (total(after, name) or 0.0) - (total(before, name) or 0.0)
