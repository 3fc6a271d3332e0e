"""One trace to read from top to bottom: the iterations of a small engine, as they are decided and as they are drawn."""

from __future__ import annotations

import pytest
from simulated import naive, simulate

from libra.sim.engine.config import EngineConfig
from libra.sim.engine.iteration_cost import AffineCost
from libra.sim.engine.messages import Iteration
from libra.sim.engine.request import Chain, Request

# Six blocks of 4 tokens; an iteration computes up to 8 tokens, and takes 10 ticks and one for each of a prompt.
CONFIG = EngineConfig(max_model_len=24, kv_blocks=6, block_size=4, max_num_seqs=3, max_num_batched_tokens=8)
COST = AffineCost(10, per_new_token=1)


def asked() -> list[Request]:
    """Two samples of a prompt of two blocks, each with a token of its own after it; a request beside them; and a third
    sample when all is over."""
    prompt = Chain("prompt")
    samples = [Chain(name, prompt, 8) for name in ("left", "middle", "right")]
    return [
        Request(0, 0, 9, 8, chain=samples[0]),
        Request(1, 0, 9, 5, chain=samples[1]),
        Request(2, 25, 7, 6),
        Request(3, 190, 9, 2, chain=samples[2]),
    ]


def told(iteration: Iteration) -> str:
    """Start and end; request+tokens; who is preempted; tokens found by those admitted; blocks that are free then."""
    words = [f"{number}+{tokens}" for number, tokens in iteration.scheduled]
    words += [f"out {number}" for number in iteration.preempted]
    words += [f"hit {number}:{tokens}" for number, tokens in iteration.cached if tokens]
    return f"{iteration.start:>3}-{iteration.end:<3} {' '.join(words)} free {iteration.free_blocks}"


TRACE = [
    "  0-18  0+8 free 4",  # the budget cuts the prompt of 9
    " 18-30  0+1 1+1 hit 1:8 free 2",  # 1 finds the prompt that they share, and computes its own token
    " 30-46  0+1 1+1 2+6 free 0",  # 0 and 1 generate; of 2, what the budget leaves
    " 46-57  0+1 1+1 2+1 free 0",  # the last token of its prompt
    " 57-67  0+1 1+1 2+1 free 0",
    " 67-77  0+1 1+1 out 2 free 0",  # 0 needs a block, and so does 1: both are taken from 2, the last to come
    " 77-87  0+1 free 2",  # 1 is done and leaves its own two blocks; 2 needs three by now
    " 87-97  0+1 free 2",
    " 97-107 0+1 free 2",
    "107-125 2+8 free 4",  # 0 is done. Of 2, nothing is left in the cache: its 7 tokens and the 2 it had generated
    "125-136 2+1 free 3",  # are computed again, in two chunks
    "136-146 2+1 free 3",
    "146-156 2+1 free 3",
    "156-166 2+1 free 3",
    "190-201 3+1 hit 3:8 free 3",  # the prompt's two blocks were let go last, so they are still there
    "201-211 3+1 free 3",
]


@pytest.mark.parametrize("exact", [False, True])
def test_a_trace_to_follow(exact: bool) -> None:
    run = simulate(CONFIG, COST, asked, exact=exact)
    assert [told(iteration) for iteration in run.iterations] == TRACE
    assert {number: (it.first_token, it.finish) for number, it in run.requests.items()} == {
        0: (30, 107),
        1: (30, 77),
        2: (57, 166),
        3: (201, 211),
    }
    assert run.result == naive(CONFIG, COST, asked)
    assert run.engine.events == (16 if exact else 12)
