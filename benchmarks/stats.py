"""The few statistics that the benchmarks report. Pure, and seeded where chance is involved."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` (0..100) of `values` lie, interpolated between neighbours.

    With few samples a high percentile is the largest sample or close to it; report the count
    beside it. Raises ValueError for no samples.
    """
    if not values:
        raise ValueError("percentile of no samples")
    if not 0 <= percent <= 100:
        raise ValueError(f"percent must be within 0..100, got {percent}")
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = math.ceil(position)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def median(values: Sequence[float]) -> float:
    return percentile(values, 50)


def geometric_mean(values: Sequence[float]) -> float:
    """The average of ratios: 2x and 0.5x average to 1x. All values must be positive."""
    if not values:
        raise ValueError("mean of no samples")
    return math.exp(math.fsum(math.log(value) for value in values) / len(values))


@dataclass(frozen=True, slots=True)
class Interval:
    """A 95 % confidence interval around `estimate`."""

    estimate: float
    low: float
    high: float


def bootstrap_interval(
    values: Sequence[float],
    statistic: Callable[[Sequence[float]], float],
    *,
    resamples_count: int = 4000,
    seed: int = 7,
) -> Interval:
    """Percentile bootstrap of `statistic` over independent samples; the same for the same seed."""
    dice = random.Random(seed)
    estimates = [statistic(dice.choices(values, k=len(values))) for _ in range(resamples_count)]
    return Interval(
        estimate=statistic(values),
        low=percentile(estimates, 2.5),
        high=percentile(estimates, 97.5),
    )
