"""Entry point of the `vllm.general_plugins` group: makes FxKVConnector known by name.

Imported in every process of every vLLM, so it stays light and never raises.
"""

from __future__ import annotations

import logging

_CONNECTOR = "FxKVConnector"


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
