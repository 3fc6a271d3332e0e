"""A trajectory of a post-training run, as engines and routers see it.

Invariant: a turn that is stopped loses no token: it goes on with what it has generated as part of its prompt, and a
policy is told of each tool return once.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from libra.route import policy
from libra.sim.engine.chain import Chain
from libra.sim.engine.request import Request
from libra.sim.workload.caller import Caller, returned_before
from libra.sim.workload.calls import Call
from libra.trajectory import Trajectory, Turn


@dataclass(slots=True)
class EpisodeCaller(Caller):
    """One trajectory on its way; it has one request at most."""

    calls: tuple[Call, ...]
    group: str
    due: float  # seconds by which its group has to be complete
    prompt: Chain
    chain: Chain = field(init=False)
    position: int = 0  # of the call that is under way, or comes after the tool that is
    told: bool = False  # the policy knows of the return before this call

    def __post_init__(self) -> None:
        self.chain = self._fork(self.calls[0])

    @property
    def call(self) -> Call:
        return self.calls[self.position]

    @property
    def last(self) -> bool:
        return self.position == len(self.calls) - 1

    def routing_request(self) -> policy.Request:
        trajectory = self.trajectory
        return policy.Request(
            trajectory.id,
            trajectory.prompt_id,
            trajectory.prompt_tokens,
            self.call.context_tokens + self.generated_before,
            trajectory.task,
            self.due,
        )

    def returned(self) -> policy.ToolReturn | None:
        if self.told:
            return None
        self.told = True
        return returned_before(self.trajectory, self.calls, self.position)

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

    def so_far(self, generated: int, *, waits: bool) -> Trajectory:
        """The unfinished trajectory: turns that are over, and `generated` tokens of the present one; or, where it
        `waits` for what tools return before that, all that it has generated."""
        turns = self.trajectory.turns[: self.call.turn]
        if waits:
            before = self.calls[self.position - 1].turn if self.position else None
            turns = () if before is None else (*turns[:before], _untold(turns[before]))
        elif generated:
            present = replace(self.trajectory.turns[self.call.turn], generated_tokens=generated)
            turns = (*turns, _untold(present))
        return replace(self.trajectory, turns=turns, finished=False, reward=None)

    def _fork(self, call: Call) -> Chain:
        name = f"{self.trajectory.id} from turn {call.turn}"
        prompt_tokens = self.trajectory.prompt_tokens
        return Chain(name, self.prompt, prompt_tokens) if call.context_tokens >= prompt_tokens else Chain(name)


def _untold(turn: Turn) -> Turn:
    """A turn whose tool, if any, has returned nothing yet."""
    return replace(turn, tool=None, status=None, returned_tokens=0, tool_seconds=None)
