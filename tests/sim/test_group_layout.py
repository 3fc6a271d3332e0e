"""Layouts of KV cache groups, against what each kind of layers reads, token by token."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.hardware.kv_groups import KVGroup, KVGroupKind
from libra.sim.engine.config import EngineConfig
from libra.sim.engine.group_blocks import GroupBlock, Known, Prefix
from libra.sim.engine.group_layout import layouts
from libra.sim.engine.request import Chain

KINDS: tuple[KVGroupKind, ...] = ("full", "window", "chunk", "state")
PATH = ((Chain("context"), 0, 1 << 20),)
SHORT = EngineConfig(
    max_model_len=64,
    kv_blocks=99,
    block_size=4,
    max_num_seqs=4,
    max_num_batched_tokens=8,
    kv_groups=(KVGroup("full", 4),),
)


@dataclass(frozen=True)
class Layers:
    """Layers of one kind, in an engine whose hits are whole multiples of `alignment` tokens."""

    group: KVGroup
    alignment: int

    def read(self, tokens: int) -> set[int]:
        """Places of the blocks with what the next token reads of the `tokens` tokens before it."""
        kind, number = self.group.kind, self.group.tokens
        if kind == "state":  # the one after the last token
            first = max(0, tokens - 1)
        else:
            first = {"full": 0, "window": max(0, tokens + 1 - number), "chunk": tokens - tokens % (number or 1)}[kind]
        return {token // self.group.block_size for token in range(first, tokens)}


def layers(*kinds: KVGroupKind) -> st.SearchStrategy[Layers]:
    return st.sampled_from(kinds).flatmap(_of_kind)


@st.composite
def _of_kind(draw: st.DrawFn, kind: KVGroupKind) -> Layers:
    size = draw(st.integers(1, 4))
    tokens = draw(st.integers(2, 20)) if kind == "window" else size * draw(st.integers(2, 4)) if kind == "chunk" else 0
    blocks = draw(st.integers(1, 4)) if kind in ("full", "window") else 1  # of chunks and states all have equal blocks
    return Layers(KVGroup(kind, size, tokens), size * blocks)


@given(layers(*KINDS), st.sets(st.integers(0, 15)), st.integers(0, 16))
def test_a_hit_is_the_longest_prefix_whose_next_token_reads_nothing_that_is_missing(
    of: Layers, there: set[int], blocks: int
) -> None:
    [layout] = layouts((of.group,), of.alignment, True, 8, 64)
    known = Known(of.group.block_size)
    for place in there:
        known.add(GroupBlock(0, place), PATH)
    most = blocks * of.alignment
    found = layout.hit(Prefix([known], PATH), most)
    assert found == max(tokens for tokens in range(0, most + 1, of.alignment) if of.read(tokens) <= there)


@given(layers("full", "window", "state"), st.integers(0, 15))
def test_a_block_is_kept_if_some_hit_reads_it(of: Layers, place: int) -> None:
    [layout] = layouts((of.group,), of.alignment, True, 8, 64)
    hits = range(0, 64 * of.alignment, of.alignment)
    assert layout.keeps(place) == any(place in of.read(tokens) for tokens in hits)


@given(layers(*KINDS), st.integers(0, 60))
def test_what_is_released_is_what_no_later_token_reads(of: Layers, tokens: int) -> None:
    [layout] = layouts((of.group,), of.alignment, True, 8, 64)
    read = set[int]().union(*(of.read(later) for later in range(tokens, tokens + 40)))
    before = range(layout.blocks(tokens))
    assert [place for place in before if place >= layout.first(tokens)] == [place for place in before if place in read]


@pytest.mark.parametrize(
    ("group", "blocks"),
    [
        (KVGroup("full", 4), 16),  # of 64 tokens
        (KVGroup("window", 4, 8), 5),  # 7 tokens before the 8 of an iteration, and they may begin inside a block
        (KVGroup("window", 4, 80), 17),
        (KVGroup("chunk", 4, 16), 6),  # a chunk of 16 tokens, and 8 of an iteration
        (KVGroup("chunk", 4, 80), 16),
        (KVGroup("state", 4), 2),  # the one that is read, and the one that is written
    ],
)
def test_the_longest_context_needs_no_more_blocks_than_its_layers_read(group: KVGroup, blocks: int) -> None:
    config = replace(SHORT, kv_groups=(group,), kv_blocks=blocks)
    assert config.longest_blocks == blocks
    with pytest.raises(ValueError, match=f"less than the {blocks} of all kv_groups"):
        replace(config, kv_blocks=blocks - 1)
