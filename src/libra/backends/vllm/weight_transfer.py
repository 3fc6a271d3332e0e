"""vLLM's own extension point for weight updates, filled with our shared-memory buffers.

Invariant: vLLM sees a complete layerwise reload or none; the checksum is tested before the first tensor is touched.
Importing this module registers the backend `libra_shm` with vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from libra.backends.transport.messages import Tensor
from libra.backends.transport.shared_memory import WeightBuffer

BACKEND = "libra_shm"


@dataclass
class BufferInfo(WeightTransferInitInfo):
    buffer: WeightBuffer
    layout: tuple[Tensor, ...]


@dataclass
class VersionInfo(WeightTransferUpdateInfo):
    buffer: int
    checksum: int


class SharedMemoryTransfer(WeightTransferEngine[BufferInfo, VersionInfo]):
    init_info_cls = BufferInfo
    update_info_cls = VersionInfo

    def init_transfer_engine(self, init_info: BufferInfo) -> None:
        self._buffer, self._layout = init_info.buffer, init_info.layout

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, int]) -> None:
        # The base class synchronises an accelerator afterwards; there is none behind shared memory.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: VersionInfo) -> None:
        self.model.load_weights(self._buffer.read(update_info.buffer, self._layout, update_info.checksum))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        pass


WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryTransfer)
