"""One call to an engine, a prompt and tokens generated after it; and the chains by which contexts share tokens.

Invariant: fields that describe the work never change. Fields of the outcome are written once, except counts of repeated
events. Only `ask_at`, which is no part of the work, is set and cleared. Two contexts share tokens as far as they follow
the same chains, and no further.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from libra.sim.engine.drawn import Course

Stop = Literal["length", "eos"]
Status = Literal["waiting", "running", "finished", "cancelled", "interrupted", "refused", "failed", "unfinished"]


@dataclass(slots=True, eq=False)
class Chain:
    """A sequence of tokens of any length, which may share the beginning of another one.

    The first `fork` tokens are those of `parent`; the others are the chain's own. A prompt that sixteen trajectories
    share is one chain, and each of them forks from it at the prompt's end. One request at a time generates on a chain.
    """

    name: str
    parent: Chain | None = field(default=None, repr=False)
    fork: int = 0  # tokens

    def __post_init__(self) -> None:
        name, parent, fork = self.name, self.parent, self.fork
        if fork < 0 or (parent is None and fork):
            raise ValueError(f"chain {name!r}: fork is {fork}; give the number of tokens shared with a parent")
        if parent is not None and fork < parent.fork:
            raise ValueError(
                f"chain {name!r} forks at {fork}, where {parent.name!r} is still its parent's (up to {parent.fork}):"
                " fork from that one"
            )


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """A request and its outcome. Times are ticks, lengths are tokens.

    `output_tokens` is the number of tokens that the request will generate; only the simulator knows it, not a policy. A
    request without a chain shares its tokens with no other request. `stop` is the reason why generation ends: a length,
    which the scheduler knows in advance, or a token, which the scheduler has to see. `ask_at` is a number of generated
    tokens, 1 or more, at which the engine stops so that its caller can decide. `SimEngine.ask` sets it while an engine
    has the request.
    """

    number: int  # ties between equal arrivals go to the lower one
    arrival: int
    prompt_tokens: int
    output_tokens: int
    _: KW_ONLY
    chain: Chain | None = None
    priority: int = 0  # lower is served first
    stop: Stop = "length"
    cancel_at: int | None = None
    ask_at: int | None = None
    pull: bool = False  # the KV of its prompt is pulled from another engine
    keeps: bool = False  # its blocks stay when it finishes, for another engine to pull them
    owner: object | None = None  # the object that submitted it
    status: Status = field(default="waiting", init=False)
    reason: str | None = field(default=None, init=False)  # reason for which it was refused, or did not finish
    engine: int | None = field(default=None, init=False)
    scheduled: int | None = field(default=None, init=False)  # start of its first iteration
    prefill_end: int | None = field(default=None, init=False)
    first_token: int | None = field(default=None, init=False)
    finish: int | None = field(default=None, init=False)  # end, also of cancelled, interrupted and refused requests
    generated: int = field(default=0, init=False)
    cached_tokens: int = field(default=0, init=False)  # tokens of the prompt found in the cache at the first admission
    preemptions: int = field(default=0, init=False)
    # The fields below belong to the engine that has the request.
    path: Path = field(default=(), init=False)  # owners of its blocks
    written: int = field(default=0, init=False)  # blocks that the pool knows to be full of its tokens
    admission: int = field(default=-1, init=False)  # number of its admission, while it runs
    flight: int = field(default=-1, init=False)  # number of the batch in which it generates; -1: it does not
    computed: int = field(default=0, init=False)  # computed tokens, while it is prefilled
    target: int = field(default=0, init=False)  # tokens to compute before it generates the next token
    offset: int = field(default=0, init=False)  # computed tokens minus the engine's iterations, while it generates
    last: int = field(default=0, init=False)  # iteration that generates its last token
    course: Course | None = field(default=None, init=False)  # with drafts: its tokens in each of its iterations
    verifications: int = field(default=0, init=False)  # number of past verifications of drafts
    padding: int = field(default=0, init=False)  # placeholder drafts, in the iteration that admits it
    reserves: bool = field(default=False, init=False)  # blocks stay free for it while its prompt is not complete


Owner = Chain | Request  # owner of the tokens in a block: a chain, or a request that shares no tokens
Path = tuple[tuple[Owner, int, int], ...]  # (owner, first block, end of its blocks) of all parts of a context


def owner_of(path: Path, block: int) -> Owner:
    """The owner of a block of a context."""
    return next(owner for owner, _, end in path if block < end)
