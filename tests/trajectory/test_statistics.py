"""Statistics of a trajectory log against numbers worked out by hand, and on real logs where they are at hand."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.lengths import LengthTracker
from libra.trajectory import Trajectory, Turn, read_trajectories
from libra.trajectory.statistics import LengthSpread, ToolStats, trace_stats

SAMPLE = Path(__file__).parents[1] / "data" / "trajectories.jsonl"
REAL_LOGS = ("claude_code_sessions.jsonl", "tau_bench_airline.jsonl")


def logs() -> list[Path]:
    """The shipped sample, and the real logs of `LIBRA_DATA` or else of a data folder beside the checkout, if any."""
    if "LIBRA_DATA" in os.environ:
        folder = Path(os.environ["LIBRA_DATA"])
    else:
        folder = Path(__file__).parents[2] / "../shared/data/trajectories"
        if not folder.exists():
            return [SAMPLE]
    return [SAMPLE, *(folder / name for name in REAL_LOGS)]


def episode(generated: int, prompt_id: str = "p", reward: float | None = None) -> Trajectory:
    return Trajectory("a", prompt_id, "t", 10, (Turn(generated, None, None, 0),), reward, 0, True)


def test_sample() -> None:
    stats = trace_stats(read_trajectories(SAMPLE))
    assert (stats.count, stats.finished, stats.prompts) == (12, 11, 8)
    assert stats.tasks == (("coding", 5), ("search", 5), ("support", 2))
    assert stats.turns == LengthSpread(mean=33 / 12, p50=2, p90=4, p99=5, max=5)
    assert stats.prompt == LengthSpread(mean=16400 / 12, p50=1450, p90=2600, p99=2600, max=2600)
    assert stats.generated == LengthSpread(mean=11980 / 12, p50=250, p90=2350, p99=6000, max=6000)
    assert stats.returned == LengthSpread(mean=17267 / 12, p50=440, p90=1130, p99=12260, max=12260)
    # The compacted trajectory ends at 4000 + 1500 + 60 + 1300 tokens, not at the sum of everything it ever held.
    assert stats.final_context.max == 6860
    assert stats.tools == (
        ToolStats("shell", 9, (("error", 1), ("ok", 7), ("timeout", 1)), 133.5 / 9, 0),
        ToolStats("search", 5, (("error", 1), ("ok", 3), ("timeout", 1)), 8.0, 1),
        ToolStats("editor", 4, (("error", 1), ("ok", 3)), 0.125, 0),
        ToolStats("user", 4, (("unknown", 4),), None, 4),
    )
    assert stats.unknown_tool_seconds_share == 5 / 22
    assert stats.reward_mean == pytest.approx(0.65)
    assert stats.longest_tenth_share == (6000 + 2350) / 11980  # a tenth of 12 is rounded up to 2


@pytest.mark.parametrize(
    ("generated", "share"),
    [
        ([5], 1.0),
        ([3] * 10, 0.1),
        ([1] * 19 + [81], 0.82),
        ([0] * 9 + [4], 1.0),
        ([0, 0], None),
    ],
)
def test_longest_tenth(generated: list[int], share: float | None) -> None:
    assert trace_stats(map(episode, generated)).longest_tenth_share == share


@settings(deadline=None)
@given(st.lists(st.integers(min_value=0, max_value=1000), min_size=1, max_size=300))
def test_percentiles_are_the_smallest_value_that_enough_do_not_exceed(generated: list[int]) -> None:
    spread = trace_stats(map(episode, generated)).generated
    for percent, value in ((50, spread.p50), (90, spread.p90), (99, spread.p99), (100, spread.max)):
        enough = [v for v in generated if 100 * sum(g <= v for g in generated) >= percent * len(generated)]
        assert value == min(enough)
    assert spread.mean == pytest.approx(sum(generated) / len(generated))


def test_rewards_and_tools_that_are_not_there_are_unknown_not_zero() -> None:
    stats = trace_stats([episode(1), replace(episode(2), prompt_id="q")])
    assert stats.reward_mean is None
    assert stats.tools == ()
    assert stats.unknown_tool_seconds_share == 0
    assert stats.prompts == 2


def test_an_empty_log_is_an_error() -> None:
    with pytest.raises(ValueError, match="no trajectories"):
        trace_stats([])


@pytest.mark.parametrize("path", logs(), ids=lambda path: path.stem)
def test_a_whole_log_is_read_summarised_and_tracked(path: Path) -> None:
    trajectories = list(read_trajectories(path))
    stats = trace_stats(trajectories)
    assert stats.count == len(path.read_bytes().splitlines())
    assert sum(count for _, count in stats.tasks) == stats.count
    assert sum(tool.calls for tool in stats.tools) == sum(t.tool is not None for e in trajectories for t in e.turns)
    for spread in (stats.turns, stats.prompt, stats.generated, stats.returned, stats.final_context):
        assert 0 <= spread.p50 <= spread.p90 <= spread.p99 <= spread.max
        assert 0 < spread.mean <= spread.max
    assert stats.longest_tenth_share is not None
    assert 0.1 <= stats.longest_tenth_share <= 1

    finished = [trajectory for trajectory in trajectories if trajectory.finished]
    tracker = LengthTracker(half_life=1e9)  # nothing is forgotten, so tracker and log must agree
    for trajectory in finished:
        tracker.observe(trajectory)
    assert tracker.classes(1)[0].generated == pytest.approx(
        sum(t.generated_tokens for t in finished) / len(finished), rel=1e-5
    )
    classes = tracker.classes()
    assert len(classes) <= 8
    assert classes[-1].peak_context == max(trajectory.peak_context for trajectory in finished)
    assert sum(c.share for c in classes) == pytest.approx(1)
