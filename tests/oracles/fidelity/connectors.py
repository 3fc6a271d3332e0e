"""Connectors of vLLM's scheduler, without a network: they are in a module of their own, which vLLM loads by name."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector


class PullConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """A prompt marked `do_remote_prefill` is pulled, but for what the prefix cache has; the blocks of one marked
    `do_remote_decode` are kept when it ends as it should."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.started: list[str] = []  # requests whose pull begins

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        wanted = (request.kv_transfer_params or {}).get("do_remote_prefill")
        count = request.num_prompt_tokens - num_computed_tokens if wanted else 0
        return count, count > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        params = request.kv_transfer_params or {}
        if params.get("do_remote_prefill"):
            if num_external_tokens:
                self.started.append(request.request_id)
            params["do_remote_prefill"] = False  # one pull for a request

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        keeps = (request.kv_transfer_params or {}).get("do_remote_decode")
        return bool(keeps) and request.status.name in ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"), None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids)

    # The worker's half, which is not called here

    def start_load_kv(self, *arguments: Any, **options: Any) -> None: ...
    def wait_for_layer_load(self, *arguments: Any, **options: Any) -> None: ...
    def save_kv_layer(self, *arguments: Any, **options: Any) -> None: ...
    def wait_for_save(self) -> None: ...


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
