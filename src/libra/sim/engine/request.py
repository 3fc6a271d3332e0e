"""One call to an engine: a prompt, and tokens generated after it.

Invariant: what is asked never changes; what happened is written once, except for the counts of repeated events. Only
`ask_at`, which is no part of the work, comes and goes.
"""

from __future__ import annotations

from typing import Literal

from libra.sim.engine.blocks import Context
from libra.sim.engine.chain import Chain

Status = Literal["waiting", "running", "finished", "cancelled", "interrupted", "refused", "unfinished"]


class Request(Context):
    """What is asked, and what became of it. Times are ticks, lengths are tokens.

    `output_tokens` is how many tokens it will generate (the simulator is told; a policy is not). A request without a
    chain shares its tokens with no other. `ask_at` is a count of generated tokens, 1 or more, at which the engine stops
    to be asked about the request; while an engine has it, `Engine.ask` sets it.
    """

    __slots__ = (
        "admission",
        "arrival",
        "ask_at",
        "cached_tokens",
        "cancel_at",
        "computed",
        "engine",
        "finish",
        "first_token",
        "flight",
        "generated",
        "last",
        "number",
        "offset",
        "output_tokens",
        "owner",
        "preemptions",
        "prefill_end",
        "priority",
        "prompt_tokens",
        "reason",
        "scheduled",
        "status",
        "target",
    )

    def __init__(
        self,
        number: int,
        arrival: int,
        prompt_tokens: int,
        output_tokens: int,
        *,
        chain: Chain | None = None,
        priority: int = 0,
        cancel_at: int | None = None,
        ask_at: int | None = None,
        owner: object = None,
    ) -> None:
        self.number = number  # ties between equal arrivals go to the lower one
        self.arrival = arrival
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.chain = chain
        self.priority = priority  # lower is served first
        self.cancel_at = cancel_at
        self.ask_at = ask_at
        self.owner = owner  # whoever submitted it
        self.status: Status = "waiting"
        self.reason: str | None = None  # why it was refused, or did not finish
        self.engine: int | None = None
        self.scheduled: int | None = None  # start of its first iteration
        self.prefill_end: int | None = None
        self.first_token: int | None = None
        self.finish: int | None = None  # also of what was cancelled, interrupted or refused
        self.generated = 0
        self.cached_tokens = 0  # of the prompt, found in the prefix cache when it was first admitted
        self.preemptions = 0
        # What follows is the engine's own, while it has the request.
        self.path = ()
        self.own_copy = None
        self.written = 0
        self.admission = -1  # number of its admission, while it runs
        self.flight = -1  # batch that it generates in, once its prompt is computed with one
        self.computed = 0  # tokens, while it is prefilled
        self.target = 0  # tokens to compute before it generates the next one
        self.offset = 0  # computed tokens less the engine's iterations, while it generates
        self.last = 0  # iteration that generates its last token
