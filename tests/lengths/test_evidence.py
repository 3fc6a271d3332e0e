"""What is still running as evidence: against a product-limit oracle, and against lengths that are known."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from benchmarks.evaluation import systems
from benchmarks.evaluation.setting import Setting
from libra.cost.engine_memory import BLOCK
from libra.lengths import FALSE_ALARM_RATE, LengthTracker
from libra.plan.plan import Plan
from libra.sim.training_run.episodes import Episodes
from libra.sim.training_run.loop import simulate_posttraining
from libra.sim.training_run.system import Moment
from libra.trajectory import Trajectory, Turn
from tests.oracles.workloads.definition import read
from tests.oracles.workloads.drifting_tasks import Around

PER_STEP = 48


def trajectory(context: int, version: int = 0, *, finished: bool = True) -> Trajectory:
    turn = Turn(0, None, None, 0) if finished else Turn(0, "tool", "ok", 0)
    return Trajectory("a", "p", "t", context, (turn,), None, version, finished)


def tracked(
    finished: list[tuple[int, int]], running: list[tuple[int, int]], half_life: float, bins_per_octave: int = 1
) -> LengthTracker:
    """Of (context, version) pairs."""
    tracker = LengthTracker(half_life, bins_per_octave)
    tracker.observe_running(())
    for context, version in finished:
        tracker.observe(trajectory(context, version))
    tracker.observe_running(trajectory(context, version, finished=False) for context, version in running)
    return tracker


def product_limit(
    finished: list[tuple[int, int]], running: list[tuple[int, int]], half_life: float
) -> dict[int, float]:
    """Share of trajectories by final context, one trajectory at a time. One that runs at a context is not among those
    that could have finished there, and the longest of all is taken to end where it is (Efron)."""
    versions = [version for _, version in (*finished, *running)]

    def weight(version: int) -> float:
        return 2 ** (-sum(later > version for later in versions) / half_life)

    last = max(context for context, _ in (*finished, *running))
    shares: dict[int, float] = {}
    left = 1.0
    for context in sorted({context for context, _ in finished} | {last}):
        ends = sum(weight(version) for reached, version in finished if reached == context)
        risk = sum(weight(version) for reached, version in finished if reached >= context)
        risk += sum(weight(version) for reached, version in running if reached > context)
        hazard = 1.0 if context == last else ends / risk
        shares[context] = left * hazard
        left *= 1 - hazard
    return shares


edges = st.integers(0, 12).map(lambda power: 2**power)
pairs = st.tuples(edges, st.integers(0, 5))


@settings(deadline=None)
@given(st.lists(pairs, min_size=1, max_size=15), st.lists(pairs, max_size=15), st.floats(20, 1e6))
def test_shares_against_the_product_limit(
    finished: list[tuple[int, int]], running: list[tuple[int, int]], half_life: float
) -> None:
    tracker = tracked(finished, running, half_life)
    wanted = product_limit(finished, running, half_life)
    assume(not tracker.drift().drifted)
    assert {c.peak_context: c.share for c in tracker.classes(40)} == pytest.approx(wanted, abs=1e-9)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 5)), min_size=1, max_size=30), st.floats(20, 1e6))
def test_with_nothing_running_shares_are_the_weighted_histogram(
    finished: list[tuple[int, int]], half_life: float
) -> None:
    weights = [2 ** (-sum(later > version for _, later in finished) / half_life) for _, version in finished]
    histogram: dict[int, float] = defaultdict(float)
    for (context, _), weight in zip(finished, weights, strict=True):
        histogram[int(math.log2(context))] += weight / sum(weights)
    tracker = tracked(finished, [], half_life)
    assume(not tracker.drift().drifted)
    shares = {int(math.log2(c.peak_context)): c.share for c in tracker.classes(40)}
    assert shares == pytest.approx(histogram, abs=1e-12)


@given(st.permutations([(100, 0), (300, 0), (900, 1), (2000, 1), (5000, 2)]))
def test_the_order_of_arrival_does_not_matter(finished: list[tuple[int, int]]) -> None:
    assert tracked(finished, [(700, 2)], 3, 4).snapshot() == tracked(sorted(finished), [(700, 2)], 3, 4).snapshot()


def test_part_of_a_bin_passed_counts_as_that_part_at_risk() -> None:
    # Bins of one octave: at 256 * sqrt(2) half of the bin is behind it.
    shares = [c.share for c in tracked([(300, 0), (1000, 0)], [(362, 0), (362, 0)], 1e9).classes()]
    assert shares == pytest.approx([1 / (1 + 1 + 2 * 0.5), 1 - 1 / 3], abs=1e-3)


def test_what_outlives_all_finished_ones_is_put_where_the_longest_runs() -> None:
    tracker = tracked([(100, 0)], [(3000, 0), (5000, 0), (5000, 0)], 1e9)
    shorter, longer = tracker.classes()
    assert (shorter.share, longer.share, longer.peak_context) == (pytest.approx(0.25), pytest.approx(0.75), 5000)
    assert longer.mean_context == 5000


def test_running_ones_are_replaced_not_added() -> None:
    tracker = tracked([(100, 0), (200, 1)], [(3000, 0)], 10)
    before = tracker.snapshot()
    tracker.observe_running([trajectory(5000, 3, finished=False)])
    assert tracker.snapshot() != before
    tracker.observe_running([trajectory(3000, 0, finished=False)])
    assert tracker.snapshot() == before


def test_finished_ones_are_refused_and_leave_no_trace() -> None:
    tracker = tracked([(100, 0)], [(300, 0)], 10)
    before = tracker.snapshot()
    with pytest.raises(ValueError, match=r"observe\(\)"):
        tracker.observe_running([trajectory(5000, 3, finished=False), trajectory(100)])
    assert tracker.snapshot() == before


class Run:
    """Asynchronous generation: `PER_STEP` trajectories start with every version, and take as long as they are long.

    The tracker may be left ignorant of what runs.
    """

    def __init__(self, seed: int, half_life: float, *, ignorant: bool = False) -> None:
        self.random = np.random.default_rng(seed)
        self.tracker = LengthTracker(half_life)
        self.tracker.observe_running(())
        self.ignorant = ignorant
        self.flying: list[tuple[int, int]] = []  # (final context, version)
        self.version = -1

    def step(self, median: float) -> None:
        self.version += 1
        self.flying += [(int(x), self.version) for x in 50 + median * self.random.lognormal(0, 0.8, PER_STEP)]
        reached = [(1 + self.version - version) * 1000 for _, version in self.flying]
        done = [length <= at for (length, _), at in zip(self.flying, reached, strict=True)]
        for (length, version), ended in sorted(zip(self.flying, done, strict=True)):
            if ended:
                self.tracker.observe(trajectory(length, version))
        running = [(at, v) for (_, v), at, ended in zip(self.flying, reached, done, strict=True) if not ended]
        if not self.ignorant:
            self.tracker.observe_running(trajectory(at, version, finished=False) for at, version in running)
        self.flying = [one for one, ended in zip(self.flying, done, strict=True) if not ended]


def test_stationary_lengths_alarm_as_rarely_as_stated_while_long_ones_are_late() -> None:
    looks = []
    for seed in range(40):
        run = Run(seed, half_life=2 * PER_STEP)
        for step in range(36):
            run.step(1500)
            if step % 3 == 2 and step > 5:  # 1.5 half-lives, or 6 of the recent memory, between looks
                looks.append(run.tracker.drift().drifted)
    # At a rate of 1 %, more than 12 alarms in 400 looks are as rare as one in 1500.
    assert len(looks) == 400
    assert FALSE_ALARM_RATE == 0.01
    assert sum(looks) <= 12


def test_a_jump_is_noticed_within_two_steps_and_followed_within_eight() -> None:
    noticed, errors, settled = [], [], []
    for seed in range(10):
        run = Run(seed, half_life=2 * PER_STEP)
        for _ in range(20):
            run.step(1000)
        for step in range(30):
            run.step(2500)
            if step == 1:
                noticed.append(run.tracker.drift().drifted)
            if step == 7:
                errors.append(run.tracker.quantile(0.5) / 2550 - 1)
        settled.append(not run.tracker.drift().drifted)
    assert sum(noticed) >= 9
    assert abs(np.median(errors)) < 0.1
    assert sum(settled) >= 9


def test_running_ones_remove_the_bias_of_those_that_finish_early() -> None:
    truth = 50 + 1500 * math.exp(0.8 * 1.2816)

    def settled(seed: int, ignorant: bool) -> LengthTracker:
        run = Run(seed, half_life=2 * PER_STEP, ignorant=ignorant)
        for _ in range(20):
            run.step(1500)
        return run.tracker

    trackers, ignorant = [[settled(seed, ignorant) for seed in range(10)] for ignorant in (False, True)]
    assert abs(np.mean([tracker.quantile(0.9) / truth - 1 for tracker in trackers])) < 0.06
    assert np.mean([tracker.quantile(0.9) / truth - 1 for tracker in ignorant]) < -0.1
    assert sum(tracker.drift().drifted for tracker in ignorant) >= 7  # they always seem to become shorter


def test_late_ones_are_no_trend() -> None:
    scales = []
    for seed in range(6):
        run = Run(seed, half_life=2 * PER_STEP)
        for _ in range(24):
            run.step(1500)
        scales.append(run.tracker.forecast(5).scale)
    assert np.mean(scales) == pytest.approx(1, abs=0.05)


def tooled(length: int, waits: list[float], version: int = 0) -> Trajectory:
    """`waits` are the seconds of its tools, with equal parts of its tokens before and after them."""
    part = length // (len(waits) + 1)
    calls = [Turn(part, "tool", "ok", 0, seconds) for seconds in waits]
    last = Turn(length - part * len(waits), None, None, 0)
    return Trajectory("a", "p", "t", 0, (*calls, last), None, version, True)


def at(trajectory: Trajectory, seconds: float, speed: float) -> Trajectory | None:
    """As far as it has come after so many seconds, at `speed` tokens a second; None: it has finished."""
    turns: list[Turn] = []
    for turn in trajectory.turns:
        decode = turn.generated_tokens / speed
        if seconds < decode:
            turns.append(Turn(int(seconds * speed), None, None, 0))
            break
        seconds -= decode
        if turn.tool is None:
            return None
        waited = turn.tool_seconds or 0.0
        if seconds < waited:
            turns.append(replace(turn, status="unknown", tool_seconds=seconds))
            break
        seconds -= waited
        turns.append(turn)
    return replace(trajectory, turns=tuple(turns), finished=False)


def exponential(random: np.random.Generator, mean: float) -> list[float]:
    return list(random.exponential(mean, 4))


# How long tools take, by the logarithm of the length above its mean; tokens a second of engines by version; and the
# error that is stated, which is larger where engines are not as fast as `cohorts.work` assumes.
CENSORED = {
    "no tools": (lambda random, log: [], lambda version: 50.0, 0.04),
    "long ones call slow tools": (lambda random, log: exponential(random, 60 * math.exp(log)), lambda _: 50.0, 0.04),
    "short ones call slow tools": (lambda random, log: exponential(random, 60 * math.exp(-log)), lambda _: 50.0, 0.04),
    "tools take whatever time": (lambda random, log: exponential(random, 60), lambda _: 50.0, 0.04),
    "engines slow down": (lambda random, log: exponential(random, 5), lambda version: 80.0 / (1 + version), 0.04),
    "engines twice as fast as assumed": (lambda random, log: exponential(random, 30), lambda _: 100.0, 0.06),
}


@pytest.mark.parametrize(("tools", "speed", "stated"), CENSORED.values(), ids=CENSORED)
def test_in_expectation_what_is_cut_off_by_time_changes_nothing(
    tools: Callable[[np.random.Generator, float], list[float]], speed: Callable[[int], float], stated: float
) -> None:
    """Four versions of 150, of which the newest have had little time: against a tracker that knows how all end."""
    errors, ignorant = [], []
    for seed in range(24):
        random = np.random.default_rng(seed)
        tracker, knows, only = (LengthTracker(1e9) for _ in range(3))
        for each in (tracker, knows, only):
            each.observe_running(())
        running = []
        for version, age in enumerate((1e9, 400.0, 200.0, 100.0)):
            for log in random.normal(0, 0.8, 150):
                whole = tooled(int(3000 * math.exp(log)), tools(random, log), version)
                knows.observe(whole)
                come_to = at(whole, age * random.uniform(0.7, 1), speed(version))
                if come_to is None:
                    tracker.observe(whole)
                    only.observe(whole)
                else:
                    running.append(come_to)
        tracker.observe_running(running)
        truth = np.array([knows.quantile(0.5), knows.quantile(0.9), knows.classes(1)[0].generated])
        for found, of in ((errors, tracker), (ignorant, only)):
            found.append(np.array([of.quantile(0.5), of.quantile(0.9), of.classes(1)[0].generated]) / truth - 1)
    assert np.abs(np.mean(errors, axis=0)).max() < stated
    assert np.abs(np.mean(errors, axis=0)).max() < np.abs(np.mean(ignorant, axis=0)).max()


Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Stationary(Around):
    """`Episodes` of one stage of a drift, whatever the version that they start with."""

    episodes: Episodes
    stage: int

    def group(self, number: int, version: int) -> tuple[Trajectory, ...]:
        return tuple(replace(each, policy_version=version) for each in self.episodes.group(number, self.stage))


class Watching:
    """A `Replan` that keeps the plan, and feeds trackers with its input: `errors` at each step, as [P50, P90, P99,
    mean] relative to the tracker that knows the ends."""

    period = 1

    def __init__(self, episodes: Episodes, batch: int, steps: int) -> None:
        names = ("tracked", "finished only", "all")
        self._trackers = {name: LengthTracker(2.0 * batch, block_tokens=BLOCK) for name in names}
        for tracker in self._trackers.values():
            tracker.observe_running(())
        self._episodes, self._trajectories = episodes, steps * batch
        self._started: set[str] = set()
        self.errors: list[dict[str, Array]] = []

    def decide(self, moment: Moment) -> Plan | None:
        for trajectory in moment.finished:
            for name in ("tracked", "finished only"):
                self._trackers[name].observe(trajectory)
        self._trackers["tracked"].observe_running(moment.running)
        for trajectory in (*moment.finished, *moment.running):
            if trajectory.id not in self._started:
                self._started.add(trajectory.id)
                self._trackers["all"].observe(self._whole(trajectory))
        if len(self._started) < self._trajectories:  # from then on the run winds down
            found = {name: _levels(tracker) for name, tracker in self._trackers.items()}
            self.errors.append({name: found[name] / found["all"] - 1 for name in ("tracked", "finished only")})
        return None

    def _whole(self, trajectory: Trajectory) -> Trajectory:
        group, sample = map(int, trajectory.id.split("/"))
        return self._episodes.group(group, trajectory.policy_version)[sample]


def _levels(tracker: LengthTracker) -> Array:
    mean = sum(cls.share * cls.mean_context for cls in tracker.classes())
    return np.array([*(tracker.quantile(q) for q in (0.5, 0.9, 0.99)), mean])


def simulated(workload: str, steps: int) -> list[dict[str, Array]]:
    """Errors at each step of a run on 48 A800, without the drift of the workload."""
    setting, source = Setting("Qwen/Qwen3-14B", workload), read(workload)
    tasks = source.episodes("strong", seed=source.seed)
    episodes = Stationary(tasks, tasks.steps // 2)
    watching = Watching(episodes, setting.groups_per_step * episodes.samples_per_prompt, steps)
    system = systems.ours(setting, systems.Parts(replan=False, most_buckets=1))
    simulate_posttraining(replace(system, replan=lambda: watching), episodes, steps)
    return watching.errors


def test_in_a_whole_run_lengths_are_those_of_a_tracker_that_knows_all_ends() -> None:
    errors = simulated("r2e_gym", steps=12)[4:]
    tracked, finished_only = (
        np.mean([at[name] for at in errors], axis=0) for name in ("tracked", "finished only")
    )  # P50, P90, P99 and mean
    assert np.abs(tracked).max() < 0.05
    assert np.abs(finished_only).max() > 0.1
