"""KV cache groups of a model's layers, computed as in vLLM's `get_kv_cache_groups` and `get_kv_cache_configs`.

Invariant: a block has room for one page of each layer of the largest group, and all pages have the same bytes. Smaller
pages get more tokens, or padding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from libra.hardware.kv_groups import KVGroup, KVGroupKind

_PADDED = 1.5  # vLLM's limit: kinds whose numbers of layers differ by a smaller factor are padded to the larger


@dataclass(frozen=True, slots=True)
class KVLayer:
    """Memory of one layer for a context, on one GPU."""

    kind: KVGroupKind
    token_bytes: int = 0  # of the KV of a token
    state_bytes: int = 0  # of a state, if the layer has a state instead of KV
    tokens: int = 0  # of a window or a chunk
    heads: int = 1  # distinguishes layers with other heads, even if they have as many bytes
    latent: bool = False  # whether its pages cannot be padded

    def page(self, block_size: int) -> int:
        """Bytes of a block of `block_size` tokens."""
        return self.state_bytes if self.kind == "state" else self.token_bytes * block_size


@dataclass(frozen=True, slots=True)
class GroupedLayers:
    """Groups of a model, the layers in each, and the bytes of a block on one GPU."""

    groups: tuple[KVGroup, ...]
    layers: tuple[int, ...]
    block_bytes: int

    def blocks(self, memory: float) -> int:
        """Blocks that requests can use in `memory` bytes, without the block that vLLM reserves."""
        return max(0, int(memory) // self.block_bytes - 1)


def group_layers(layers: Sequence[KVLayer], block_size: int) -> GroupedLayers:
    """Form the groups of a model. Blocks of attention layers have `block_size` tokens, or more if a page must fit a
    state.

    Raises `ValueError` for a model without layers, and if pages cannot have equal bytes.
    """
    if not layers:
        raise ValueError("the model has no layers: give one or more")
    size = _aligned(layers, block_size)
    counts = Counter(layers)  # in the order of the layers
    if len({(it.kind, it.tokens) for it in counts}) == 1 and (
        layers[0].kind != "state" or len({it.state_bytes for it in counts}) == 1
    ):
        pages = sum(it.page(size) * count for it, count in counts.items())
        return GroupedLayers((KVGroup(layers[0].kind, size, layers[0].tokens),), (len(layers),), pages)
    page = max(it.page(size) for it in counts)
    kinds = {it: _group(it, size, page) for it in counts}
    fewest, most = min(counts.values()), max(counts.values())
    width = most if most < fewest * _PADDED else fewest
    groups: list[KVGroup] = []
    numbers: list[int] = []
    for layer, count in counts.items():
        parts = -(-count // width)
        groups += [kinds[layer]] * parts
        numbers += [len(range(part, count, parts)) for part in range(parts)]
    return GroupedLayers(tuple(groups), tuple(numbers), page * max(numbers))


def _aligned(layers: Sequence[KVLayer], block_size: int) -> int:
    """Tokens in a block of attention layers whose page is at least as large as a state."""
    state = max((it.state_bytes for it in layers), default=0)
    token = next((it.token_bytes for it in layers if it.kind != "state"), 0)
    if not state or not token:
        return block_size
    return max(block_size, block_size * -(-state // (block_size * token)))


def _group(layer: KVLayer, block_size: int, page: int) -> KVGroup:
    """The group of a layer, with pages enlarged to `page` bytes."""
    own = layer.page(block_size)
    if layer.kind != "state" and page % own == 0:
        block_size *= page // own
    elif layer.latent and own != page:
        raise ValueError(
            f"a page of a latent layer has {own} bytes, but that of other layers {page}, so they cannot be made equal; "
            f"give a block_size for which one size divides the other"
        )
    return KVGroup(layer.kind, block_size, layer.tokens)
