"""A connector that promises stored tokens and moves nothing: the oracle must catch it."""

from __future__ import annotations

from typing import Any

from fx_kvbackend.vllm_adapter.connector import FxKVConnector


class LyingConnector(FxKVConnector):
    """Loads end in success, and the engine's blocks stay as they were."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Register, then cut the last copy out of the load path."""
        super().register_kv_caches(kv_caches)
        pages: Any = self._worker._mover._pages
        pages.scatter = lambda *args, **kwargs: None
