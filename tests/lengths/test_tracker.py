"""The tracker against weighted averages over every trajectory it has seen, and its claims about its own errors."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from libra.lengths import FALSE_ALARM_RATE, TAIL_SHARE, LengthTracker, TrajectoryClass
from libra.lengths.classes import partition
from libra.lengths.members import Member
from libra.trajectory import Trajectory, Turn, read_trajectories

SAMPLE = Path(__file__).parents[1] / "data" / "trajectories.jsonl"


def episode(context: int, *turns: Turn) -> Trajectory:
    return Trajectory("a", "p", "t", context, (*turns, Turn(0, None, None, 0)), None, 0, True)


def tracked(trajectories: list[Trajectory], half_life: float = 1e6) -> LengthTracker:
    tracker = LengthTracker(half_life)
    for trajectory in trajectories:
        tracker.observe(trajectory)
    return tracker


def of_contexts(contexts: list[int] | np.ndarray, half_life: float = 1e6) -> LengthTracker:
    return tracked([episode(int(context)) for context in contexts], half_life)


tokens = st.integers(min_value=0, max_value=300)
turns_with_tool = st.builds(
    Turn,
    tokens,
    st.just("tool"),
    st.just("ok"),
    tokens,
    st.none() | st.floats(min_value=0, max_value=100),
    st.none() | tokens,
)
finished_trajectories = st.builds(
    lambda prompt, turns, last: Trajectory(
        "a", "p", "t", prompt, (*turns, Turn(last, None, None, 0)), None, 0, True, None
    ),
    tokens,
    st.lists(turns_with_tool, max_size=4),
    tokens,
)
histories = st.lists(finished_trajectories, min_size=1, max_size=30)
half_lives = st.floats(min_value=5, max_value=1000)


def token_by_token(trajectory: Trajectory) -> tuple[int, int]:
    """Sum of the context over generated tokens, and tokens prefilled, from the cache of one imaginary engine; a history
    that was rewritten keeps its prompt if that is still there."""
    context_sum, prefill, cached = 0, 0, 0
    for context, turn in zip(trajectory.contexts(), trajectory.turns, strict=True):
        if context < cached:
            cached = trajectory.prompt_tokens if context >= trajectory.prompt_tokens else 0
        while cached < context:
            cached += 1
            prefill += 1
        for _ in range(turn.generated_tokens):
            cached += 1
            context_sum += cached
    return context_sum, prefill


@settings(deadline=None)
@given(histories, half_lives, st.integers(min_value=1, max_value=9))
def test_classes_share_out_the_weighted_means_of_the_whole_history(
    history: list[Trajectory], half_life: float, limit: int
) -> None:
    tracker = tracked(history, half_life)
    assume(not tracker.drift().drifted)
    classes = tracker.classes(limit)
    weights = np.exp2(-np.arange(len(history))[::-1] / half_life)

    def mean(values: list[float]) -> float:
        return float(np.average(values, weights=weights))

    def over_classes(values: list[float]) -> object:
        return pytest.approx(sum(c.share * value for c, value in zip(classes, values, strict=True)), abs=1e-6)

    assert 1 <= len(classes) <= limit
    assert sum(c.share for c in classes) == pytest.approx(1, abs=1e-12)
    peaks = [c.peak_context for c in classes]
    assert peaks == sorted(set(peaks))
    assert peaks[-1] == max(1, *(t.peak_context for t in history))
    by_token = [token_by_token(t) for t in history]
    first = [float(t.turns[0].generated_tokens) for t in history]
    known = [sum(turn.tool_seconds for turn in t.turns if turn.tool_seconds is not None) for t in history]
    assert mean([t.generated_tokens for t in history]) == over_classes([c.generated for c in classes])
    assert mean([context_sum for context_sum, _ in by_token]) == over_classes([c.context_sum for c in classes])
    assert mean([prefill for _, prefill in by_token]) == over_classes([c.prefill for c in classes])
    assert mean([len(t.turns) for t in history]) == over_classes([c.turns for c in classes])
    assert mean(known) == over_classes([c.tool_seconds for c in classes])
    assert mean(first) == over_classes([c.before_first_return * c.generated for c in classes])
    decoded = mean([t.generated_tokens for t in history])
    attended = mean([context_sum for context_sum, _ in by_token])
    assert tracker.mean_decode_context == pytest.approx(attended / decoded if decoded else 0.0)
    by_bin = tracker.classes(128)
    assert tracker.mean_peak == pytest.approx(sum(c.share * c.peak_context for c in by_bin))


@settings(deadline=None)
@given(histories, half_lives)
def test_evidence_and_uncertainty_against_their_definitions(history: list[Trajectory], half_life: float) -> None:
    tracker = tracked(history, half_life)
    weights = np.exp2(-np.arange(len(history))[::-1] / half_life)
    effective = weights.sum() ** 2 / (weights**2).sum()
    generated = np.array([t.generated_tokens for t in history])
    mean = np.average(generated, weights=weights)
    if len(history) == 1 or mean == 0:
        assert tracker.work_uncertainty() == math.inf
    else:
        variance = np.average((generated - mean) ** 2, weights=weights)
        expected = math.sqrt(variance / (effective - 1)) / mean
        assert tracker.work_uncertainty() == pytest.approx(expected, rel=1e-6, abs=1e-6)
    calls = [weight for weight, t in zip(weights, history, strict=True) for turn in t.turns if turn.tool is not None]
    unknown = [
        weight
        for weight, t in zip(weights, history, strict=True)
        for turn in t.turns
        if turn.tool is not None and turn.tool_seconds is None
    ]
    assert tracker.unknown_tool_share == pytest.approx(sum(unknown) / sum(calls) if calls else 0)


def test_the_stated_uncertainty_is_the_spread_of_the_mean_over_repetitions() -> None:
    random = np.random.default_rng(11)
    means, stated = [], []
    for _ in range(300):
        tracker = LengthTracker(half_life=30)
        for generated in random.gamma(2.0, 500.0, 150):
            tracker.observe(episode(10, Turn(int(generated), "tool", "ok", 0)))
        means.append(tracker.classes(1)[0].generated)
        stated.append(tracker.work_uncertainty())
    assert np.mean(stated) == pytest.approx(np.std(means) / np.mean(means), rel=0.15)


# turns as (generated, returned, context or None) after a prompt of 100 -> context_sum, prefill
ONE_TRAJECTORY = {
    "one turn": ([(3, 0, None)], 101 + 102 + 103, 100),
    "returned tokens are prefilled": ([(2, 50, None), (1, 0, None)], 101 + 102 + 153, 150),
    "the last return is never prefilled": ([(2, 50, None)], 101 + 102, 100),
    "compaction keeps the prompt": ([(60, 50, None), (1, 0, 120)], sum(range(101, 161)) + 121, 120),
    "compaction below the prompt prefills what is left": ([(2, 50, None), (1, 0, 40)], 101 + 102 + 41, 140),
    "nothing generated": ([(0, 7, None), (0, 0, None)], 0, 107),
}


@pytest.mark.parametrize(("turns", "context_sum", "prefill"), ONE_TRAJECTORY.values(), ids=ONE_TRAJECTORY)
def test_one_trajectory(turns: list[tuple[int, int, int | None]], context_sum: int, prefill: int) -> None:
    *calls, (generated, returned, context) = turns
    trajectory = Trajectory(
        "a",
        "p",
        "t",
        100,
        (
            *(Turn(g, "tool", "ok", r, 2.0, c) for g, r, c in calls),
            Turn(generated, None, None, returned, None, context),
        ),
        None,
        0,
        True,
    )
    total = sum(g for g, _, _ in turns)
    assert tracked([trajectory]).classes() == (
        TrajectoryClass(
            share=1.0,
            peak_context=trajectory.peak_context,
            mean_context=trajectory.peak_context,
            generated=total,
            context_sum=context_sum,
            prefill=prefill,
            turns=len(turns),
            tool_seconds=2.0 * len(calls),
            before_first_return=turns[0][0] / total if total else 1.0,
            members=(Member(1.0, total, prefill, len(turns), 2.0 * len(calls)),),
            seen=1.0,
        ),
    )


@given(
    st.lists(
        st.tuples(st.integers(1, 20), st.integers(1, 1000)), min_size=1, max_size=9, unique_by=lambda bin_: bin_[1]
    ),
    st.integers(1, 6),
)
def test_merging_bins_against_every_way_to_merge_them(bins: list[tuple[int, int]], limit: int) -> None:
    bins = sorted(bins, key=lambda bin_: bin_[1])
    shares = np.array([weight for weight, _ in bins]) / sum(weight for weight, _ in bins)
    peaks = np.array([peak for _, peak in bins], dtype=float)

    def overstated(starts: tuple[int, ...]) -> float:
        ends = (*starts[1:], len(bins))
        return sum(
            float((shares[start:end] * (peaks[end - 1] - peaks[start:end])).sum())
            for start, end in zip(starts, ends, strict=True)
        )

    def tail_is_resolved(starts: tuple[int, ...]) -> bool:
        return limit == 1 or starts[-1] == len(bins) - 1 or shares[starts[-1] :].sum() <= TAIL_SHARE

    candidates = (
        (0, *cuts) for count in range(limit) for cuts in itertools.combinations(range(1, len(bins)), min(count, 8))
    )
    best = min(overstated(starts) for starts in candidates if tail_is_resolved(starts))
    found = tuple(partition(shares, peaks, limit))
    assert found[0] == 0
    assert list(found) == sorted(set(found))
    assert len(found) <= limit
    assert tail_is_resolved(found)
    assert overstated(found) == pytest.approx(best, abs=1e-9)


@settings(deadline=None)
@given(histories, half_lives, st.floats(min_value=0, max_value=1))
def test_a_quantile_is_within_one_bin_of_the_weighted_sample(
    history: list[Trajectory], half_life: float, q: float
) -> None:
    value = tracked(history, half_life).quantile(q)
    weights = np.exp2(-np.arange(len(history))[::-1] / half_life)
    contexts = np.array([max(1, t.peak_context) for t in history])
    bin_width = 2 ** (1 / 4) * (1 + 1e-9)
    assert weights[contexts <= value * bin_width].sum() >= q * weights.sum() - 1e-6
    assert weights[contexts < value / bin_width].sum() <= q * weights.sum() + 1e-6


def test_quantiles_interpolate_in_the_logarithm() -> None:
    contexts = np.exp(np.linspace(math.log(1000), math.log(64000), 4001))
    tracker = of_contexts(contexts)
    for q in (0.1, 0.25, 0.5, 0.75, 0.9):
        assert tracker.quantile(q) == pytest.approx(1000 * 64**q, rel=0.01)
    assert tracker.quantile(1) == 64000


def test_old_trajectories_are_forgotten_with_their_largest_context() -> None:
    tracker = of_contexts([100_000] + [1000] * 30, half_life=4)
    assert tracker.quantile(1) == pytest.approx(100_000)
    for _ in range(10):  # 40 later the long one weighs 2**-10
        tracker.observe(episode(1000))
    assert tracker.quantile(1) == pytest.approx(1000)
    assert [c.peak_context for c in tracker.classes()] == [1000]


def test_state_does_not_grow_with_the_number_of_trajectories() -> None:
    contexts = np.random.default_rng(5).lognormal(8, 1, 4000)
    sizes = [len(json.dumps(of_contexts(contexts[:count], 64).snapshot())) for count in (1000, 4000)]
    assert sizes[1] < 1.5 * sizes[0]


def stationary_looks(half_life: float, spread: float) -> list[bool]:
    looks = []
    for seed in range(25):
        tracker = LengthTracker(half_life)
        for seen, context in enumerate(np.random.default_rng(seed).lognormal(8, spread, 1200), start=1):
            tracker.observe(episode(int(context)))
            if seen % 16 == 0:
                looks.append(tracker.drift().drifted)
    return looks


@pytest.mark.parametrize(("half_life", "spread"), [(32, 1.0), (64, 0.3), (256, 1.0)])
def test_stationary_lengths_raise_fewer_alarms_than_stated(half_life: float, spread: float) -> None:
    looks = stationary_looks(half_life, spread)
    assert len(looks) == 25 * 75
    assert np.mean(looks) < FALSE_ALARM_RATE


@pytest.mark.parametrize("factor", [1.5, 1 / 1.5])
def test_a_shift_by_half_is_detected_in_one_half_life_and_forgotten_later(factor: float) -> None:
    for seed in range(5):
        random = np.random.default_rng(seed)
        tracker = of_contexts(random.lognormal(8, 0.5, 1000), half_life=256)
        for context in factor * random.lognormal(8, 0.5, 256):
            tracker.observe(episode(int(context)))
        assert tracker.drift().drifted
        for context in factor * random.lognormal(8, 0.5, 1500):
            tracker.observe(episode(int(context)))
        assert not tracker.drift().drifted


@settings(deadline=None)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=40), half_lives)
def test_distance_and_threshold_against_their_definitions(contexts: list[int], half_life: float) -> None:
    ages = np.arange(len(contexts))[::-1]
    slow, fast = np.exp2(-ages / half_life), np.exp2(-ages / (half_life / 4))
    bins = np.floor(np.log2(contexts) * 4)
    drift = of_contexts(contexts, half_life).drift()
    if len(set(bins)) == 1:
        assert (drift.distance, drift.drifted) == (0, False)
        return
    total = max((((fast / fast.sum() - slow / slow.sum()) ** 2).sum()), 1e-12)
    distance = variance = 0.0
    for edge in sorted(set(bins))[:-1]:
        risk, ends, beyond = bins >= edge, bins == edge, bins > edge
        odds = slow[ends].sum() / slow[beyond].sum()
        variance += odds * max(((fast / fast[risk].sum() - slow / slow[risk].sum())[risk] ** 2).sum(), 1e-12)
        share, recent_share = slow[beyond].sum() / slow.sum(), fast[beyond].sum() / fast.sum()
        scale = max(1 + variance / total, 1 / share)
        distance = max(distance, abs(recent_share / share - 1) / scale)
    assert drift.distance == pytest.approx(distance, abs=1e-6)
    assert drift.threshold == pytest.approx(math.sqrt(math.log(2 / FALSE_ALARM_RATE) / 2 * total), rel=1e-4)
    assert drift.drifted == (drift.distance > drift.threshold)


def test_after_a_drift_everything_is_forgotten_four_times_as_fast() -> None:
    contexts = [1000] * 1000 + [8000] * 40
    tracker = of_contexts(contexts, half_life=256)
    assert tracker.drift().drifted
    weights = np.exp2(-np.arange(1040)[::-1] / 64)
    assert tracker.classes()[-1].share == pytest.approx(weights[1000:].sum() / weights.sum(), rel=1e-4)


@pytest.mark.parametrize("contexts", [[], [500], [500, 50_000]])
@pytest.mark.parametrize("half_life", [8, 256, 1e12])
def test_too_few_trajectories_are_no_drift(contexts: list[int], half_life: float) -> None:
    assert not of_contexts(contexts, half_life).drift().drifted


@pytest.mark.parametrize("snapshot", [{}, {"format": 1}])
def test_a_snapshot_of_another_format_is_refused(snapshot: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="format 4"):
        LengthTracker.restore(snapshot)


def test_an_empty_tracker_says_what_it_needs() -> None:
    tracker = LengthTracker()
    for question in (
        tracker.classes,
        lambda: tracker.quantile(0.5),
        lambda: tracker.unknown_tool_share,
        tracker.work_uncertainty,
    ):
        with pytest.raises(ValueError, match="observe"):
            question()


@pytest.mark.parametrize(
    ("name", "value"),
    [("half_life", value) for value in (0, -1, math.nan, math.inf)]
    + [("bins_per_octave", 0), ("block_tokens", 0), ("unknown_tool_seconds", -1), ("unknown_tool_seconds", math.inf)],
)
def test_impossible_settings_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        LengthTracker(**{name: value})


def test_impossible_questions_are_refused() -> None:
    tracker = of_contexts([100])
    with pytest.raises(ValueError, match="limit"):
        tracker.classes(0)
    with pytest.raises(ValueError, match="q is"):
        tracker.quantile(1.5)


def test_lengths_that_are_not_lengths_are_refused_and_leave_no_trace() -> None:
    tracker = of_contexts([100])
    before = tracker.snapshot()
    unfinished = next(t for t in read_trajectories(SAMPLE) if not t.finished)
    with pytest.raises(ValueError, match="unfinished"):
        tracker.observe(unfinished)
    with pytest.raises(ValueError, match="at most"):
        tracker.observe(episode(2**32))
    assert tracker.snapshot() == before


def test_sample() -> None:
    finished = [t for t in read_trajectories(SAMPLE) if t.finished]
    tracker = tracked(finished)
    assert tracker.unknown_tool_share == pytest.approx(5 / 20, rel=1e-4)
    assert tracker.classes(1)[0].generated == pytest.approx(11580 / 11, rel=1e-4)
    longest = tracker.classes()[-1]
    assert longest.peak_context == 18000  # before it was compacted
    assert longest.prefill == pytest.approx(2600 + 5200 + 4000 - 2600 + 60)
    assert longest.tool_seconds == pytest.approx(45.2)


def started(context: int, version: int, *, finished: bool = True) -> Trajectory:
    turns = (Turn(context // 2, "tool", "ok", context // 4, float(context % 7)), Turn(1, None, None, 0))
    return Trajectory("a", "p", "t", 10, turns if finished else turns[:1], None, version, finished)


begun = st.tuples(st.integers(1, 3000), st.integers(0, 200), st.booleans())


def by_version(starts: list[tuple[int, int, bool]], half_life: float = 1e4) -> LengthTracker:
    """Of (length, version, finished)."""
    tracker = LengthTracker(half_life)
    tracker.observe_running(())
    for length, version, finished in starts:
        if finished:
            tracker.observe(started(length, version))
    tracker.observe_running(started(length, version, finished=False) for length, version, done in starts if not done)
    return tracker


@settings(deadline=None)
@given(st.lists(begun, min_size=1, max_size=20), st.lists(begun, max_size=20), half_lives, st.booleans())
def test_a_restored_tracker_goes_on_exactly(
    before: list[tuple[int, int, bool]], after: list[tuple[int, int, bool]], half_life: float, versions_known: bool
) -> None:
    original = by_version(before, half_life) if versions_known else LengthTracker(half_life)
    original.observe(started(50, 3))
    restored = LengthTracker.restore(json.loads(json.dumps(original.snapshot())))
    assert restored.snapshot() == original.snapshot()
    for tracker in (original, restored):
        for length, version, _ in after:
            tracker.observe(started(length, version))
    assert restored.snapshot() == original.snapshot()
    assert restored.classes() == original.classes()
    assert restored.drift() == original.drift()
    assert restored.work_uncertainty() == original.work_uncertainty()
    assert restored.forecast(3) == original.forecast(3)


def test_a_hundred_thousand_trajectories_take_no_more_room_than_twenty_thousand() -> None:
    random = np.random.default_rng(1)
    lengths = random.lognormal(8, 1, 100_000).astype(int)
    tracker, sizes = LengthTracker(half_life=1000), []
    tracker.observe_running(())
    for number, length in enumerate(lengths, start=1):
        tracker.observe(started(length, number // 100))
        if number in (20_000, 100_000):
            sizes.append(len(json.dumps(tracker.snapshot())))
    assert sizes[1] < 1.2 * sizes[0]
    assert sizes[1] < 1_000_000


def test_forgotten_cohorts_are_given_up_before_others_are_joined() -> None:
    tracker = by_version([(100, version, True) for version in range(200) for _ in range(4)], half_life=20)
    assert tracker.snapshot()["width"] == 1
    assert [key for key, _ in tracker.snapshot()["cohorts"]] == list(range(136, 200))
    starts = [(1000 * 4**number, version, number < 3) for version in range(200) for number in range(4)]
    slow = by_version(starts, half_life=1e9)
    assert slow.snapshot()["width"] == 4
    assert len(slow.snapshot()["cohorts"]) == 50
    # Joined, they still hold all that was seen: a quarter of each length, of which the longest run.
    assert [cls.share for cls in slow.classes()] == pytest.approx([1 / 4] * 4, abs=1e-6)
