"""The oracle: right from the start, and its account of the work left agrees with counting it anew."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.route.bucket import bucket_of
from libra.route.policy import InstanceView, Placement, Policy, ToolReturn, TurnRequest, View
from libra.route.service_cost import TOKEN_SECONDS
from libra.trajectory import Trajectory, Turn
from tests.oracles.oracle_policy import Oracle

OK = ToolReturn("search", "ok", 5)
LIMITS = (50, 200, 2_000)
FLEET = View(
    tuple(
        InstanceView(f"{bucket}{name}", bucket, limit + 10, 0) for bucket, limit in enumerate(LIMITS) for name in "xy"
    ),
    LIMITS,
    10,
)


def trajectory(id: str, *turns: tuple[int, int], prompt: int = 10, last: int = 20) -> Trajectory:
    """Turns that generate and return so many tokens, and a last one that only generates."""
    made = (
        *(Turn(generated, "search", "ok", returned, 2.0) for generated, returned in turns),
        Turn(last, None, None, 0),
    )
    return Trajectory(id, "p", "task", prompt, made, None, 0, finished=True)


def ask(policy: Policy, it: Trajectory, turn: int, fleet: View = FLEET, due: float | None = None) -> Placement | None:
    request = TurnRequest(it.id, it.prompt_id, it.prompt_tokens, it.contexts()[turn], it.task, due)
    return policy.tool_returned(request, OK, fleet) if turn else policy.place(request, fleet)


def placed(placement: Placement | None) -> Placement:
    assert placement is not None
    return placement


trajectories = st.lists(
    st.builds(
        lambda turns, prompt, last: (turns, prompt, last),
        st.lists(st.tuples(st.integers(1, 300), st.integers(0, 200)), max_size=4),
        st.integers(0, 60),
        st.integers(1, 400),
    ),
    min_size=1,
    max_size=6,
).map(lambda made: [trajectory(str(n), *turns, prompt=p, last=last) for n, (turns, p, last) in enumerate(made)])


def left(it: Trajectory, turn: int) -> int:
    return it.final_context - it.contexts()[turn]


@dataclass
class Account:
    """Where each live trajectory's latest turn went, and which turn that was."""

    turns: dict[str, int] = field(default_factory=dict)
    at: dict[str, str] = field(default_factory=dict)

    def work(self, known: list[Trajectory], instance: str, without: str) -> int:
        return sum(left(it, self.turns[it.id]) for it in known if self.at.get(it.id) == instance and it.id != without)


@given(trajectories, st.data())
def test_every_turn_goes_to_the_true_bucket_and_there_to_the_least_work(
    known: list[Trajectory], data: st.DataObject
) -> None:
    policy = Oracle({it.id: it for it in known})
    account = Account()
    prefix: dict[str, str] = {}
    for _ in range(data.draw(st.integers(0, 25))):
        it = data.draw(st.sampled_from(known))
        what = data.draw(st.sampled_from(["turn", "turn", "turn", "turn", "again", "gone", "over"]))
        if what == "gone":
            instance = data.draw(st.sampled_from([instance.id for instance in FLEET.instances]))
            policy.instance_gone(instance)
            account.at = {id: at for id, at in account.at.items() if at != instance}
            prefix = {id: at for id, at in prefix.items() if at != instance}
        elif what == "over":
            policy.finished(it)
            for of_live in (account.turns, account.at, prefix):
                of_live.pop(it.id, None)
        else:
            turn = account.turns.get(it.id, -1) + (what == "turn" or it.id not in account.turns)
            if turn == len(it.turns):
                continue
            if what == "again":
                placement = placed(policy.place(TurnRequest(it.id, "p", it.prompt_tokens, it.contexts()[turn]), FLEET))
            else:
                placement = placed(ask(policy, it, turn))
            assert placement.bucket == bucket_of(it.peak_context, LIMITS)
            inside = [instance.id for instance in FLEET.instances if instance.bucket == placement.bucket]
            if it.id in prefix:
                assert placement.instance == prefix[it.id]
            else:
                assert placement.instance == min(inside, key=lambda id: (account.work(known, id, it.id), id))
            account.turns[it.id], account.at[it.id], prefix[it.id] = turn, placement.instance, placement.instance


def test_the_bucket_is_of_the_most_it_ever_holds() -> None:
    turns = (Turn(100, "search", "ok", 20), Turn(5, None, None, 0, context_tokens=30))
    compacted = Trajectory("t", "p", "task", 10, turns, None, 0, finished=True)
    assert placed(ask(Oracle({"t": compacted}), compacted, 0)).bucket == 1


def test_it_knows_by_asking() -> None:
    asked: list[str] = []

    def known(id: str) -> Trajectory:
        asked.append(id)
        return trajectory(id, (100, 5))

    policy = Oracle(known)
    assert placed(ask(policy, trajectory("t", (100, 5)), 0)).bucket == 1
    assert placed(ask(policy, trajectory("t", (100, 5)), 1)).bucket == 1
    assert asked == ["t"]


def test_a_turn_is_found_where_others_were_left_out() -> None:
    it = trajectory("t", (0, 40), (0, 40), (30, 100))
    policy = Oracle({"t": it})
    first = placed(policy.place(TurnRequest("t", "p", 10, it.contexts()[2]), FLEET))
    last = placed(ask(policy, it, 3))
    assert (first.priority, last.priority) == (-round(1_000 * (50 * TOKEN_SECONDS + 2)), -round(20_000 * TOKEN_SECONDS))


# Order.

SLOW = View((InstanceView("slow", 0, 9_000, 0, token_seconds=0.5),), (9_000,), 10)
UNKNOWN = View((InstanceView("unknown", 0, 9_000, 0),), (9_000,), 10)
PRIORITIES = [
    ("the time it needs: 50 tokens and a tool", 0, SLOW, None, -27_000),
    ("from a later turn on", 1, SLOW, None, -10_000),
    ("the time to its due", 0, SLOW, 30.0, 3_000),
    ("where speed is not known", 0, UNKNOWN, 30.0, round(1_000 * (28 - 50 * TOKEN_SECONDS))),
]


@pytest.mark.parametrize(
    ("turn", "fleet", "due", "wanted"), [c[1:] for c in PRIORITIES], ids=[c[0] for c in PRIORITIES]
)
def test_priority(turn: int, fleet: View, due: float | None, wanted: int) -> None:
    it = trajectory("t", (30, 7))
    policy = Oracle({"t": it})
    for number in range(turn):
        ask(policy, it, number, fleet, due)
    assert placed(ask(policy, it, turn, fleet, due)).priority == wanted


def test_among_those_due_at_once_the_longest_is_first() -> None:
    known = [trajectory(str(tokens), last=tokens) for tokens in (5, 500, 50)]
    policy = Oracle({it.id: it for it in known})
    order = sorted(known, key=lambda it: placed(ask(policy, it, 0, UNKNOWN)).priority)
    assert [it.id for it in order] == ["500", "50", "5"]


# What it refuses.


def test_what_it_does_not_know_is_refused() -> None:
    policy = Oracle({"t": trajectory("t", (30, 7))})
    with pytest.raises(ValueError, match="'u' is not known to the oracle"):
        ask(policy, trajectory("u"), 0)
    with pytest.raises(ValueError, match="'t' was never placed: call place"):
        ask(policy, trajectory("t", (30, 7)), 1)
    with pytest.raises(ValueError, match="'t': from turn 0 on none starts at 9 tokens"):
        policy.place(TurnRequest("t", "p", 10, 9), FLEET)
    assert policy.snapshot() == Oracle({}).snapshot()
    ask(policy, trajectory("t", (30, 7)), 0)
    before = policy.snapshot()
    with pytest.raises(ValueError, match="'t': from turn 1 on none starts at 10 tokens"):
        policy.tool_returned(TurnRequest("t", "p", 10, 10), ToolReturn("search", "ok", 0), FLEET)
    assert policy.snapshot() == before


def test_it_does_not_ask_again_what_it_knows() -> None:
    it = trajectory("t", last=150)
    policy = Oracle({"t": it})
    asked = placed(ask(policy, it, 0)).ask_again
    assert asked is None or asked > 150
    assert policy.bucket_overrun(TurnRequest("t", "p", 10, 10), 150, FLEET) is None
