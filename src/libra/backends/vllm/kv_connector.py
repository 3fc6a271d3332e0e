"""vLLM's extension point for external KV, implemented with frames in shared memory.

Invariant: KV is identified by the hashes of vLLM's prefix cache, which cover the salt and all tokens up to the end of a
block. So an engine saves only KV that it would itself reuse for such a request, and accepts only the same. A block that
is missing, damaged, or of newer weights than the engine's ends the transfer, and the engine computes the rest.

vLLM makes two connectors, one for its scheduler and one for its model. The first decides, since it sees blocks and
requests; the second copies. The engine steps in this process, so the copies are done when the step returns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.request import Request

from libra.backends.transport.engine_messages import Fetched, KVBufferPlace, KVTransfer, Save, Saved
from libra.backends.transport.shared_memory import Filled, KVBuffer
from libra.cost.engine_memory import BLOCK_TOKENS

if TYPE_CHECKING:
    import numpy.typing as npt
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

# Bytes copied out in one iteration. They take a few milliseconds, which hardly delays the engine's turns.
SAVED_BYTES = 4 << 20

_TRANSFER = "libra_transfer"


def transfer_config(place: KVBufferPlace) -> KVTransferConfig:
    """Configuration with which vLLM finds this connector, and this connector finds its frames."""
    return KVTransferConfig(
        kv_connector=FrameConnector.__name__,
        kv_connector_module_path=__name__,
        kv_role="kv_both",
        kv_connector_extra_config={"place": msgspec.to_builtins(place)},
    )


def request_arguments(transfer: KVTransfer) -> dict[str, Any]:
    """`extra_args` of a request whose context begins with the blocks of the transfer."""
    return {"kv_transfer_params": {_TRANSFER: transfer}}


@dataclass(frozen=True, slots=True)
class Copy:
    """A block and its frame. With `filled` the block is copied into the frame, otherwise out of it."""

    block: int
    frame: int
    filled: Filled | None = None


@dataclass
class Copies(KVConnectorMetadata):
    """The copies of one step."""

    saves: list[Copy] = field(default_factory=list)
    fetches: list[Copy] = field(default_factory=list)


@dataclass(slots=True)
class _Giving:
    """Outgoing blocks. They are referenced, so the pool cannot allocate them to another request."""

    transfer: int
    blocks: list[KVCacheBlock]
    copies: deque[Copy]


@dataclass(slots=True)
class _Taking:
    """A transfer for a waiting request. `sound` counts its leading frames with the expected content; None:
    unchecked."""

    transfer: KVTransfer
    first: int = 0  # the first block that the engine does not have itself
    sound: int | None = None


class FrameConnector(KVConnectorBase_V1):
    """vLLM's connector. The engine sets `version` to that of its weights."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        cache = vllm_config.cache_config
        assert cache.block_size == BLOCK_TOKENS
        self._frames = KVBuffer.attach(
            msgspec.convert(self._kv_transfer_config.get_from_extra_config("place", None), KVBufferPlace)
        )
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, get_hash_fn_by_name(cache.prefix_caching_hash_algo))
        self._saved_blocks = max(1, SAVED_BYTES // self._frames.payload.shape[1])  # in one step
        self.version = 0
        self._pool: BlockPool
        self._givings: deque[_Giving] = deque()
        self._takings: dict[str, _Taking] = {}
        self._fetches: list[Copy] = []  # of the step that is being scheduled
        self._done: list[Saved | Fetched] = []
        self._layers: list[npt.NDArray[np.uint8]] = []  # views of the cache, with a row of bytes for each block

    # --- for the engine -------------------------------------------------------------------------------------------

    @property
    def giving(self) -> bool:
        """Whether steps are needed to save KV."""
        return bool(self._givings)

    def give(self, order: Save) -> None:
        """Save the cached prefix of a context, some blocks in each of the next steps."""
        frames = iter(order.transfer.frames)
        blocks: list[KVCacheBlock] = []
        copies: deque[Copy] = deque()
        for name, frame in zip(self._names(order.tokens, order.salt), frames, strict=False):
            found = self._pool.get_cached_block(name, [0])
            if found is None:
                break
            blocks += found
            copies.append(Copy(found[0].block_id, frame, Filled(order.transfer.number, self.version, name)))
        self._pool.touch(blocks)
        self._givings.append(_Giving(order.transfer.number, blocks, copies))

    def done(self) -> list[Saved | Fetched]:
        """Messages since the last call, about saved KV and about frames that may be freed."""
        while self._givings and not self._givings[0].copies:
            given = self._givings.popleft()
            self._pool.free_blocks(reversed(given.blocks))
            self._done.append(Saved(given.transfer, len(given.blocks)))
        done, self._done = self._done, []
        return done

    def _names(self, tokens: Sequence[int], salt: str | None) -> list[bytes]:
        """Hashes of the whole blocks of this context in vLLM's prefix cache."""
        request = Request("", list(tokens), SamplingParams(), None, cache_salt=salt, block_hasher=self._hasher)
        return list(request.block_hashes)

    # --- for the scheduler ----------------------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._pool = gpu_block_pool

    def on_new_request(self, request: Request) -> None:
        if request.kv_transfer_params is not None:
            self._takings[request.request_id] = _Taking(request.kv_transfer_params[_TRANSFER])

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        taking = self._takings.get(request.request_id)
        if taking is None:
            return 0, False
        if taking.sound is None:
            taking.sound = self._sound(taking.transfer, request.block_hashes)
        taking.first = num_computed_tokens // BLOCK_TOKENS
        last = min(taking.sound, (request.num_tokens - 1) // BLOCK_TOKENS)  # leaves a token to compute, for sampling
        return max(0, last - taking.first) * BLOCK_TOKENS, False

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        # The transfer is used once, since its frames may belong to another transfer when a preempted request resumes.
        taking = self._takings.pop(request.request_id, None)
        if taking is None:
            return
        span = slice(taking.first, taking.first + num_external_tokens // BLOCK_TOKENS)
        ids = blocks.get_block_ids()[0]
        self._fetches += map(Copy, ids[span], taking.transfer.frames[span])
        self._done.append(Fetched(taking.transfer.number, num_external_tokens))

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, None]:
        taking = self._takings.pop(request.request_id, None)
        if taking is not None:
            self._done.append(Fetched(taking.transfer.number, 0))
        return False, None

    def build_connector_meta(self, scheduler_output: Any) -> Copies:
        copies = Copies(fetches=self._fetches)
        self._fetches = []
        for giving in self._givings:
            while giving.copies and len(copies.saves) < self._saved_blocks:
                copies.saves.append(giving.copies.popleft())
        return copies

    def has_pending_push_work(self) -> bool:
        return self.giving

    def _sound(self, transfer: KVTransfer, names: Sequence[bytes]) -> int:
        """Number of leading frames with the expected content."""
        count = 0
        for name, frame in zip(names, transfer.frames, strict=False):
            if not self._frames.holds(frame, Filled(transfer.number, self.version, name)):
                break
            count += 1
        return count

    # --- for the model --------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        blocks = self._kv_cache_config.num_blocks
        self._layers = [kv_caches[name].view(blocks, -1).view(torch.uint8).numpy() for name in sorted(kv_caches)]
        found, expected = sum(layer.shape[1] for layer in self._layers), self._frames.payload.shape[1]
        if found != expected:
            raise ValueError(f"a block of this engine's KV has {found} bytes, but a frame has {expected}")

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for copy in self._copies().fetches:
            row, start = self._frames.payload[copy.frame], 0
            for layer in self._layers:
                end = start + layer.shape[1]
                layer[copy.block] = row[start:end]
                start = end

    def wait_for_save(self) -> None:
        for copy in self._copies().saves:
            row, start = self._frames.payload[copy.frame], 0
            for layer in self._layers:
                end = start + layer.shape[1]
                row[start:end] = layer[copy.block]
                start = end
            assert copy.filled is not None
            self._frames.seal(copy.frame, copy.filled)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: all layers are present before the forward pass."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: `wait_for_save` saves blocks on request."""

    def _copies(self) -> Copies:
        return self._get_connector_metadata()
