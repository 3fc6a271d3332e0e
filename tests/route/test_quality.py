"""The measures of a replay, against counting over a record of what was asked and answered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.routing_quality import Quality, evaluate, static_fleet

from libra.route.baselines import TwoChoices
from libra.route.bucket import bucket_of
from libra.route.catalogue import policy_named
from libra.route.policy import Fleet, Placement, Policy, ToolReturn, TurnRequest, View
from libra.trajectory import Trajectory, Turn
from tests.oracles.oracle_policy import Oracle

LIMITS = (50, 200, 2_000)
FLEET = static_fleet(LIMITS, turn_tokens=10, instances=2)
MEASURES: list[Callable[[Quality], float]] = [
    lambda quality: quality.single_shot_accuracy,
    lambda quality: quality.majority_rate,
    lambda quality: quality.balanced_accuracy,
    lambda quality: quality.migrated_share,
    lambda quality: quality.moves,
]


def trajectory(id: str, *turns: tuple[int, int], prompt: int = 10, last: int = 20, prompt_id: str = "p") -> Trajectory:
    made = (*(Turn(generated, "search", "ok", returned) for generated, returned in turns), Turn(last, None, None, 0))
    return Trajectory(id, prompt_id, "task", prompt, made, None, 0, finished=True)


def made(id: str, it: tuple[list[tuple[int, int]], int, int, str]) -> Trajectory:
    turns, prompt, last, prompt_id = it
    return trajectory(id, *turns, prompt=prompt, last=last, prompt_id=prompt_id)


workloads = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(0, 250), st.integers(0, 150)), max_size=3),
        st.integers(1, 60),
        st.integers(0, 400),
        st.sampled_from("pqr"),
    ),
    min_size=1,
    max_size=8,
).map(lambda drawn: [made(str(number), it) for number, it in enumerate(drawn)])


class Recorder:
    """A policy, and a record of what it was asked and answered."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.record: list[tuple[str, str, int, Placement | None]] = []  # call, trajectory, context, answer

    def place(self, request: TurnRequest, fleet: Fleet) -> Placement | None:
        return self._kept("place", request, request.context_tokens, self.policy.place(request, fleet))

    def tool_returned(self, request: TurnRequest, returned: ToolReturn, fleet: Fleet) -> Placement | None:
        answer = self.policy.tool_returned(request, returned, fleet)
        return self._kept("returned", request, request.context_tokens, answer)

    def bucket_overrun(self, request: TurnRequest, generated_tokens: int, fleet: Fleet) -> Placement | None:
        answer = self.policy.bucket_overrun(request, generated_tokens, fleet)
        return self._kept("bucket_overrun", request, request.context_tokens + generated_tokens, answer)

    def finished(self, trajectory: Trajectory) -> None:
        self.record.append(("finished", trajectory.id, trajectory.final_context, None))
        self.policy.finished(trajectory)

    def forget(self, trajectory_id: str) -> None:
        raise AssertionError("nothing is abandoned in a replay")

    def instance_gone(self, instance: str) -> None:
        raise AssertionError("no instance goes in a replay")

    def snapshot(self) -> dict[str, Any]:
        return self.policy.snapshot()

    @classmethod
    def restore(cls, snapshot: dict[str, Any]) -> Recorder:
        raise AssertionError("nothing is restored in a replay")

    def _kept(self, call: str, request: TurnRequest, context: int, answer: Placement | None) -> Placement | None:
        self.record.append((call, request.trajectory_id, context, answer))
        return answer


def count_by_hand(counted: list[Trajectory], record: list[tuple[str, str, int, Placement | None]]) -> list[float]:
    single: dict[str, bool] = {}
    recalls: dict[int, list[bool]] = {}
    moved = tokens = moves = 0
    for it in counted:
        true = bucket_of(it.peak_context, LIMITS)
        told = [(call, context, answer) for call, id, context, answer in record if id == it.id and answer is not None]
        # A turn that stays where it is was not placed.
        placements = [entry for entry in told if entry[0] != "bucket_overrun" or entry[2].migrated]
        after_return = [answer for call, _, answer in placements if call == "returned"]
        single[it.id] = (after_return[0] if after_return else placements[0][2]).bucket == true
        recalls.setdefault(true, []).append(single[it.id])
        tokens += sum(context for _, context, _ in placements) + it.generated_tokens
        moved += sum(context for _, context, answer in placements if answer.migrated)
        moves += sum(answer.migrated for _, _, answer in placements)
    of_bucket = Counter(bucket_of(it.peak_context, LIMITS) for it in counted)
    return [
        sum(single.values()) / len(counted),
        of_bucket.most_common(1)[0][1] / len(counted),
        sum(sum(recall) / len(recall) for recall in recalls.values()) / len(recalls),
        moved / tokens,
        moves / len(counted),
    ]


@given(
    workloads,
    st.sampled_from(["mlfq", "length-predictor", "two-choices", "cmlfq-published", "shortest-remaining-first"]),
    st.integers(1, 9),
    st.data(),
)
def test_every_measure_is_as_counted_by_hand(
    workload: list[Trajectory], name: str, batch: int, data: st.DataObject
) -> None:
    warm_up = data.draw(st.integers(0, len(workload) - 1))
    recorder = Recorder(TwoChoices(sticky=False) if name == "two-choices" else policy_named(name))
    quality = evaluate(recorder, workload, FLEET, batch=batch, warm_up=warm_up)
    assert quality.ids == tuple(it.id for it in workload[warm_up:])
    measured = [measure(quality) for measure in MEASURES]
    assert measured == pytest.approx(count_by_hand(workload[warm_up:], recorder.record))


@given(workloads, st.integers(1, 9))
def test_the_oracle_is_never_wrong_and_never_moves(workload: list[Trajectory], batch: int) -> None:
    quality = evaluate(Oracle({it.id: it for it in workload}), workload, FLEET, batch=batch)
    assert quality.single_shot_accuracy == quality.balanced_accuracy == 1
    assert quality.migrated_share == quality.moves == 0


@given(workloads, st.integers(1, 9))
def test_turns_are_in_rounds_and_nothing_is_learned_before_its_end(workload: list[Trajectory], batch: int) -> None:
    recorder = Recorder(policy_named("round-robin"))
    evaluate(recorder, workload, FLEET, batch=batch)
    expected: list[tuple[str, str, int]] = []
    for start in range(0, len(workload), batch):
        together = workload[start : start + batch]
        for number in range(max(len(it.turns) for it in together)):
            for it in together:
                if number < len(it.turns):
                    expected.append(("returned" if number else "place", it.id, it.contexts()[number]))
                if number == len(it.turns) - 1:
                    expected.append(("finished", it.id, it.final_context))
    assert [entry[:3] for entry in recorder.record] == expected


def test_an_example_with_a_turn_that_outlives_its_bucket() -> None:
    # 10 + 30 + 5 fits bucket 0; 45 + 300 passes bucket 0 after 6 tokens, bucket 1 after 156.
    quality = evaluate(policy_named("mlfq"), [trajectory("t", (30, 5), last=300)], FLEET)
    assert quality.outcomes.tolist() == [(2, False, 2, 51 + 201, 10 + 45 + 51 + 201 + 330)]
    assert quality.single_shot_accuracy == 0


def test_a_trajectory_without_tools_counts_by_its_first_placement() -> None:
    quality = evaluate(policy_named("mlfq"), [trajectory("t", last=20), trajectory("u", last=100)], FLEET)
    assert quality.single_shot_accuracy == 0.5


def test_the_warm_up_is_learned() -> None:
    workload = [trajectory(str(number), (5, 5), last=500, prompt_id=str(number)) for number in range(30)]
    cold = evaluate(policy_named("length-by-prompt"), workload[:1], FLEET)
    warm = evaluate(policy_named("length-by-prompt"), workload, FLEET, warm_up=29)
    assert (cold.single_shot_accuracy, warm.single_shot_accuracy) == (0, 1)


class AsksAtOnce(Oracle):
    def bucket_overrun(self, request: TurnRequest, generated_tokens: int, fleet: Fleet) -> Placement | None:
        return Placement("2-0", 2, False, "stays", ask_again=generated_tokens)

    def place(self, request: TurnRequest, fleet: Fleet) -> Placement | None:
        return Placement("2-0", 2, False, "asks", ask_again=1)


ONE = trajectory("t", last=300)
REFUSED: list[tuple[str, Callable[[], object], str]] = [
    ("no batch", lambda: evaluate(policy_named("mlfq"), [ONE], FLEET, batch=0), "batch is 0"),
    ("nothing", lambda: evaluate(policy_named("mlfq"), [], FLEET), "warm_up is 0 of 0"),
    ("all warm-up", lambda: evaluate(policy_named("mlfq"), [ONE], FLEET, warm_up=1), "warm_up is 1 of 1"),
    ("negative warm-up", lambda: evaluate(policy_named("mlfq"), [ONE], FLEET, warm_up=-1), "warm_up is -1"),
    ("one id twice", lambda: evaluate(policy_named("mlfq"), [ONE, ONE], FLEET), "the same id"),
    (
        "unfinished",
        lambda: evaluate(policy_named("mlfq"), [Trajectory("t", "p", "", 5, (), None, 0, finished=False)], FLEET),
        "'t' is unfinished",
    ),
    ("no room", lambda: evaluate(policy_named("mlfq"), [ONE], View((), LIMITS, 10)), "no instance holds 10 tokens"),
    ("asks at once", lambda: evaluate(AsksAtOnce({}), [ONE], FLEET), "ask_again is 1, but 1 tokens"),
    ("no instances", lambda: static_fleet(LIMITS, turn_tokens=10, instances=0), "instances is 0"),
]


@pytest.mark.parametrize(("call", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_what_cannot_be_counted_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_a_static_fleet_has_room_for_every_bucket_and_a_turn() -> None:
    fleet = static_fleet((100, 500), turn_tokens=7, instances=3)
    assert [(it.bucket, it.capacity_tokens) for it in fleet.instances] == [(0, 107)] * 3 + [(1, 507)] * 3
    assert (fleet.limits, fleet.turn_tokens) == ((100, 500), 7)
