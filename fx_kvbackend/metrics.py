"""Every metric of this package, declared once.

Names follow the host's style (`fxkv:` instead of `vllm:`). Counters end in `_total`
where Prometheus expects it; the client library adds the suffix where it is missing.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class Metric(NamedTuple):
    """One metric: its exported name, kind, labels and the sentence operators read."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    doc: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] | None = None


_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

PENDING_SAVES = Metric(
    "fxkv:pending_saves",
    "gauge",
    "Chunks accepted for saving and not yet published; 0 means that all are on the medium.",
)
SAVES = Metric("fxkv:saves", "counter", "Chunks published on the medium.")
SAVED_BYTES = Metric("fxkv:saved_bytes", "counter", "Bytes of published chunks, all ranks.")
DROPPED_SAVES = Metric(
    "fxkv:dropped_saves", "counter", "Chunks not saved, by reason.", labels=("reason",)
)
DEFERRED_SAVES = Metric(
    "fxkv:deferred_saves", "counter", "Save attempts put off while space is being freed."
)
LOADS = Metric("fxkv:loads", "counter", "Chunks loaded and verified.")
LOADED_BYTES = Metric("fxkv:loaded_bytes", "counter", "KV bytes put into engine blocks, all ranks.")
FAILED_LOADS = Metric(
    "fxkv:failed_loads", "counter", "Chunks that failed to load, by reason.", labels=("reason",)
)
LOAD_SECONDS = Metric(
    "fxkv:load_seconds", "histogram", "Time of one load job of one rank.", buckets=_SECONDS
)
LOOKUP_CHUNKS = Metric(
    "fxkv:lookup_chunks", "counter", "Chunks looked up, by answer.", labels=("answer",)
)
EVICTIONS = Metric("fxkv:evictions", "counter", "Chunks deleted to stay under the cap.")
USED_BYTES = Metric("fxkv:used_bytes", "gauge", "Bytes stored, with those reserved for saves.")
CAPACITY_BYTES = Metric("fxkv:capacity_bytes", "gauge", "Cap on the bytes stored.")
TIER_SICK = Metric("fxkv:tier_sick", "gauge", "1 while the tier is paused after failures.")
SWEPT_TEMPORARIES = Metric(
    "fxkv:swept_temporaries", "counter", "Temporary files of dead writers removed."
)
THREAD_CPU_SECONDS = Metric(
    "fxkv:thread_cpu_seconds", "counter", "CPU time of this package's own threads, all ranks."
)

ALL: tuple[Metric, ...] = tuple(m for m in list(globals().values()) if isinstance(m, Metric))


class Tally:
    """Changes of metrics since the last `drain`; owned by one thread."""

    def __init__(self) -> None:
        self._added: dict[tuple[Metric, tuple[str, ...]], float] = {}
        self._seen: dict[Metric, list[float]] = {}
        self._gauges: dict[Metric, float] = {}
        self._sent: dict[Metric, float] = {}

    def add(self, metric: Metric, value: float = 1, *labels: str) -> None:
        """Raise a counter."""
        at = (metric, labels)
        self._added[at] = self._added.get(at, 0) + value

    def observe(self, metric: Metric, value: float) -> None:
        """Put one value into a histogram."""
        self._seen.setdefault(metric, []).append(value)

    def set(self, metric: Metric, value: float) -> None:
        """Set a gauge; only changes are handed on."""
        self._gauges[metric] = value

    def drain(self) -> list[tuple[Metric, tuple[str, ...], float | list[float]]]:
        """(metric, labels, increase | values | level) of everything that changed."""
        out: list[tuple[Metric, tuple[str, ...], float | list[float]]] = []
        out += [(m, labels, value) for (m, labels), value in self._added.items()]
        out += [(m, (), values) for m, values in self._seen.items()]
        out += [(m, (), v) for m, v in self._gauges.items() if self._sent.get(m) != v]
        self._sent.update(self._gauges)
        self._added, self._seen = {}, {}
        return out
