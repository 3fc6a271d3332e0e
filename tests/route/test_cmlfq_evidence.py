"""Decayed histograms, distributions made of them, and what running trajectories add, against brute force."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from libra.route.evidence import Context, ReturnEvidence, Running
from libra.route.remaining import BINS, EDGES, Remaining, bin_of, redistributed

Array = NDArray[np.float64]

CONTEXTS: list[Context] = [("all",), ("task", "a"), ("last", (("search", "small", "ok"),)), ("prompt", 3)]
counted = st.lists(
    st.tuples(
        st.integers(0, 4),
        st.dictionaries(
            st.sampled_from(CONTEXTS), st.dictionaries(st.integers(0, BINS - 1), st.floats(0.1, 1), min_size=1)
        ),
    ),
    max_size=30,
)


def histogram(evidence: ReturnEvidence, context: Context) -> list[float]:
    found: list[float] = (evidence.histograms([context])[0] * evidence.fading).tolist()
    assert found[BINS] == pytest.approx(sum(found[:BINS]), rel=1e-4, abs=1e-12)
    return found[:BINS]


@given(counted, st.sampled_from([0.02, 0.5, 3.0, 100.0]))
def test_weights_are_those_of_the_definition(
    trajectories: list[tuple[int, dict[Context, dict[int, float]]]], half_life: float
) -> None:
    evidence = ReturnEvidence(half_life)
    for version, histograms in trajectories:
        evidence.count(version, histograms)
    total = len(trajectories)
    wanted = {context: [0.0] * BINS for context in CONTEXTS}
    for number, (version, histograms) in enumerate(trajectories, start=1):
        newer = [n for n, (v, _) in enumerate(trajectories[:number], start=1) if v > version]
        weight = 2 ** (-(total - min([number, *newer])) / half_life)
        for context, bins in histograms.items():
            for bin_, share in bins.items():
                wanted[context][bin_] += weight * share
    for context in CONTEXTS:
        assert histogram(evidence, context) == pytest.approx(wanted[context], rel=1e-4, abs=1e-12)


@given(st.lists(st.lists(st.integers(0, 9), max_size=4, unique=True), max_size=20), st.integers(1, 5))
def test_the_least_lately_used_contexts_go_first(trajectories: list[list[int]], most: int) -> None:
    evidence = ReturnEvidence(half_life=1e9, max_contexts=most)
    kept: dict[int, float] = {}
    for used in trajectories:
        evidence.count(0, {(name,): {0: 1.0} for name in used})
        for name in used:
            kept[name] = kept.pop(name, 0.0) + 1
            if len(kept) > most:
                del kept[next(iter(kept))]
        assert len(evidence) <= most
    found = evidence.histograms([(name,) for name in range(10)])[:, BINS] * evidence.fading
    assert found.tolist() == pytest.approx([kept.get(name, 0.0) for name in range(10)], rel=1e-5)


@given(counted, counted, st.integers(1, 4))
def test_restored_evidence_goes_on_as_the_original(
    before: list[tuple[int, dict[Context, dict[int, float]]]],
    after: list[tuple[int, dict[Context, dict[int, float]]]],
    most: int,
) -> None:
    evidence = ReturnEvidence(0.3, most)
    for version, histograms in before:
        evidence.count(version, histograms)
    twin = ReturnEvidence.restore(json.loads(json.dumps(evidence.snapshot())))
    for version, histograms in after:
        evidence.count(version, histograms)
        twin.count(version, histograms)
    assert [histogram(twin, context) for context in CONTEXTS] == [histogram(evidence, context) for context in CONTEXTS]
    assert json.dumps(twin.snapshot()) == json.dumps(evidence.snapshot())


def test_of_very_many_versions_the_newest_are_told_apart() -> None:
    evidence = ReturnEvidence()
    for version in range(70):
        evidence.count(version, {("all",): {0: 1.0}})
    assert evidence.snapshot()["versions"] == list(range(6, 70))


@pytest.mark.parametrize(
    ("half_life", "most", "message"), [(0, 1, "half_life is 0"), (float("inf"), 1, "finite"), (1, 0, "give 1 or more")]
)
def test_settings_that_make_no_sense_are_refused(half_life: float, most: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReturnEvidence(half_life, most)


# One distribution.

weights = st.dictionaries(st.integers(0, BINS - 1), st.floats(0.01, 5), min_size=1, max_size=8).map(
    lambda bins: [bins.get(bin_, 0.0) for bin_ in range(BINS)]
)


def made(shares: list[float]) -> Remaining:
    return Remaining(np.array(shares, np.float32))


def spread(shares: list[float], parts: int = 64) -> tuple[Array, Array]:
    """Tokens and share of many small parts of the bins."""
    inside = (np.arange(parts) + 0.5) / parts
    starts, widths = np.array(EDGES[:-1]), np.diff(EDGES)
    lengths = (starts[:, None] + inside * widths[:, None]).ravel()
    return lengths, np.repeat(np.array(shares) / sum(shares) / parts, parts)


@given(st.integers(0, 2**25))
def test_a_length_is_in_its_bin(tokens: int) -> None:
    bin_ = bin_of(tokens)
    assert EDGES[bin_] <= tokens
    assert tokens < EDGES[bin_ + 1] or bin_ == BINS - 1


@given(weights, st.floats(0, 2e7), st.floats(0, 1))
def test_a_distribution_is_that_of_evenly_filled_bins(shares: list[float], tokens: float, q: float) -> None:
    remaining, (lengths, parts) = made(shares), spread(shares)
    scale = max(EDGES[bin_ + 1] for bin_, share in enumerate(shares) if share)
    assert remaining.mean == pytest.approx(float(lengths @ parts), rel=1e-3)
    up_to, beyond = remaining.cut(tokens)
    assert beyond == remaining.beyond(tokens)
    assert beyond == pytest.approx(float(parts[lengths > tokens].sum()), abs=0.02)
    assert up_to == pytest.approx(float(np.minimum(lengths, tokens) @ parts), abs=0.001 * scale)
    assert remaining.beyond(remaining.quantile(q)) == pytest.approx(1 - q, abs=1e-3)


@given(weights, st.floats(1, 1e6), st.floats(0, 1e6))
def test_what_is_outlived_does_not_count(shares: list[float], outlived: float, tokens: float) -> None:
    remaining = made(shares)
    left = remaining.beyond(outlived)
    later = remaining.after(outlived)
    if left <= 1e-3:
        return  # too few for single precision, or none
    assert later.beyond(tokens) == pytest.approx(remaining.beyond(outlived + tokens) / left, rel=1e-3, abs=1e-3)
    lengths, parts = spread(shares)
    wanted = float((lengths - outlived).clip(0) @ parts) / left
    assert later.mean == pytest.approx(wanted, rel=0.05, abs=2 * EDGES[bin_of(int(outlived)) + 1] / 64)
    assert outlived + later.mean >= remaining.mean * (1 - 1e-3)


def test_what_outlived_all_evidence_is_taken_to_go_on_as_long_again() -> None:
    later = Remaining.about(100).after(5_000)
    assert 4_000 < later.mean < 6_000
    assert 8_000 < later.after(20_000).mean < 40_000


def test_no_evidence_is_no_distribution() -> None:
    with pytest.raises(ValueError, match="needs a sum above 0"):
        made([0.0] * BINS)
    with pytest.raises(ValueError, match="a share lies between"):
        Remaining.about(5).quantile(1.5)


# Those that run.


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.lists(st.integers(0, 9), max_size=8))
def test_running_ones_are_lower_bounds_as_kaplan_and_meier_have_it(finished: list[int], running: list[int]) -> None:
    survive, wanted = 1.0, [0.0] * BINS
    for bin_ in range(BINS):
        at_risk = sum(f >= bin_ for f in finished) + sum(r > bin_ for r in running)
        ended = finished.count(bin_)
        if at_risk:
            wanted[bin_] = survive * ended / at_risk
            survive -= wanted[bin_]
    wanted[max(finished + running) + 4] += survive
    counts = [np.array([Counter(of)[bin_] for bin_ in range(BINS)], np.float32) for of in (finished, running)]
    found = redistributed(*counts)
    assert found.tolist() == pytest.approx(wanted, abs=1e-5)
    assert Remaining(found).mean >= Remaining(counts[0]).mean * (1 - 1e-4)


moves = st.lists(
    st.tuples(st.sampled_from(["start", "reached", "end"]), st.sampled_from("tuv"), st.integers(0, 5_000)), max_size=30
)


@given(moves)
def test_each_running_trajectory_marks_how_far_it_has_come(told: list[tuple[str, str, int]]) -> None:
    running, furthest = Running(), dict[str, int]()
    for what, id, tokens in told:
        if what == "start" and id not in furthest:
            running.start(id, [("all",), ("own", id)])
            furthest[id] = 0
        elif what == "reached":
            running.reached(id, tokens)
            if id in furthest:
                furthest[id] = max(furthest[id], bin_of(tokens) // 4 * 4)  # octaves
        elif what == "end":
            running.end(id)
            furthest.pop(id, None)
    twin = Running.restore(json.loads(json.dumps(running.snapshot())))
    for each in (running, twin):
        found = each.histograms([("all",), ("own", "t")])
        if not any(furthest.values()):
            assert found is None
            continue
        if found is None:
            raise AssertionError("some have come far")
        assert found[0].tolist() == [list(furthest.values()).count(bin_) for bin_ in range(BINS)]
        assert found[1].tolist() == [float("t" in furthest and furthest["t"] == bin_) for bin_ in range(BINS)]
    for id in "tuv":
        running.end(id)
    assert running.snapshot() == []
    assert running._marks == {}
