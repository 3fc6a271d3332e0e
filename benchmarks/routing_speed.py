"""CPU time of the process for a routing decision, for learning from a finished trajectory, and for finding the session
of a prompt that names none.

Invariant: a decision is timed alone, on a fleet that shows it the same loads however long it takes. Every policy routes
the same trajectories, after it has learned from the same ones.

    python -m benchmarks.routing_speed [--quick] [--json FILE]

Trajectories are drawn: 16 samples of each prompt, 12 turns each in the mean, 8 tools that say little or much about the
turns that follow. A decision is what follows a tool return. Instances are in 3 buckets. With `--quick` policies have
seen 2,000 trajectories, otherwise 100,000. At a gateway, two loads change with each decision. In a trainer a decision
is the whole of `SessionRouter.acquire`. Sessions without a name
are 1,000 at a time, with one system prompt and 8 turns each; all that finding them adds to a turn is timed.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np

from benchmarks.command import command_line, show
from benchmarks.rows import Row, at_least, spread
from libra.live.session_router import SessionRouter
from libra.route.catalogue import policy_named
from libra.route.policy import Fleet, InstanceView, Placement, Policy, ToolReturn, TurnRequest, View
from libra.serve.gateway.config import UpstreamSection
from libra.serve.gateway.history import history_of
from libra.serve.gateway.said import Said
from libra.serve.gateway.unnamed import UnnamedSessions
from libra.serve.gateway.upstreams import Upstreams
from libra.trajectory import Trajectory, Turn

GOAL_MICROSECONDS = 20.0  # of a decision with 10 instances
TRAINER_MICROSECONDS = 1000.0  # of a decision in a trainer, at P99
ADDED_MICROSECONDS = 1000.0  # to a turn of a session without a name, at the median

_POLICIES = ("least-loaded", "cmlfq-published", "cmlfq")
_SAMPLES = 16  # of a prompt
_PER_VERSION = 512  # trajectories
_ASKED = 300  # trajectories whose decisions are timed
_LIMITS = (4_000, 16_000, 64_000)
_TOOLS = 8
_GATEWAY_ENGINES = (16, 512)
_FOUND_TURNS, _ANSWER, _RETURNED = 8, 400, 100  # turns of a session, tokens of an answer and of a tool return


def rows(options: Namespace) -> Iterator[Row]:
    seen, fleets = (2_000, (10,)) if options.quick else (100_000, (10, 1_024))
    for name in _POLICIES:
        yield from measured(name, seen, fleets)
    for tokens in (500, 4_000, 32_000):
        yield from found(tokens, 100 if options.quick else 1_000)


def measured(name: str, seen: int, fleets: Sequence[int]) -> Iterator[Row]:
    """Rows of one policy."""
    policy, learning, turns = policy_named(name), 0.0, 0
    for trajectory in drawn(seen, seed=0):
        began = time.process_time()
        policy.finished(trajectory)
        learning += time.process_time() - began
        turns += len(trajectory.turns)
    case = f"{name}, {seen:,} trajectories seen"
    yield Row(case, "learning from a trajectory, mean", 1e6 * learning / seen, "us")
    yield Row(case, "the same, for each turn", 1e6 * learning / turns, "us")
    for instances in fleets:
        taken = decisions(policy, view(instances), drawn(_ASKED, seed=1))
        goal = GOAL_MICROSECONDS if instances == 10 else None
        yield from spread(case, f"decision, {instances:,} instances", taken, "us", median=goal)
    few, many = (at_gateway(policy, instances) for instances in _GATEWAY_ENGINES)
    for instances, typical in zip(_GATEWAY_ENGINES, (few, many), strict=True):
        yield Row(case, f"decision at a gateway, {instances} engines, median", typical, "us")
    yield Row(case, "the second over the first", many / few, "")
    servers = _GATEWAY_ENGINES[-1]
    taken = in_trainer(policy, servers)
    yield from spread(case, f"decision in a trainer, {servers} servers", taken, "us", p99=TRAINER_MICROSECONDS)


def at_gateway(policy: Policy, instances: int) -> float:
    """Microseconds of a decision among the engines of a gateway, at the median."""
    sections = [
        UpstreamSection(
            name=f"engine {number}",
            url=f"http://engine-{number}:8000",
            bucket=number % len(_LIMITS),
            max_model_len=_LIMITS[number % len(_LIMITS)],
        )
        for number in range(instances)
    ]
    upstreams, random = Upstreams(sections, _LIMITS), np.random.default_rng(2)
    engines = list(upstreams.all.values())
    for engine in engines:
        engine.load_tokens = int(random.integers(10_000, 400_000))
        upstreams.mark_healthy(engine)

    def placed(placement: Placement | None) -> None:
        if placement is not None:
            upstreams.all[placement.instance].load_tokens += 1_000
        ended = engines[int(random.integers(instances))]
        ended.load_tokens = max(0, ended.load_tokens - 1_000)

    return float(np.median(list(decisions(policy, upstreams.fleet(500), drawn(_ASKED, seed=1), placed))))


def in_trainer(policy: Policy, servers: int) -> Iterator[float]:
    """Microseconds of each decision for a trainer that tells tools and ends; each server has a turn at the start."""
    router = SessionRouter(policy, capacity_tokens=_LIMITS[-1], turn_tokens=500)
    router.add(f"server {number}" for number in range(servers))
    random = np.random.default_rng(2)
    for number in range(servers):
        router.acquire(f"before {number}", int(random.integers(1_000, 40_000)))
    for trajectory in drawn(_ASKED, seed=1):
        id = f"asked {trajectory.id}"
        router.began(id, trajectory.prompt_id, trajectory.task)
        for turn, context in zip(trajectory.turns, trajectory.contexts(), strict=False):
            began = time.process_time_ns()
            server = router.acquire(id, context)
            yield (time.process_time_ns() - began) / 1e3
            router.release(server, id)
            router.answered(id, context, turn.generated_tokens)
            if turn.tool is not None and turn.status is not None:
                router.returned(id, turn.tool, turn.status)
        router.forget(id)


def found(tokens: int, sessions: int) -> Iterator[Row]:
    """Rows of sessions without a name whose prompts begin with `tokens` tokens."""
    random = np.random.default_rng(3)
    system = random.integers(150_000, size=tokens).tolist()
    tails = [[number % (sessions // _SAMPLES + 1)] for number in range(sessions)]  # several sessions have one prompt
    known, names, taken, right = UnnamedSessions(), [""] * sessions, [], 0
    for turn in range(_FOUND_TURNS):
        for number in random.permutation(sessions).tolist():
            prompt = msgspec.json.encode([*system, *tails[number]])
            answer = random.integers(150_000, size=_ANSWER).tolist()
            reply = msgspec.json.encode({"choices": [{"index": 0, "token_ids": answer}]})
            began = time.process_time_ns()
            history = history_of(prompt, seed=0)
            assert history is not None
            name = known.claim(history)
            said = Said()
            said.add(reply)
            known.keep(name or f"{number} from {turn}", history, history.kind.of(said), answered=True)
            taken.append((time.process_time_ns() - began) / 1e3)
            right += turn > 0 and name == names[number]
            names[number] = name or f"{number} from {turn}"
            tails[number] = [*tails[number], *answer, *random.integers(150_000, size=_RETURNED).tolist()]
    case = f"{sessions:,} sessions without a name, prompts from {tokens:,} tokens"
    share = right / (sessions * (_FOUND_TURNS - 1))
    yield at_least(case, "later turns that find their session", share, "", 0.99)
    yield from spread(case, "added to a turn", taken, "us", median=ADDED_MICROSECONDS)


def decisions(
    policy: Policy,
    fleet: Fleet,
    trajectories: Iterator[Trajectory],
    placed: Callable[[Placement | None], None] = lambda _: None,
) -> Iterator[float]:
    """Microseconds of each decision that follows a tool return, after which `placed` is called."""
    clock: Callable[[], int] = time.process_time_ns
    for trajectory in trajectories:
        id, contexts = f"asked {trajectory.id}", trajectory.contexts()
        request = TurnRequest(id, trajectory.prompt_id, trajectory.prompt_tokens, contexts[0], trajectory.task)
        policy.place(request, fleet)
        for turn, context in zip(trajectory.turns[:-1], contexts[1:], strict=True):
            assert turn.tool is not None and turn.status is not None
            returned = ToolReturn(turn.tool, turn.status, turn.returned_tokens)
            request = TurnRequest(id, trajectory.prompt_id, trajectory.prompt_tokens, context, trajectory.task)
            began = clock()
            placement = policy.tool_returned(request, returned, fleet)
            yield (clock() - began) / 1e3
            placed(placement)
        policy.forget(id)


def view(instances: int) -> View:
    random = np.random.default_rng(2)
    return View(
        tuple(
            InstanceView(f"instance {number}", bucket, _LIMITS[bucket], int(random.integers(10_000, 400_000)), 0.02)
            for number in range(instances)
            for bucket in (number % len(_LIMITS),)
        ),
        _LIMITS,
        turn_tokens=500,
    )


def drawn(count: int, seed: int) -> Iterator[Trajectory]:
    """Draw `count` finished trajectories, one at a time."""
    random = np.random.default_rng(seed)
    for number in range(count):
        turns = int(random.geometric(1 / 12))
        tools = random.integers(_TOOLS, size=turns)
        generated = random.lognormal(5, 1, size=turns)
        returned = random.lognormal(4 + tools / 2, 1)
        failed = random.random(turns) < 0.1
        yield Trajectory(
            id=str(number),
            prompt_id=f"prompt {number // _SAMPLES}",
            task="drawn",
            prompt_tokens=int(random.integers(500, 2_000)),
            turns=(
                *(
                    Turn(int(generated[at]), f"tool {tools[at]}", "error" if failed[at] else "ok", int(returned[at]))
                    for at in range(turns - 1)
                ),
                Turn(int(generated[-1]), None, None, 0),
            ),
            reward=None,
            policy_version=number // _PER_VERSION,
            finished=True,
        )


if __name__ == "__main__":
    show(command_line("routing_speed", __doc__, quick="little history and few instances: a first look"), rows)
