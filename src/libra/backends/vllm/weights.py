"""vLLM's extension point for weight updates, implemented with the shared-memory buffers.

Invariant: messages to a worker of vLLM are plain numbers, so each process of an engine on several GPUs finds the
buffers by itself. Weights are on the device when an update returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from libra.backends.transport.messages import Tensor
from libra.backends.transport.shared_memory import WeightBuffer

if TYPE_CHECKING:
    import torch

    Weight = tuple[str, torch.Tensor]

TurnTaking = Callable[[Iterator["Weight"]], Iterator["Weight"]]
_BACKEND = "libra_shm"


@dataclass
class BufferInfo(WeightTransferInitInfo):
    """Place of the buffers: an open file of process `pid`."""

    pid: int
    descriptor: int
    size: int
    layout: list[tuple[str, tuple[int, ...], int, str]]  # fields of each `Tensor`


@dataclass
class VersionInfo(WeightTransferUpdateInfo):
    buffer: int
    checksum: int


class SharedMemoryTransfer(WeightTransferEngine[BufferInfo, VersionInfo]):
    """Loads the weights of a buffer into vLLM as a complete layerwise reload. Callers verify the buffer before."""

    init_info_cls = BufferInfo
    update_info_cls = VersionInfo
    in_turns: TurnTaking = staticmethod(lambda weights: weights)  # wraps loading in device grants

    def init_transfer_engine(self, init_info: BufferInfo) -> None:
        self._buffer = WeightBuffer.attach(init_info.pid, init_info.descriptor, init_info.size)
        self._layout = tuple(Tensor(*fields) for fields in init_info.layout)  # type: ignore[arg-type]
        if current_platform.is_cuda():
            self._buffer.pin()

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, int]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if current_platform.is_cuda():  # copies from pinned memory continue after the call
            current_platform.synchronize()

    def receive_weights(self, update_info: VersionInfo) -> None:
        self.model.load_weights(self.in_turns(self._buffer.views(update_info.buffer, self._layout)))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if current_platform.is_cpu():
            _pack_tied_output(self.model)
        if current_platform.is_cuda():
            current_platform.synchronize()

    def shutdown(self) -> None:
        pass

    @staticmethod
    def trainer_send_weights(*_: object, **__: object) -> None:
        """Raise `NotImplementedError`: trainers write into the buffers. vLLM 0.26 requires the method."""
        raise NotImplementedError("weights are published in shared memory")


def _pack_tied_output(model: torch.nn.Module) -> None:
    """Pack an output layer that is tied to the embeddings. On CPU it multiplies by a packed copy of the embeddings,
    which a reload does not update."""
    for layer in model.modules():
        if isinstance(layer, ParallelLMHead) and model.config.tie_word_embeddings:
            layer.quant_method.process_weights_after_loading(layer)


class KnowsSharedMemory:
    """Extension of vLLM's worker. A worker in a separate process imports this module, which registers the transfer."""


WeightTransferEngineFactory.register_engine(_BACKEND, SharedMemoryTransfer)
CONFIG = WeightTransferConfig(backend=_BACKEND)
WORKER_EXTENSION = f"{KnowsSharedMemory.__module__}.{KnowsSharedMemory.__qualname__}"


def take_turns(worker: Any, in_turns: TurnTaking) -> None:
    """Have a worker in this process wrap its weight loading with `in_turns`."""
    worker.weight_transfer_engine.in_turns = in_turns
