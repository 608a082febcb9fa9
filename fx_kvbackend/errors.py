"""Every exception this package raises on purpose.

FxError
├── ConfigError          a setting is wrong; the text names it and the nearest right one
├── HostError            the serving engine around us is one we cannot work with
├── TierUnavailable      a place to store chunks cannot be opened at all
└── Bug                  an invariant of ours is broken; never caused by input or media

Expected answers (a chunk is absent, a disk is full) are values, not exceptions:
see `records.Refusal`.
"""

from __future__ import annotations


class FxError(Exception):
    """Base of every exception raised on purpose by this package."""


class ConfigError(FxError, ValueError):
    """A setting is unknown, of the wrong type or out of range."""


class HostError(FxError, RuntimeError):
    """The host engine's version or set-up is one this package cannot serve."""


class TierUnavailable(FxError, OSError):
    """A tier cannot be opened; the text says where and why."""


class Bug(FxError, AssertionError):
    """An invariant of this package is broken."""
