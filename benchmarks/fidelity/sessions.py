"""The sessions of a workload as requests that come when they are due: the next turn only after the last one's tool.

Invariant: which requests there will be is fixed by the workload; only the arrivals of later turns depend on who serves
them. The same object drives real engines and simulated ones, each its own copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from benchmarks.fidelity.workloads import Bursts, Group, Poisson, Workload
from libra.sim.clock import ticks
from libra.sim.engine.request import Chain, Request


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session: what is new in its prompt, what it generates, and the wait before it."""

    new_tokens: int
    output_tokens: int
    delay: int  # ticks from the last turn's finish, or from the beginning


@dataclass(frozen=True, slots=True)
class Session:
    number: int
    chain: Chain
    priority: int
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class _Place:
    """The owner of a request: which turn of which session it is."""

    session: Session
    turn: int


class Sessions:
    """A `Workload`'s requests. Their numbers rise with the turn, then the session."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._sessions = make_sessions(workload)

    def start(self) -> list[Request]:
        """The first request of each session, by (arrival, number)."""
        first = [self._request(session, 0, context=0, begin=0) for session in self._sessions]
        return sorted(first, key=lambda request: (request.arrival, request.number))

    def finished(self, request: Request, now: int) -> Request | None:
        """The next turn of the session, after its tool; it sends the context and all that was generated."""
        place = request.owner
        assert isinstance(place, _Place)
        if place.turn + 1 == len(place.session.turns):
            return None
        context = request.prompt_tokens + request.output_tokens
        return self._request(place.session, place.turn + 1, context, begin=now)

    def describe(self) -> dict[str, Any]:
        return self._workload.model_dump(mode="json")

    def _request(self, session: Session, index: int, context: int, begin: int) -> Request:
        turn = session.turns[index]
        return Request(
            session.number + index * len(self._sessions),
            begin + turn.delay,
            context + turn.new_tokens,
            turn.output_tokens,
            chain=session.chain,
            priority=session.priority,
            owner=_Place(session, index),
        )


def make_sessions(workload: Workload) -> tuple[Session, ...]:
    """All draws of a workload, in order of its groups."""
    sessions: list[Session] = []
    for which, group in enumerate(workload.groups):
        random = Random(f"{workload.seed} {which}")
        prompts = [Chain(f"{which}-prompt-{index}") for index in range(group.prompts)]
        for index, arrival in enumerate(_arrivals(group, random)):
            prompt = prompts[index % group.prompts]
            sessions.append(
                Session(
                    number=len(sessions),
                    chain=Chain(f"{which}-session-{index}", prompt if group.shared else None, group.shared),
                    priority=group.priorities[index % len(group.priorities)],
                    turns=_turns(group, random, arrival),
                )
            )
    return tuple(sessions)


def _arrivals(group: Group, random: Random) -> list[int]:
    at, instants = group.start_seconds, []
    for index in range(group.sessions):
        match group.arrivals:
            case Poisson(per_second=rate):
                at += random.expovariate(rate)
            case Bursts(size=size, every_seconds=every):
                at = group.start_seconds + index // size * every
        instants.append(ticks(at))
    return instants


def _turns(group: Group, random: Random, arrival: int) -> tuple[Turn, ...]:
    turns = []
    for index in range(random.randint(*group.turns)):
        new = random.randint(*group.tool_tokens) if index else group.shared + random.randint(*group.prompt)
        delay = ticks(random.uniform(*group.tool_seconds)) if index else arrival
        turns.append(Turn(new, random.randint(*group.output), delay))
    return tuple(turns)
