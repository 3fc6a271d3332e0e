"""One order for several processes, and one answer of theirs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from fakes.samples import batch
from msgspec.structs import replace

from libra.backends.grpo.joint_step import divide, join
from libra.backends.transport.channel import FromWorker
from libra.backends.transport.messages import Acknowledged
from libra.backends.transport.trainer_messages import (
    Commit,
    Entered,
    Follow,
    MeasureTraining,
    Reduced,
    Rendezvous,
    Sample,
    Serving,
    StateDigest,
    StatePlace,
    TokenSums,
    Train,
    Trained,
    TrainingMeasured,
    WarmedUp,
    WarmUp,
)

VOTE = Reduced(3, "", 2.0, 0.5, TokenSums(100, 40, 1.0, 20.0, 3.0))
TRAINED = Trained(3, 77, 5, 0.25, 1.5)
PLACES = [StatePlace(10 + part, part) for part in range(3)]


@pytest.mark.parametrize("parts", [2, 3])
def test_every_sample_goes_to_one_process_and_the_denominator_to_all(parts: int) -> None:
    order = Train(3, batch(1), 7, 60, 1.0)
    orders = divide(order, parts)
    assert all(isinstance(each, Train) and replace(each, samples=order.samples) == order for each in orders)
    shares = [[sample.id for sample in each.samples] for each in orders]  # type: ignore[union-attr]
    assert len(shares) == parts and all(shares)
    assert sorted(id for share in shares for id in share) == sorted(sample.id for sample in order.samples)


def test_demonstrations_and_lengths_are_divided_too() -> None:
    demonstrations = [([index], [True]) for index in range(5)]
    warm = divide(WarmUp(demonstrations, 0.1), 2)
    assert sorted(each for order in warm for each in order.batch) == demonstrations  # type: ignore[union-attr]
    measured = [[1, 2, 3], [4], [9, 6, 4, 3, 1]]
    orders = divide(MeasureTraining(measured, 2), 2)
    assert orders == [MeasureTraining([[3], [4], [9, 3]], 2), MeasureTraining([[2, 1], [], [6, 4, 1]], 2)]
    for index, lengths in enumerate(measured):  # what is timed is divided like what is trained
        samples = [Sample("", [0] * length, [], [], [], 0.0) for length in lengths]
        shares = [[len(s.tokens) for s in order.samples] for order in divide(Train(1, samples, 0, 0, 1.0), 2)]  # type: ignore[union-attr]
        assert shares == [order.batches[index] for order in orders]  # type: ignore[union-attr]


def test_each_process_follows_its_own_kind() -> None:
    assert divide(Follow(PLACES), 3) == [Follow([place]) for place in PLACES]
    with pytest.raises(ValueError, match="a replica of 2 processes cannot follow one of 3"):
        divide(Follow(PLACES), 2)


def test_what_concerns_all_goes_to_all() -> None:
    assert divide(Commit(3, 1), 2) == [Commit(3, 1)] * 2


def test_a_replica_votes_for_all_its_processes() -> None:
    other = Reduced(3, "", 1.0, 1.5, TokenSums(50, 20, 2.0, 10.0, 4.0))
    assert join([VOTE, other]) == Reduced(3, "", 2.0, 0.5, TokenSums(150, 60, 3.0, 30.0, 7.0))
    voted = join([VOTE, replace(other, failure="somebody is gone")])
    assert isinstance(voted, Reduced) and voted.failure == "somebody is gone"


def test_replicas_are_equal_when_all_their_parts_are() -> None:
    def hash_of(*parts: int) -> int:
        joined = join([replace(TRAINED, parameter_hash=part, checksum=part) for part in parts])
        assert isinstance(joined, Trained) and joined.checksum == parts[0]
        return joined.parameter_hash

    assert hash_of(5, 6) == hash_of(5, 6)
    assert len({hash_of(5, 6), hash_of(6, 5), hash_of(5, 5), hash_of(5, 7)}) == 4


@pytest.mark.parametrize(
    ("parts", "number", "ready", "behind"),
    [
        ([StateDigest(7, 1, 64, [PLACES[0]], True), StateDigest(7, 2, 64, [PLACES[1]], True)], 7, True, ""),
        ([StateDigest(7, 1, 64, [PLACES[0]], True), StateDigest(8, 2, 64, [PLACES[1]], True)], -1, True, ""),
        ([StateDigest(7, 1, 64, [PLACES[0]], True), StateDigest(7, 2, 64, [PLACES[1]], False)], 7, False, ""),
        (
            [StateDigest(7, 1, 64, [PLACES[0]], True), StateDigest(-1, 2, 64, [PLACES[1]], True, "slow")],
            *(-1, True, "slow"),
        ),
    ],
)  # fmt: skip
def test_a_replica_is_level_when_all_its_parts_are(
    parts: Sequence[StateDigest], number: int, ready: bool, behind: str
) -> None:
    found = join(parts)
    assert isinstance(found, StateDigest)
    assert (found.number, found.ready, found.behind, found.places) == (number, ready, behind, PLACES[:2])
    assert found.size == 2 * 64


@pytest.mark.parametrize(
    ("answers", "wanted"),
    [
        ([Rendezvous(29500), Rendezvous(0)], Rendezvous(29500)),
        ([Serving([40000], ""), Serving([40001], "")], Serving([40000, 40001], "")),
        ([Serving([40000], ""), Serving([], "no address")], Serving([40000], "no address")),
        ([Entered(4, ""), Entered(4, "")], Entered(4, "")),
        ([Entered(4, ""), Entered(4, "nobody came")], Entered(4, "nobody came")),
        ([WarmedUp(0.25), WarmedUp(0.5)], WarmedUp(0.75)),
        ([Acknowledged(), Acknowledged()], Acknowledged()),
        (
            [TrainingMeasured([(10, 1.0), (4, 3.0)], 0.5, 0.25), TrainingMeasured([(8, 2.0), (2, 1.0)], 0.75, 0.125)],
            TrainingMeasured([(18, 2.0), (6, 3.0)], 0.75, 0.125),
        ),
        (
            [TrainingMeasured([(10, 1.0)], 0.5, 0.25), TrainingMeasured([], 0.0, 0.0, "gone")],
            TrainingMeasured([], 0.0, 0.0, "gone"),
        ),
    ],
)
def test_answers_become_one(answers: Sequence[FromWorker], wanted: FromWorker) -> None:
    assert join(answers) == wanted


def test_processes_that_answer_different_things_are_an_error() -> None:
    with pytest.raises(TypeError, match="the processes of a replica answer Acknowledged, Trained"):
        join([TRAINED, Acknowledged()])
