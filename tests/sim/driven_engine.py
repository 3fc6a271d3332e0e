"""One engine driven tick by tick as a cluster drives it, and random cases of what can come to it.

A case is what is asked, when, and what comes in between. It is served by an engine that jumps, by one that visits every
iteration, or by the naive one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from hypothesis import strategies as st
from oracles.naive_engine import Adoption, NaiveResult, naive_run
from simulated import Asked
from test_batching_equality import affine_costs, knee_costs, small_configs

from libra.sim.engine.config import EngineConfig
from libra.sim.engine.engine import SimEngine
from libra.sim.engine.iteration_cost import AffineCost, IterationCost
from libra.sim.engine.messages import Iteration, Pause
from libra.sim.engine.request import Chain, Request, Stop

_OUTCOME = [
    *map(attrgetter, ("status", "scheduled", "prefill_end", "first_token", "finish", "generated")),
    *map(attrgetter, ("cached_tokens", "preemptions", "output_tokens", "ask_at")),
]
Order = Callable[[SimEngine, int], object]  # what comes to an engine at a tick
LOOKED = "nothing is to be decided anew"  # what an order returns that only looked


def drive(
    engine: SimEngine,
    orders: Sequence[tuple[int, Order]],
    after_commit: Callable[[SimEngine], None],
    after_plan: Callable[[SimEngine, int], None],
) -> None:
    """Until nothing is left to do. At one tick: what ends is committed, then the orders come in theirs, then plans."""
    coming = deque(sorted(orders, key=lambda order: order[0]))
    while coming or engine.busy:
        changed = False
        now = min([engine.end] * engine.busy + [tick for tick, _ in list(coming)[:1]])
        while True:
            while engine.busy and engine.end == now:
                engine.commit()
                after_commit(engine)
                changed = True
            if not coming or coming[0][0] > now:
                break
            while coming and coming[0][0] == now:
                changed |= coming.popleft()[1](engine, now) is not LOOKED
        if changed and (not engine.busy or engine.open):
            planned = engine.plan(now)
            assert (planned is not None) == engine.busy
            after_plan(engine, now)


@dataclass(frozen=True)
class Turn:
    """A request in the making."""

    arrival: int
    prompt_tokens: int
    output_tokens: int
    fork: int | None  # of the trunk; None: its tokens are its own
    trunk: bool  # it ends with a prompt on the trunk itself
    priority: int
    asked: tuple[int, ...]  # rising: when it has generated so many tokens, as far as it comes
    cancelled_after: int | None
    interrupted_after: int | None  # if it is not cancelled
    stop: Stop = "length"

    @property
    def cancel_at(self) -> int | None:
        return None if self.cancelled_after is None else self.arrival + self.cancelled_after

    @property
    def interrupt_at(self) -> int | None:
        if self.interrupted_after is None or self.cancelled_after is not None:
            return None
        return self.arrival + self.interrupted_after


@dataclass(frozen=True)
class Sent:
    """KV that comes for a turn's context, up to its prompt's end; or for the trunk."""

    at: int
    turn: int | None
    tokens: int


@dataclass(frozen=True)
class Look:
    """Somebody wants to know how far everything is, and to be asked about a turn when it has so many tokens more."""

    at: int
    turn: int
    ask: int | None


@dataclass(frozen=True)
class Case:
    config: EngineConfig
    cost: IterationCost
    turns: tuple[Turn, ...]
    sent: tuple[Sent, ...] = ()
    looks: tuple[Look, ...] = ()
    pauses: tuple[tuple[int, int, bool], ...] = ()  # tick, ticks, whether contexts are computed again
    close_at: int | None = None

    def quiet(self) -> Case:
        """Nobody asks about anything, or looks."""
        return replace(self, turns=tuple(replace(turn, asked=()) for turn in self.turns), looks=())

    def serve(self, *, exact: bool = False) -> Served:
        served = Served(self, exact)
        served.run()
        return served

    def naive(self) -> NaiveResult:
        trunk, requests = self.requests()
        adoptions = [
            Adoption(sent.at, context if isinstance(context, Chain) else context.number, tokens)
            for sent in sorted(self.sent, key=lambda it: it.at)
            for context, tokens in [self.what(sent, trunk, requests)]
        ]
        return naive_run(
            self.config,
            Asked(self.cost),
            requests,
            interrupted={
                number: turn.interrupt_at for number, turn in enumerate(self.turns) if turn.interrupt_at is not None
            },
            adoptions=adoptions,
            close_at=self.close_at,
        )

    def requests(self) -> tuple[Chain, list[Request]]:
        trunk = Chain("trunk")
        made = []
        for number, turn in enumerate(self.turns):
            chain = None
            if turn.trunk:
                chain = trunk
            elif turn.fork is not None:
                chain = Chain(f"branch {number}", trunk, min(turn.fork, turn.prompt_tokens))
            outputs = 1 if turn.trunk else turn.output_tokens
            made.append(
                Request(
                    number,
                    turn.arrival,
                    turn.prompt_tokens,
                    outputs,
                    chain=chain,
                    priority=turn.priority,
                    cancel_at=turn.cancel_at,
                    ask_at=turn.asked[0] if turn.asked else None,
                    stop="length" if turn.trunk else turn.stop,
                )
            )
        return trunk, made

    def what(self, sent: Sent, trunk: Chain, requests: Sequence[Request]) -> tuple[Chain | Request, int]:
        request = None if sent.turn is None else requests[sent.turn % len(requests)]
        if request is None or request.chain is trunk:
            return trunk, sent.tokens
        return request.chain or request, min(sent.tokens, request.prompt_tokens)


@dataclass
class Served:
    """A case on an engine, and all that was seen of it."""

    case: Case
    exact: bool
    asked: list[tuple[int, int, int]] = field(default_factory=list)  # tick, request, tokens generated
    adopted: list[int] = field(default_factory=list)
    looked: list[object] = field(default_factory=list)
    interrupted: list[int] = field(default_factory=list)
    iterations: list[Iteration] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = self.case.config
        self.engine = SimEngine(config, self.case.cost, exact=self.exact)
        self.engine.trace = self.iterations.append
        self.trunk, self.requests = self.case.requests()

    def run(self) -> None:
        orders: list[tuple[int, int, Order]] = []
        for number, request in enumerate(self.requests):
            turn = self.case.turns[number]
            if turn.cancel_at is not None and turn.cancel_at > turn.arrival:
                orders.append((turn.cancel_at, 0, lambda engine, now, it=request: engine.cancel(it, now)))
            if turn.interrupt_at is not None and turn.interrupt_at > turn.arrival:
                orders.append((turn.interrupt_at, 0, lambda engine, now, it=request: engine.interrupt(it, now)))
            orders.append((turn.arrival, 5, lambda engine, now, it=request: self._submit(it, now)))
        orders += [
            (at, 1, lambda engine, now, more=more, refresh=refresh: engine.pause(Pause(more, refresh), now))
            for at, more, refresh in self.case.pauses
        ]
        orders += [(sent.at, 2, lambda engine, now, it=sent: self._send(it, now)) for sent in self.case.sent]
        orders += [(look.at, 3, lambda engine, now, it=look: self._look(it, now)) for look in self.case.looks]
        if self.case.close_at is not None:
            orders.append((self.case.close_at, -1, lambda engine, now: engine.close(now)))
        drive(
            self.engine,
            [(tick, order) for tick, _, order in sorted(orders, key=lambda order: order[:2])],
            self._committed,
            self._planned,
        )

    @property
    def outcome(self) -> dict[str, Any]:
        """What became of everything, in which nobody can tell how it was served."""
        engine = self.engine
        return {
            "requests": [[of(request) for request in self.requests] for of in _OUTCOME],
            "iterations": self.iterations,
            "adopted": self.adopted,
            "interrupted": self.interrupted,
            "engine": (
                engine.iterations,
                engine.preemptions,
                engine.busy_ticks,
                engine.paused_ticks,
                engine.load_tokens,
                engine.closed,
            ),
            "cached": [engine.cached_tokens(request.chain or request, 1 << 80) for request in self.requests],
        }

    def _submit(self, request: Request, now: int) -> None:
        turn = self.case.turns[request.number]
        if self.engine.closing:
            return
        if turn.cancel_at is not None and turn.cancel_at <= now:
            request.status, request.finish = "cancelled", now
        else:
            self.engine.submit(request, now)
            if turn.interrupt_at == now:
                self.engine.interrupt(request, now)

    def _send(self, sent: Sent, now: int) -> None:
        if not self.engine.closing:
            context, tokens = self.case.what(sent, self.trunk, self.requests)
            ended = isinstance(context, Request) and context.finish is not None
            self.adopted.append(0 if ended else self.engine.adopt(context, tokens, now))

    def _look(self, look: Look, now: int) -> str:
        there = [request for request in self.requests if request.engine is not None and request.finish is None]
        self.looked.append(now)
        self.looked.append([self.engine.generated_by(request, now) for request in there])
        self.looked.append([self.engine.cached_tokens(request.chain or request, now) for request in self.requests])
        self.looked.append([self.engine.cached_tokens(request, now) for request in there if request.admission < 0])
        request = self.requests[look.turn % len(self.requests)]
        if look.ask is not None and request in there:
            tokens = self.engine.generated_by(request, now) + look.ask
            try:
                self.engine.ask(request, tokens, now)
            except ValueError as error:
                self.looked.append(str(error))
        return LOOKED

    def _committed(self, engine: SimEngine) -> None:
        for request in engine.asked:
            preempted = engine.config.async_scheduling and request.status == "waiting"  # its token was under way
            assert (request.status == "running" or preempted) and request.ask_at is None
            self.asked.append((engine.end, request.number, request.generated))
            following = [it for it in self.case.turns[request.number].asked if it > request.generated]
            if following:
                engine.ask(request, following[0], engine.end)

    def _planned(self, engine: SimEngine, now: int) -> None:
        assert not engine.asked
        for request in engine.interrupted:
            assert (request.status, request.finish) == ("interrupted", now)
            self.interrupted.append(request.number)


turns = st.builds(
    Turn,
    st.integers(0, 400),
    st.integers(0, 33),  # of 0, or 32 and more: refused
    st.integers(1, 34),
    st.none() | st.integers(0, 20),
    st.sampled_from([False, False, False, True]),
    st.integers(0, 2),
    st.lists(st.integers(1, 30), max_size=3, unique=True).map(lambda it: tuple(sorted(it))),
    st.none() | st.none() | st.integers(1, 500),
    st.none() | st.none() | st.integers(0, 500),
)
sends = st.builds(Sent, st.integers(0, 900), st.none() | st.integers(0, 9), st.integers(0, 40))
looks = st.builds(Look, st.integers(0, 900), st.integers(0, 9), st.none() | st.integers(0, 12))


def assert_nobody_can_tell(case: Case) -> None:
    """Whether its engine jumps; and nothing ends at another time for having been asked about or looked at."""
    jumped, visited = case.serve(), case.serve(exact=True)
    assert jumped.outcome == visited.outcome
    assert (jumped.asked, jumped.looked) == (visited.asked, visited.looked)
    assert jumped.engine.pool.held == 0
    quiet = case.quiet().serve()
    assert [request.finish for request in quiet.requests] == [request.finish for request in jumped.requests]


@st.composite
def cases(draw: st.DrawFn, *, adopting: bool, closing: bool, asking: bool, pausing: bool = False) -> Case:
    """Small ones, in which times between events are as long as iterations or much longer."""
    config = draw(small_configs)
    if draw(st.integers(0, 3)) == 0:
        config = replace(config, enable_chunked_prefill=False, max_num_batched_tokens=32 + config.max_num_seqs)
    cost = draw(st.just(AffineCost(10)) | affine_costs(config) | knee_costs(config))
    scale = draw(st.sampled_from([1, 1, 10, 100]))
    made = draw(st.lists(turns, min_size=1, max_size=8))
    made = [
        replace(
            turn,
            arrival=turn.arrival * scale,
            cancelled_after=None if turn.cancelled_after is None else turn.cancelled_after * scale,
            interrupted_after=None if turn.interrupted_after is None else turn.interrupted_after * scale,
            asked=turn.asked if asking else (),
        )
        for turn in made
    ]
    sent = draw(st.lists(sends, max_size=6)) if adopting else []
    looked = draw(st.lists(looks, max_size=6)) if asking or adopting else []
    if not asking:
        looked = [replace(look, ask=None) for look in looked]
    paused = draw(st.lists(st.tuples(st.integers(0, 900), st.integers(0, 300), st.booleans()), max_size=2))
    return Case(
        config,
        cost,
        tuple(made),
        tuple(replace(it, at=it.at * scale) for it in sent),
        tuple(replace(it, at=it.at * scale) for it in looked),
        tuple((at * scale, ticks, refresh) for at, ticks, refresh in paused) if pausing else (),
        draw(st.none() | st.integers(0, 900)) if closing else None,
    )
