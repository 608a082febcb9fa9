"""Puts planner and mover together from a configuration. The only place that names tiers."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fx_kvbackend.config import AUTO, Config
from fx_kvbackend.core.geometry import Geometry
from fx_kvbackend.errors import ConfigError
from fx_kvbackend.records import Shard
from fx_kvbackend.store.chores import Chores
from fx_kvbackend.store.mover import Mover, MoverSettings
from fx_kvbackend.store.planner import Planner, PlannerSettings
from fx_kvbackend.tiers.directory import DirectoryTier

if TYPE_CHECKING:
    from fx_kvbackend.engines.pages import Pages

log = logging.getLogger(__name__)

# A small store is known before the first request; a large one must not hold up the start.
_SCAN_GRACE_S = 0.25


def private_namespace() -> str:
    """A namespace that no other process knows."""
    return os.urandom(16).hex()


def _bytes_or_none(setting: int | str) -> int | None:
    return setting if isinstance(setting, int) else None


def build_planner(
    config: Config,
    namespace: str,
    manifest: Mapping[str, object],
    *,
    rank_count: int,
    shard_count: int,
    chunk_bytes: int,
    wants_events: bool,
) -> Planner:
    """The planner over the configured tiers, with its background work started.

    Raises TierUnavailable when the store cannot be opened.
    """
    tier = DirectoryTier(Path(config.local.path).expanduser(), writable=False)
    for note in tier.announce(namespace, manifest):
        log.warning("%s: %s", tier.root, note)
    chores = Chores(tier)
    local = config.local
    planner = Planner(
        PlannerSettings(
            namespace=namespace,
            rank_count=rank_count,
            shard_count=shard_count,
            chunk_bytes=chunk_bytes,
            capacity_bytes=_bytes_or_none(local.capacity),
            free_floor_bytes=_bytes_or_none(local.free_floor),
        ),
        chores,
        new_namespace=private_namespace,
        wants_events=wants_events,
    )
    chores.start()
    chores.scanned_once.wait(_SCAN_GRACE_S)
    planner.tick()
    return planner


def build_mover(
    config: Config,
    pages: Pages,
    geometries: Mapping[int, Geometry],
    shard: Shard,
    *,
    writes: bool,
) -> Mover:
    """One rank's mover over the configured tiers, with its threads started.

    Raises TierUnavailable when the store cannot be opened, ConfigError when the staging
    memory is too small for these chunks.
    """
    from fx_kvbackend.engines.pages import pin  # torch, which a planner can do without

    local = config.local
    tier = DirectoryTier(
        Path(local.path).expanduser(),
        allow_direct=local.direct_io == AUTO,
        sync=local.durability == "data",
    )
    try:
        mover = Mover(
            tier,
            pages,
            geometries,
            MoverSettings(
                shard=shard,
                writes=writes,
                staging_bytes=config.staging,
                load_deadline_s=config.load_deadline_s,
                read_threads=local.read_threads,
                write_threads=local.write_threads,
            ),
        )
    except ConfigError:
        tier.close()
        raise
    unpinned = pin(mover.arena.memory)
    log.info(
        "bytes travel: %s; GDS: not used (POSIX engine); staging %d x %.2f MiB, %s",
        tier.path_taken,
        mover.arena.slot_count,
        mover.arena.slot_bytes / (1 << 20),
        "pinned" if unpinned is None else f"not pinned ({unpinned})",
    )
    return mover
