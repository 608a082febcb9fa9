"""What a tier is: a place where chunks live, whatever it is made of.

All methods may block and are called from the store's own threads only, several at once.
None but `scan` raises for what media do (absent, full, broken): those are `Refusal` values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from fx_kvbackend.core.format import Header
from fx_kvbackend.records import ChunkKey, Found, Refusal, Shard


class Space(NamedTuple):
    """Free and total bytes of the medium."""

    free_bytes: int
    total_bytes: int


class Copies(NamedTuple):
    """What is stored of one chunk: the shard counts of its complete copies, and all bytes."""

    shard_counts: tuple[int, ...]
    stored_bytes: int


class Tier(Protocol):
    """A place where chunks live."""

    name: str
    path_taken: str
    """How bytes travel here and why, for the log: `O_DIRECT (probed ...)`."""

    def read(self, key: ChunkKey, shard: Shard, into: memoryview) -> Header | Refusal:
        """The shard's whole file in `into`, verified: key, length and every checksum."""
        ...

    def stored_bytes(self, key: ChunkKey, shard: Shard) -> int | Refusal:
        """Length of the shard's file."""
        ...

    def write(
        self, key: ChunkKey, shard: Shard, data: memoryview, *, overwrite: bool
    ) -> Refusal | None:
        """Publish a sealed chunk atomically; None when it is there.

        Without `overwrite` a copy of the same length that is already there is kept and
        nothing is written.
        """
        ...

    def find(self, keys: Sequence[ChunkKey]) -> dict[ChunkKey, Copies]:
        """Those of `keys` that are stored completely, by any process."""
        ...

    def delete(self, key: ChunkKey) -> None:
        """Remove every shard of every copy. What is already gone, or cannot go, is left."""
        ...

    def touch(self, key: ChunkKey, shard_count: int) -> None:
        """Record a use, so that the order of last use survives a restart."""
        ...

    def scan(self) -> Iterator[Found]:
        """Every shard stored, in no order; foreign files are passed over.

        Raises TierUnavailable when it cannot see everything: half a listing would look like
        free space.
        """
        ...

    def sweep(self) -> int:
        """Remove what dead writers left unfinished; returns how many files."""
        ...

    def space(self) -> Space:
        """Free and total bytes of the medium now."""
        ...

    def announce(self, namespace: str, manifest: Mapping[str, object]) -> list[str]:
        """Keep `manifest` beside the namespace's chunks, for people and for `find`.

        Returns one sentence per namespace here that differs from it in a single field: the
        usual reason why a restart does not hit.
        """
        ...

    def close(self) -> None:
        """Give up what this process holds. Idempotent; stored chunks stay."""
        ...
