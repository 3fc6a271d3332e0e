"""Which tokens requests share: as many full blocks as are equal from the beginning."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from libra.serve.emulate.prefix_index import PrefixIndex
from libra.sim.engine.block_pool import BlockPool
from libra.sim.engine.request import Chain, owner_of

BLOCK = 4
_contexts = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), max_size=30), st.lists(st.integers(0, 1), max_size=10), st.sampled_from("ab")
    ),
    max_size=12,
)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens of the full blocks in which they are equal from the beginning."""
    shared = 0
    while shared + BLOCK <= min(len(one), len(other)) and one[: shared + BLOCK] == other[: shared + BLOCK]:
        shared += BLOCK
    return shared


@given(_contexts)
def test_a_chain_shares_what_is_equal_with_any_context_before_and_no_more(
    contexts: list[tuple[list[int], list[int], str]],
) -> None:
    index, seen = PrefixIndex(BLOCK, 10_000), []
    for prompt, answer, salt in contexts:
        chain = index.chain(prompt, salt)
        expected = max((common(prompt, other) for other, its_salt in seen if its_salt == salt), default=0)
        assert chain.fork == expected
        index.learn(chain, [*prompt, *answer], salt)
        seen += [(prompt, salt), ([*prompt, *answer], salt)]


@given(_contexts)
def test_blocks_with_one_owner_have_equal_tokens(contexts: list[tuple[list[int], list[int], str]]) -> None:
    """As the simulator's cache takes them for the same."""
    index, pool = PrefixIndex(BLOCK, 10_000), BlockPool(100, BLOCK, True)
    tokens_of: dict[tuple[object, int], tuple[str, list[int]]] = {}
    for prompt, answer, salt in contexts:
        chain = index.chain(prompt, salt)
        context = [*prompt, *answer]
        index.learn(chain, context, salt)
        path = pool.path(chain)
        for block in range(len(context) // BLOCK):
            owner: object = owner_of(path, block)
            known = tokens_of.setdefault((owner, block), (salt, context[: (block + 1) * BLOCK]))
            assert known == (salt, context[: (block + 1) * BLOCK])


def test_what_was_seen_last_is_remembered() -> None:
    index = PrefixIndex(BLOCK, 6)
    first, second = list(range(12)), list(range(100, 112))
    index.chain(first)
    index.chain(second)
    assert len(index) == 6
    index.chain(first)  # once more, so that the second is the older one
    index.chain([200, 201, 202, 203])
    assert len(index) == 6
    assert index.chain([*first, 1]).fork == 12
    assert index.chain([*second, 1]).fork == 0  # its beginning was forgotten, so that the rest is never found
    assert isinstance(index.chain([]), Chain)
