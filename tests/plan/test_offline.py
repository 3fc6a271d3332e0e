"""What the planner is asked for a log: the numbers of the log, and a refusal that names the remedy."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from oracles.small_request import PROFILE
from tables import by_name

from libra.config.recipe import Recipe
from libra.config.run import ConfigError, RunConfig, load_config
from libra.cost.device import DeviceProfile
from libra.exec.pool import make_pool
from libra.lengths import LengthTracker
from libra.loop.observations import Observations
from libra.plan.offline import gather, gather_workload, request_from
from libra.plan.options.slots import EngineShape, SlotCounts, SlotRequest
from libra.trajectory import Trajectory, Turn, read_trajectories, read_workload, write_trajectories

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def config() -> RunConfig:
    """Engines of 64 and 192 tokens."""
    return load_config(EXAMPLES / "calculator.yaml")


def trajectory(context: int, generated: int = 8, finished: bool = True, tool_seconds: float | None = 0.5) -> Trajectory:
    """One tool call of `generated` tokens and a last turn of 2; `context` tokens in the end."""
    turns = (Turn(generated, "tool", "ok", 3, tool_seconds), Turn(2, None, None, 0))
    prompt = context - generated - 5
    return Trajectory("t", "p", "task", prompt, turns if finished else turns[:1], None, 0, finished)


def offline_request(config: RunConfig, log: Iterable[Trajectory], profile: DeviceProfile) -> SlotRequest:
    return request_from(config, gather(config, log), profile)


def test_the_request_is_made_of_the_configuration_and_the_log(config: RunConfig) -> None:
    request = offline_request(config, [trajectory(20), trajectory(40), trajectory(40, generated=11)], PROFILE)
    workload = request.workload
    assert request.fleet == SlotCounts(core=1, hybrid=1, rollout=2)
    assert request.shapes == (EngineShape("short", 64, 16, 1024), EngineShape("long", 192, 5, 1024))
    assert request.profile == PROFILE
    assert request.current is None
    assert (workload.trajectories, workload.group_size, workload.max_staleness) == (144, 6, 1)
    assert (workload.longest_context, workload.max_turn_tokens, workload.router_hit) == (192, 11, 1.0)
    assert [cls.peak_context for cls in workload.classes] == [20, 40]
    # Weights 2 ** (-age / 512) are 1 but for the third decimal.
    assert workload.train_tokens == pytest.approx(100 / 3, rel=0.01)
    assert [cls.share for cls in workload.classes] == pytest.approx([1 / 3, 2 / 3], rel=0.01)
    assert [cls.tool_seconds for cls in workload.classes] == pytest.approx([0.5, 0.5])


def test_engine_sizes_are_sorted_by_length_however_the_file_names_them(config: RunConfig) -> None:
    short, long = config.engines["short"], config.engines["long"]
    renamed = config.model_copy(update={"engines": {"a": long, "b": short}})
    assert [shape.name for shape in offline_request(renamed, [trajectory(20)], PROFILE).shapes] == ["b", "a"]


def test_the_half_life_is_the_configured_one(config: RunConfig) -> None:
    planner = config.planner.model_copy(update={"half_life": 1.0})
    quick = config.model_copy(update={"planner": planner})
    classes = offline_request(quick, [trajectory(20), trajectory(40)], PROFILE).workload.classes
    assert [cls.share for cls in classes] == pytest.approx([1 / 3, 2 / 3])


def test_the_question_is_that_of_a_run_that_has_seen_the_same_trajectories(config: RunConfig) -> None:
    log = list(read_trajectories(EXAMPLES / "trajectories.jsonl"))
    offline = offline_request(config, log, PROFILE)
    observations = Observations(
        config.planner, config.training, config.engines, PROFILE, max_turn_tokens=offline.workload.max_turn_tokens
    )
    observations.replanner.observe(log)
    site = observations.site(make_pool(1, 1, 2).devices(), None)
    assert site.request(observations.replanner.scenario(site)) == offline


def test_unfinished_trajectories_are_counted_and_change_nothing(config: RunConfig) -> None:
    finished = [trajectory(20), trajectory(40)]
    cut_off = trajectory(60, generated=30, finished=False)
    mixed = [cut_off, finished[0], cut_off, finished[1]]
    evidence = gather(config, mixed)
    assert (evidence.finished, evidence.unfinished, evidence.longest_turn) == (2, 2, 8)
    assert offline_request(config, mixed, PROFILE) == offline_request(config, finished, PROFILE)


def test_unknown_tool_seconds_count_as_none_and_are_known_to_be_missing(config: RunConfig) -> None:
    evidence = gather(config, [trajectory(20, tool_seconds=None)] * 3)
    assert evidence.tracker.unknown_tool_share == 1.0
    assert evidence.tracker.classes()[0].tool_seconds == 0.0


REFUSED: list[tuple[str, Sequence[Trajectory], str]] = [
    ("empty", [], "the log has 0, none of them finished; give a log with at least one finished"),
    ("unfinished", [trajectory(40, finished=False)] * 3, "the log has 3, none of them finished; give"),
    (
        "too long",
        [trajectory(20), trajectory(193), trajectory(250), trajectory(192)],
        "engines.long.max_model_len: the largest value is 192, but 2 of the log's 4 trajectories hold more,"
        " the longest 250 tokens: raise it to 250 at least",
    ),
    ("too long already", [trajectory(20), trajectory(300, finished=False)], "1 of the log's 2 trajectories hold more"),
]


@by_name("log, message", REFUSED)
def test_a_log_that_cannot_be_planned_for_is_refused(
    config: RunConfig, log: Sequence[Trajectory], message: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        offline_request(config, log, PROFILE)
    assert message in str(refusal.value)


def test_the_longest_context_that_fits_is_planned_for(config: RunConfig) -> None:
    assert offline_request(config, [trajectory(192)], PROFILE).workload.classes[-1].peak_context == 192


def test_a_log_of_turns_without_a_token_has_a_request(config: RunConfig) -> None:
    silent = replace(trajectory(20), turns=(Turn(0, None, None, 0),))
    assert offline_request(config, [silent], PROFILE).workload.max_turn_tokens == 1


# For a cluster.

RECIPE = Recipe(batch=10, samples_per_prompt=5, max_length=4096, tool_seconds_if_unknown=3.0)


def test_a_log_for_a_cluster_is_forgotten_by_the_steps_it_makes() -> None:
    # A half-life is four steps of one: four trajectories of 200 tokens weigh twice as much as four of 100 before.
    one = Recipe(batch=1, samples_per_prompt=1, max_length=4096)
    evidence = gather_workload(one, [trajectory(100)] * 4 + [trajectory(200)] * 4)
    assert [cls.peak_context for cls in evidence.tracker.classes()] == [100, 200]
    assert [cls.share for cls in evidence.tracker.classes()] == pytest.approx([1 / 3, 2 / 3])
    assert (evidence.finished, evidence.unfinished, evidence.tracker.unknown_tool_share) == (8, 0, 0.0)


def test_blocks_are_those_of_an_engine_on_a_gpu() -> None:
    tracker = LengthTracker(40.0, block_tokens=16)
    tracker.observe(trajectory(100))
    assert gather_workload(RECIPE, [trajectory(100)]).tracker.classes() == tracker.classes()


def test_a_tool_of_unknown_duration_takes_what_the_recipe_says() -> None:
    log = [trajectory(100, tool_seconds=None)] * 3 + [trajectory(100, tool_seconds=0.5)]
    evidence = gather_workload(RECIPE, log)
    assert evidence.tracker.unknown_tool_share == pytest.approx(0.75, rel=0.01)
    # Nearly equal weights: (3 * 3 + 0.5) / 4
    assert evidence.tracker.classes()[0].tool_seconds == pytest.approx(2.375, rel=0.03)


def test_unfinished_trajectories_are_lower_bounds() -> None:
    finished = [trajectory(100)] * 20
    cut_off = [trajectory(900, generated=700, finished=False)] * 5
    evidence = gather_workload(RECIPE, [*cut_off, *finished])
    assert (evidence.finished, evidence.unfinished, evidence.longest_turn) == (20, 5, 700)
    assert gather_workload(RECIPE, finished).tracker.classes()[-1].peak_context == 100
    last = evidence.tracker.classes()[-1]
    assert last.peak_context >= cut_off[0].peak_context
    # A fifth of all that started; each of them was there.
    longer = sum(cls.share for cls in evidence.tracker.classes() if cls.peak_context >= cut_off[0].peak_context)
    assert longer == pytest.approx(0.2, abs=0.03)


def test_memory_does_not_grow_with_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    turns = (Turn(8, "tool", "ok", 3, None), Turn(2, None, None, 0))

    def peak(count: int) -> int:
        numbered = (
            Trajectory(f"t{number}", "p", "task", 50 + number * 7 % 3000, turns, None, number // 10, True)
            for number in range(count)
        )
        write_trajectories(log, numbered)
        tracemalloc.start()
        try:
            gather_workload(RECIPE, read_workload(log, 4096))
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    few, many = peak(2_000), peak(20_000)
    # The trajectories between would take twenty times as much; pydantic keeps some thousands of short strings.
    assert many - few < 1e6
