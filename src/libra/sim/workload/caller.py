"""The calls of a trajectory, and the owner of a request for engines and routers.

Invariant: every turn that generates is one call, in order. A turn that generates nothing calls no engine, but its tool
takes time, and the tool's return is in the context of the next call. A caller describes its turn as of the last
placement, and reports each tool return once. A stopped turn loses no token: it continues with its generated tokens as
part of its prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from libra.route import policy
from libra.sim.clock import seconds, ticks
from libra.sim.engine.request import Chain, Request
from libra.trajectory import Trajectory, Turn

UNKNOWN_TOOL_SECONDS = 1.0  # of a tool call without a recorded duration


@dataclass(frozen=True, slots=True)
class Call:
    """One generation, with the tools and the change of context before it."""

    turn: int  # position in the trajectory, from 0
    context_tokens: int  # the whole prompt of the call
    output_tokens: int
    delay: int  # ticks of tools since the end of the previous call, or since the trajectory's start
    rewritten: bool  # the context is not the previous context with tokens appended


def calls(trajectory: Trajectory, unknown_tool_seconds: float = UNKNOWN_TOOL_SECONDS) -> tuple[Call, ...]:
    """All calls of a trajectory, without the tools after the last call.

    A tool without a recorded duration takes `unknown_tool_seconds`. Raises ValueError for a call without context,
    because an engine refuses such a request.
    """
    unknown = ticks(unknown_tool_seconds)
    made: list[Call] = []
    delay, rewritten, running = 0, False, trajectory.prompt_tokens
    for number, (turn, context) in enumerate(zip(trajectory.turns, trajectory.contexts(), strict=True)):
        rewritten = rewritten or context != running
        if turn.generated_tokens:
            if context == 0:
                raise ValueError(
                    f"trajectory {trajectory.id!r}: turns.{number}: its context has no token, but an engine needs one;"
                    " give the trajectory a prompt, or leave it out"
                )
            made.append(Call(number, context, turn.generated_tokens, delay, rewritten))
            delay, rewritten = 0, False
        if turn.tool_seconds is not None:
            delay += _tool_ticks(trajectory, number, turn.tool_seconds)
        elif turn.tool is not None:
            delay += unknown
        running = context + turn.generated_tokens + turn.returned_tokens
    return tuple(made)


def _tool_ticks(trajectory: Trajectory, number: int, taken: float) -> int:
    try:
        return ticks(taken)
    except ValueError as error:
        raise ValueError(f"trajectory {trajectory.id!r}: turns.{number}.tool_seconds: {error}") from None


@dataclass(slots=True)
class Caller:
    """The owner of a trajectory's request."""

    trajectory: Trajectory
    calls: tuple[Call, ...]  # all calls of the trajectory
    prompt: Chain  # of the trajectory
    position: int = 0  # index in `calls` of the request's call
    first_number: int = 0  # number of the first call's request, if each call is one request
    generated_before: int = 0  # tokens of the turn that were generated before this request
    placed_before: int = 0  # tokens of the turn that were generated before a policy last placed the turn
    engine: int | None = None  # engine of the latest request; set only if KV moves
    told: bool = False  # the policy knows the tool return before this call
    due: float | None = None  # seconds at which the group has to be complete

    @property
    def call(self) -> Call:
        return self.calls[self.position]

    @property
    def last(self) -> bool:
        """Whether this is the trajectory's last call."""
        return self.position == len(self.calls) - 1

    @property
    def name(self) -> str:
        """Name of the chain that begins with this call."""
        return f"{self.trajectory.id} from turn {self.call.turn}"

    @property
    def generated_since(self) -> int:
        """Tokens of the turn that were generated after its last placement and before this request."""
        return self.generated_before - self.placed_before

    def fork(self) -> Chain:
        """A new chain for the call, which shares the prompt if the context is at least as long as the prompt."""
        kept = self.trajectory.prompt_tokens
        return Chain(self.name, self.prompt, kept) if self.call.context_tokens >= kept else Chain(self.name)

    def request(self, number: int, arrival: int, chain: Chain | None) -> Request:
        """A request for the rest of the turn, which ends with an EOS token."""
        call, before = self.call, self.generated_before
        prompt, output = call.context_tokens + before, call.output_tokens - before
        return Request(number, arrival, prompt, output, chain=chain, owner=self, stop="eos")

    def routing_request(self) -> policy.TurnRequest:
        """The turn as it was at the last placement."""
        trajectory = self.trajectory
        return policy.TurnRequest(
            trajectory.id,
            trajectory.prompt_id,
            trajectory.prompt_tokens,
            self.call.context_tokens + self.placed_before,
            trajectory.task,
            self.due,
        )

    def returned(self) -> policy.ToolReturn | None:
        """The tool return before the request; None if the policy knows the return already. The latter is the case for a
        request that is placed again. None also before a trajectory's first request, since the policy does not know the
        trajectory yet."""
        if self.told or self.position == 0:
            return None
        self.told = True
        before = self.trajectory.turns[self.call.turn - 1]
        if before.tool is None or before.status is None:
            return None
        return policy.ToolReturn(before.tool, before.status, before.returned_tokens)


@dataclass(slots=True)
class EpisodeCaller(Caller):
    """The caller of a trajectory in a training run. It has at most one request at a time."""

    group: str = field(kw_only=True)
    chain: Chain = field(init=False)

    def __post_init__(self) -> None:
        self.chain = self.fork()

    def advance(self) -> Call:
        """End the turn, and return the next call."""
        self.position += 1
        self.generated_before = 0
        self.told = False
        call = self.call
        if call.rewritten:
            self.chain = self.fork()
        return call

    def so_far(self, generated: int, *, left: float) -> Trajectory:
        """The unfinished trajectory: its complete turns, and `generated` tokens of the present turn. If `left` is
        positive, the tool before the present turn still needs `left` seconds. The trajectory then ends with that
        tool's turn, with the wait so far."""
        turns = self.trajectory.turns[: self.call.turn]
        if left > 0:
            before = self.calls[self.position - 1].turn if self.position else None
            waited = max(0.0, seconds(self.call.delay) - left)
            turns = () if before is None else (*turns[:before], _pending(turns[before], waited))
        elif generated:
            present = replace(self.trajectory.turns[self.call.turn], generated_tokens=generated)
            turns = (*turns, _untold(present))
        return replace(self.trajectory, turns=turns, finished=False, reward=None)


def _pending(turn: Turn, waited: float) -> Turn:
    """A turn whose tool has returned nothing yet."""
    return (
        _untold(turn) if turn.tool is None else replace(turn, status="unknown", returned_tokens=0, tool_seconds=waited)
    )


def _untold(turn: Turn) -> Turn:
    """A turn that has not called a tool yet."""
    return replace(turn, tool=None, status=None, returned_tokens=0, tool_seconds=None)


def rest_of(request: Request, number: int, now: int) -> Request:
    """The rest of a request that was stopped, as a new request."""
    owner = request.owner
    if isinstance(owner, Caller):
        owner = replace(owner, generated_before=owner.generated_before + request.generated, told=True)
    return Request(
        number,
        now,
        request.prompt_tokens + request.generated,
        request.output_tokens - request.generated,
        chain=request.chain,
        priority=request.priority,
        cancel_at=request.cancel_at,
        stop=request.stop,
        owner=owner,
    )
