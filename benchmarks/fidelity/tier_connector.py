"""vLLM's `OffloadingConnector`, whose scheduler half looks at requests that have ended in the order of their ends.

A module of its own, which vLLM loads by name.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector


class TierConnector(OffloadingConnector):  # type: ignore[misc]
    """vLLM goes through a set of them, in no order that means anything."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._ended: list[str] = []

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        self._ended.append(request.request_id)
        finished: tuple[bool, dict[str, Any] | None] = super().request_finished_all_groups(request, block_ids)
        return finished

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        ended, self._ended = self._ended, []
        finished = scheduler_output.finished_req_ids
        scheduler_output.finished_req_ids = [name for name in ended if name in finished]
        metadata = super().build_connector_meta(scheduler_output)
        scheduler_output.finished_req_ids = finished
        return metadata
