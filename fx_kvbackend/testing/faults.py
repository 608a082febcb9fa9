"""Tiers that misbehave on purpose, and a plain one in memory. For our tests and for others'.

- `DictTier`: an honest tier in a dict. Tiers over one `Medium` are like processes that share
  a disk.
- `Faulty`: any tier, failing by chance or by script, damaging, losing or lying.
- `Gated`: any tier, with calls that wait until the test lets them go.

All are thread-safe, need no clock but the one passed in, and repeat exactly with the same
seed and the same calls.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fx_kvbackend.core import format as chunkfile
from fx_kvbackend.core.format import Header
from fx_kvbackend.errors import Bug, TierUnavailable
from fx_kvbackend.records import ChunkKey, Found, Reason, Refusal, Shard
from fx_kvbackend.tiers.base import Copies, Space, Tier

T = TypeVar("T")

VERBS = ("read", "stored_bytes", "write", "find", "delete", "touch", "scan", "sweep", "space")
"""Calls that can be made to fail or to wait, by the name of the method."""


# --- an honest tier in memory ------------------------------------------------------------


@dataclass
class Stored:
    """One shard on a medium, as it was written, and its last use (seconds)."""

    data: bytes
    used_s: float


@dataclass
class Medium:
    """What several `DictTier` share, and what is left when they are closed."""

    total_bytes: int = 1 << 40
    shards: dict[tuple[ChunkKey, Shard], Stored] = field(default_factory=dict)
    manifests: dict[str, dict[str, object]] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def used_bytes(self) -> int:
        """Bytes of everything stored."""
        with self.lock:
            return sum(len(stored.data) for stored in self.shards.values())


class DictTier:
    """Chunks in memory. Implements `tiers.base.Tier` completely and honestly."""

    name = "dict"
    path_taken = "memory (a test double)"

    def __init__(
        self, medium: Medium | None = None, *, clock: Callable[[], float] = time.time
    ) -> None:
        self.medium = medium or Medium()
        self._clock = clock
        self._closed = False

    def read(self, key: ChunkKey, shard: Shard, into: memoryview) -> Header | Refusal:
        """See Tier."""
        with self.medium.lock:
            stored = self.medium.shards.get((key, shard))
        if stored is None:
            return Refusal(Reason.ABSENT, f"no {key}, {shard}")
        length = min(len(stored.data), len(into))
        into[:length] = stored.data[:length]
        return _verified(into[:length], key, shard)

    def stored_bytes(self, key: ChunkKey, shard: Shard) -> int | Refusal:
        """See Tier."""
        with self.medium.lock:
            stored = self.medium.shards.get((key, shard))
        return len(stored.data) if stored else Refusal(Reason.ABSENT, f"no {key}, {shard}")

    def write(
        self, key: ChunkKey, shard: Shard, data: memoryview, *, overwrite: bool
    ) -> Refusal | None:
        """See Tier."""
        if self._closed:
            return Refusal(Reason.CANCELLED, "the tier is closed")
        copied = bytes(data)
        with self.medium.lock:
            old = self.medium.shards.get((key, shard))
            if old is not None and len(old.data) == len(copied) and not overwrite:
                return None
            grows_bytes = len(copied) - (len(old.data) if old else 0)
            if self.medium.used_bytes + grows_bytes > self.medium.total_bytes:
                return Refusal(Reason.NO_SPACE, f"{self.medium.total_bytes} bytes are used up")
            self.medium.shards[key, shard] = Stored(copied, self._clock())
        return None

    def find(self, keys: Sequence[ChunkKey]) -> dict[ChunkKey, Copies]:
        """See Tier."""
        out: dict[ChunkKey, Copies] = {}
        with self.medium.lock:
            for key in keys:
                sizes = {s: len(v.data) for (k, s), v in self.medium.shards.items() if k == key}
                seen = Counter(shard.count for shard in sizes)
                complete = tuple(sorted(count for count, n in seen.items() if n == count))
                if complete:
                    out[key] = Copies(complete, sum(sizes.values()))
        return out

    def delete(self, key: ChunkKey) -> None:
        """See Tier."""
        with self.medium.lock:
            for at in [at for at in self.medium.shards if at[0] == key]:
                del self.medium.shards[at]

    def touch(self, key: ChunkKey, shard_count: int) -> None:
        """See Tier."""
        with self.medium.lock:
            stored = self.medium.shards.get((key, Shard(0, shard_count)))
            if stored is not None:
                stored.used_s = self._clock()

    def scan(self) -> Iterator[Found]:
        """See Tier."""
        with self.medium.lock:
            items = list(self.medium.shards.items())
        for (key, shard), stored in items:
            yield Found(key, shard, len(stored.data), stored.used_s)

    def sweep(self) -> int:
        """See Tier: nothing is ever left unfinished here."""
        return 0

    def space(self) -> Space:
        """See Tier."""
        total_bytes = self.medium.total_bytes
        return Space(max(0, total_bytes - self.medium.used_bytes), total_bytes)

    def announce(self, namespace: str, manifest: Mapping[str, object]) -> list[str]:
        """See Tier."""
        notes = []
        with self.medium.lock:
            for other, theirs in self.medium.manifests.items():
                fields = theirs.keys() | manifest.keys()
                differ = [f for f in fields if theirs.get(f) != manifest.get(f)]
                if other != namespace and len(differ) == 1:
                    was, now = theirs.get(differ[0]), manifest.get(differ[0])
                    notes.append(f"stored with {differ[0]} = {was!r}, it is {now!r} now")
            self.medium.manifests[namespace] = dict(manifest)
        return notes

    def close(self) -> None:
        """See Tier."""
        self._closed = True


def _verified(data: memoryview, key: ChunkKey, shard: Shard) -> Header | Refusal:
    header = chunkfile.open_header(data, key, shard)
    if isinstance(header, Refusal):
        return header
    return chunkfile.verify_payload(data, header) or header


# --- wrappers ----------------------------------------------------------------------------


class Over:
    """A tier over another one: every call of VERBS goes through `around`."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.name = tier.name
        self.path_taken = tier.path_taken

    def around(self, verb: str, key: ChunkKey | None, call: Callable[[], T]) -> T:
        """Make the call; subclasses decide how, when and whether."""
        return call()

    def read(self, key: ChunkKey, shard: Shard, into: memoryview) -> Header | Refusal:
        """See Tier."""
        return self.around("read", key, lambda: self.tier.read(key, shard, into))

    def stored_bytes(self, key: ChunkKey, shard: Shard) -> int | Refusal:
        """See Tier."""
        return self.around("stored_bytes", key, lambda: self.tier.stored_bytes(key, shard))

    def write(
        self, key: ChunkKey, shard: Shard, data: memoryview, *, overwrite: bool
    ) -> Refusal | None:
        """See Tier."""
        return self.around(
            "write", key, lambda: self.tier.write(key, shard, data, overwrite=overwrite)
        )

    def find(self, keys: Sequence[ChunkKey]) -> dict[ChunkKey, Copies]:
        """See Tier."""
        return self.around("find", None, lambda: self.tier.find(keys))

    def delete(self, key: ChunkKey) -> None:
        """See Tier."""
        self.around("delete", key, lambda: self.tier.delete(key))

    def touch(self, key: ChunkKey, shard_count: int) -> None:
        """See Tier."""
        self.around("touch", key, lambda: self.tier.touch(key, shard_count))

    def scan(self) -> Iterator[Found]:
        """See Tier."""
        yield from self.around("scan", None, self.tier.scan)

    def sweep(self) -> int:
        """See Tier."""
        return self.around("sweep", None, self.tier.sweep)

    def space(self) -> Space:
        """See Tier."""
        return self.around("space", None, self.tier.space)

    def announce(self, namespace: str, manifest: Mapping[str, object]) -> list[str]:
        """See Tier."""
        return self.tier.announce(namespace, manifest)

    def close(self) -> None:
        """See Tier."""
        self.tier.close()


@dataclass(eq=False)
class _Script:
    """A failure to come: of one verb, of one key or any, so many times."""

    verb: str
    key: ChunkKey | None
    fault: Reason | Exception
    left: int
    done_anyway: bool


class Faulty(Over):
    """A tier that fails.

    By chance: `fail_ratios={"read": 0.1}` makes one read in ten fail, drawn from `seed`.
    By script: `fail("write", Reason.NO_SPACE, key=key)` makes the next such call fail.

    A failing call answers as the protocol has it (a `Refusal`, nothing found, nothing
    deleted; `scan` raises TierUnavailable, `space` OSError), or raises when the script
    names an exception. The tier beneath is then not asked, but for `done_anyway`: the call
    is made and its result is lost, as when a server dies before it answers.

    `damage(key)`: reads find one bit flipped on the medium, which verification sees.
    `drop(key)`: deleted beneath, told to nobody.
    `lie(key)`: reads hand out other bytes *and call them verified*. No tier may do so; a
    test that does not fail over a liar is blind.
    """

    def __init__(
        self,
        tier: Tier,
        *,
        seed: int = 0,
        fail_ratios: Mapping[str, float] | None = None,
        reason: Reason = Reason.IO_ERROR,
    ) -> None:
        super().__init__(tier)
        for verb in fail_ratios or {}:
            _check_verb(verb)
        self.fail_ratios = dict(fail_ratios or {})
        self.calls: Counter[str] = Counter()
        """Calls so far, by verb; those that failed are among them."""
        self.failed: Counter[str] = Counter()
        self._reason = reason
        self._dice = random.Random(seed)
        self._lock = threading.Lock()
        self._scripts: list[_Script] = []
        self._damaged: set[ChunkKey] = set()
        self._lied_about: set[ChunkKey] | None = set()  # None: about everything

    def fail(
        self,
        verb: str,
        fault: Reason | Exception = Reason.IO_ERROR,
        *,
        key: ChunkKey | None = None,
        times: int = 1,
        done_anyway: bool = False,
    ) -> None:
        """Make the next `times` calls of `verb` fail, of `key` only when one is given."""
        _check_verb(verb)
        with self._lock:
            self._scripts.append(_Script(verb, key, fault, times, done_anyway))

    def damage(self, key: ChunkKey) -> None:
        """From now on reads of this chunk find a bit flipped, until it is written again."""
        with self._lock:
            self._damaged.add(key)

    def drop(self, key: ChunkKey) -> None:
        """Delete a chunk beneath, as somebody else would."""
        self.tier.delete(key)

    def lie(self, key: ChunkKey | None = None) -> None:
        """From now on hand out wrong bytes as verified: of this chunk, or of all."""
        with self._lock:
            if key is None:
                self._lied_about = None
            elif self._lied_about is not None:
                self._lied_about.add(key)

    def around(self, verb: str, key: ChunkKey | None, call: Callable[[], T]) -> T:
        """See Over."""
        with self._lock:
            self.calls[verb] += 1
            script = self._next_script(verb, key)
            failing = script is not None or self._dice.random() < self.fail_ratios.get(verb, 0.0)
            self.failed[verb] += failing
        if not failing:
            return call()
        if script is not None and script.done_anyway:
            call()
        fault = script.fault if script is not None else self._reason
        if isinstance(fault, Exception):
            raise fault
        return self._answer(verb, fault)  # type: ignore[no-any-return]

    def _next_script(self, verb: str, key: ChunkKey | None) -> _Script | None:
        for script in self._scripts:
            if script.verb == verb and script.key in (None, key):
                script.left -= 1
                if script.left <= 0:
                    self._scripts.remove(script)
                return script
        return None

    def _answer(self, verb: str, reason: Reason) -> Any:
        match verb:
            case "read" | "stored_bytes" | "write":
                return Refusal(reason, f"injected failure of {verb}")
            case "find":
                return {}
            case "sweep":
                return 0
            case "scan":
                raise TierUnavailable("injected failure of scan")
            case "space":
                raise OSError("injected failure of space")
            case _:
                return None

    def read(self, key: ChunkKey, shard: Shard, into: memoryview) -> Header | Refusal:
        """See Tier, and `damage` and `lie`."""
        header = super().read(key, shard, into)
        if isinstance(header, Refusal):
            return header
        end = header.header_bytes + header.payload_bytes
        with self._lock:
            damaged = key in self._damaged
            lied_about = self._lied_about is None or key in self._lied_about
            bit = self._dice.randrange(8 * end)
        if damaged:
            into[bit // 8] ^= 1 << bit % 8
            return _verified(into[:end], key, shard)
        if lied_about:
            payload = bytes(into[header.header_bytes : end])
            into[header.header_bytes : end] = bytes(b ^ 0xFF for b in payload)
        return header

    def write(
        self, key: ChunkKey, shard: Shard, data: memoryview, *, overwrite: bool
    ) -> Refusal | None:
        """See Tier; what was damaged is whole again when it was really replaced."""
        refusal = super().write(key, shard, data, overwrite=overwrite)
        if refusal is None and overwrite:
            with self._lock:
                self._damaged.discard(key)
        return refusal


class Gated(Over):
    """A tier with a gate before each verb: a call that meets a shut gate waits.

    As a context manager it opens all gates at the end, so that no thread stays behind.
    """

    def __init__(self, tier: Tier, shut: Collection[str] = ()) -> None:
        super().__init__(tier)
        for verb in shut:
            _check_verb(verb)
        self._changed = threading.Condition()
        self._shut = set(shut)
        self._waiting: Counter[str] = Counter()
        self._passes: Counter[str] = Counter()

    def __enter__(self) -> Gated:
        return self

    def __exit__(self, *exc: object) -> None:
        self.open(*VERBS)

    def shut(self, *verbs: str) -> None:
        """From now on calls of these verbs wait."""
        with self._changed:
            for verb in verbs:
                _check_verb(verb)
                self._shut.add(verb)

    def open(self, *verbs: str) -> None:
        """Let all calls of these verbs go, those to come as well."""
        with self._changed:
            self._shut.difference_update(verbs)
            self._changed.notify_all()

    def let_one_go(self, verb: str) -> None:
        """Let one call go that waits now or comes next; the gate stays shut for others."""
        with self._changed:
            self._passes[verb] += 1
            self._changed.notify_all()

    def waiting(self, verb: str) -> int:
        """Calls of this verb that wait at the gate now."""
        with self._changed:
            return self._waiting[verb]

    def wait_until(self, verb: str, count: int = 1, *, timeout_s: float = 60.0) -> None:
        """Return when at least `count` calls wait at the gate. Raises TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._waiting[verb] >= count, timeout_s):
                raise TimeoutError(f"{self._waiting[verb]} calls of {verb} came, not {count}")

    def around(self, verb: str, key: ChunkKey | None, call: Callable[[], T]) -> T:
        """See Over."""
        with self._changed:
            if verb in self._shut:
                self._waiting[verb] += 1
                self._changed.notify_all()
                self._changed.wait_for(lambda: verb not in self._shut or self._passes[verb] > 0)
                self._waiting[verb] -= 1
                if verb in self._shut:
                    self._passes[verb] -= 1
        return call()


def _check_verb(verb: str) -> None:
    if verb not in VERBS:
        raise Bug(f"{verb!r} is none of the calls that can be held or fail: {VERBS}")
