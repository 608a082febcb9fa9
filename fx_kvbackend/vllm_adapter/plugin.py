"""Entry point of the `vllm.general_plugins` group: makes FxKVConnector known by name.

Imported in every process of every vLLM, so it stays light and never raises.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator

_CONNECTOR = "FxKVConnector"
# Taken when vLLM loads its plugins, which is before its CPU backend binds the main thread of a
# worker to the cores that compute.
_CORES = os.sched_getaffinity(0)


def register() -> None:
    """Register the connector. Harmless when called again."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if _CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(
            _CONNECTOR, "fx_kvbackend.vllm_adapter.connector", _CONNECTOR
        )


def use_host_logging() -> None:
    """Let our log lines come out where vLLM's do, unless they have a place of their own."""
    ours, theirs = logging.getLogger("fx_kvbackend"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = theirs.propagate


@contextlib.contextmanager
def unbound_threads() -> Iterator[None]:
    """Threads started inside may run on all cores of the process.

    Else they would inherit the core of the CPU backend's main thread and compete with compute
    while other cores are idle.
    """
    bound = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):  # the set of allowed cores may have shrunk since
        os.sched_setaffinity(0, _CORES)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, bound)
