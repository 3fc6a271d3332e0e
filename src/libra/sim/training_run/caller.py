"""A trajectory of a post-training run, as engines and routers see it.

Invariant: a turn that is stopped loses no token: it goes on with what it has generated as part of its prompt, and a
policy is told of each tool return once.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from libra.route import policy
from libra.sim.clock import seconds
from libra.sim.engine.request import Chain, Request
from libra.sim.workload.caller import Call, Caller
from libra.trajectory import Trajectory, Turn


@dataclass(slots=True)
class EpisodeCaller(Caller):
    """One trajectory on its way; it has one request at most."""

    group: str
    prompt: Chain
    chain: Chain = field(init=False)

    def __post_init__(self) -> None:
        self.chain = self._fork(self.calls[0])

    def returned(self) -> policy.ToolReturn | None:
        """Said once: a request that finds no engine, or is stopped on one, is placed again."""
        returned = Caller.returned(self)
        self.told = True
        return returned

    def request(self, number: int, arrival: int) -> Request:
        """What is left of the present turn."""
        call, before = self.call, self.generated_before
        return Request(
            number, arrival, call.context_tokens + before, call.output_tokens - before, chain=self.chain, owner=self
        )

    def advance(self) -> Call:
        """The turn is over; the next call."""
        self.position += 1
        self.generated_before = 0
        self.told = False
        call = self.call
        if call.rewritten:
            self.chain = self._fork(call)
        return call

    def so_far(self, generated: int, *, left: float) -> Trajectory:
        """The unfinished trajectory: turns that are over, and `generated` tokens of the present one; or, where there
        are seconds `left` until a tool returns before that, all that it has generated, and how long it has waited."""
        turns = self.trajectory.turns[: self.call.turn]
        if left > 0:
            before = self.calls[self.position - 1].turn if self.position else None
            waited = max(0.0, seconds(self.call.delay) - left)
            turns = () if before is None else (*turns[:before], _pending(turns[before], waited))
        elif generated:
            present = replace(self.trajectory.turns[self.call.turn], generated_tokens=generated)
            turns = (*turns, _untold(present))
        return replace(self.trajectory, turns=turns, finished=False, reward=None)

    def _fork(self, call: Call) -> Chain:
        name = f"{self.trajectory.id} from turn {call.turn}"
        prompt_tokens = self.trajectory.prompt_tokens
        return Chain(name, self.prompt, prompt_tokens) if call.context_tokens >= prompt_tokens else Chain(name)


def _pending(turn: Turn, waited: float) -> Turn:
    """A turn whose tool has returned nothing yet."""
    return (
        _untold(turn) if turn.tool is None else replace(turn, status="unknown", returned_tokens=0, tool_seconds=waited)
    )


def _untold(turn: Turn) -> Turn:
    """A turn that has called no tool yet."""
    return replace(turn, tool=None, status=None, returned_tokens=0, tool_seconds=None)
