"""From measured runs to what is said of them: predictions, replays, errors, goals, tables, and the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from benchmarks.fidelity.__main__ import main, shown_command
from benchmarks.fidelity.comparison import Comparison, compare, rows
from benchmarks.fidelity.fit import FittedCost, Prices
from benchmarks.fidelity.measured import Measured, Run
from benchmarks.fidelity.prediction import predict, replay_difference
from benchmarks.fidelity.sessions import Sessions
from benchmarks.fidelity.step import Step
from benchmarks.fidelity.summary import Summary, errors, mean, outcomes, repeat_error
from benchmarks.fidelity.tables import errors_table, goals_table, residuals_table, values_table
from benchmarks.fidelity.workloads import Group, Poisson, Workload, read_workloads
from benchmarks.page import markdown
from libra.route.baselines import RoundRobin
from libra.sim.clock import ticks
from libra.sim.cluster import SimCluster
from libra.sim.engine.config import EngineSpec
from libra.sim.engine.iteration_cost import NONE_ADMITTED, Admitted, Chunk, DecodeBatch, IterationCost

PRICES = Prices(
    tokens=(0.006, 0.0068, 0.007, 0.0075, 0.009, 0.0135, 0.02, 0.028, 0.034, 0.048, 0.061, 0.091, 0.125),
    per_context_token=(7e-7, 1.5e-7),
    per_pair=1.6e-7,
    per_chunk_token=6e-7,
    per_sequence=2e-5,
    per_admitted=0.0,
    per_finished=0.0,
    per_change=0.0,
    per_added=1e-9,
    per_added_token=1e-12,
    error=0.0,
)
STEP = Step(0, 0, 0, 0, 0, 0, (), 0, 0, 0, 0, 0, False)


class Recording:
    """A cost that keeps what it was asked for as steps of an engine, `pace` times as long."""

    def __init__(self, number: int, cost: IterationCost, pace: float) -> None:
        self.steps: list[Step] = []
        self._number, self._cost, self._pace = number, cost, pace

    @property
    def uneven(self) -> bool:
        return False

    def line(self, batch: DecodeBatch, context: int) -> tuple[int, int, int]:
        base, slope, limit = self._cost.line(batch, context)
        return self._keep(base + slope * context, batch.requests, context, ()), 0, limit

    def mixed(
        self, batch: DecodeBatch, context: int, chunks: Sequence[Chunk], admitted: Admitted = NONE_ADMITTED
    ) -> int:
        return self._keep(self._cost.mixed(batch, context, chunks), batch.requests, context, tuple(chunks))

    def _keep(self, length: int, decoding: int, context: int, chunks: tuple[Chunk, ...]) -> int:
        duration = round(length * self._pace)
        step = replace(STEP, engine=self._number, duration=duration, decodes=decoding, attended=context, chunks=chunks)
        self.steps.append(step)
        return duration


def run_at(workload: Workload, pace: float) -> Run:
    """As if an engine had been measured that is `pace` times as slow as PRICES say."""
    costs = [Recording(number, FittedCost(PRICES), pace) for number in range(workload.engines)]
    specs = [EngineSpec(f"{number}", workload.engine.config(), cost) for number, cost in enumerate(costs)]
    cluster = SimCluster(specs, Sessions(workload), RoundRobin(), exact=True)
    cluster.run()
    return Run(outcomes(cluster.requests), tuple(step for cost in costs for step in cost.steps))


def calibration() -> tuple[Step, ...]:
    random = Random(5)
    made = []
    for number in range(240):
        decodes = random.choice((0, 1, 2, 3, 5, 8, 13, 16, 24, 32, 60))
        sizes = [random.choice((1, 16, 30, 64, 100, 130, 200, 256, 300, 400, 512)) for _ in range(random.randint(0, 2))]
        chunks = tuple((size, 32 * random.randint(0, 30)) for size in sizes) or (() if decodes else ((7, 0),))
        step = replace(
            STEP,
            decodes=decodes,
            attended=decodes * random.randint(10, 900),
            chunks=chunks,
            added=number % 3 + 1,
            added_tokens=random.randint(1, 900),
            admitted=len(chunks),
            finished=random.randint(0, 1),
            changed=random.random() < 0.5,
        )
        adding = PRICES.per_added * step.added + PRICES.per_added_token * step.added_tokens
        made.append(replace(step, adding=ticks(adding), duration=ticks(PRICES.step(step) - adding)))
    return tuple(made)


WORKLOADS = (
    Workload(name="together", why="a", seed=1, groups=(Group(sessions=9, prompt=(10, 90), output=(20, 40)),)),
    Workload(
        name="two",
        why="b",
        seed=2,
        engines=2,
        groups=(
            Group(
                sessions=8,
                arrivals=Poisson(kind="poisson", per_second=9.0),
                shared=64,
                prompt=(10, 90),
                output=(5, 40),
                turns=(1, 3),
                tool_tokens=(5, 30),
            ),
        ),
    ),
)


def compared(*paces: float) -> Comparison:
    """Engines of these paces, one a repeat, against a calibration at PRICES."""
    runs = tuple((workload, tuple(run_at(workload, pace) for pace in paces)) for workload in WORKLOADS)
    return compare(Measured("a processor", "an engine", "made", (calibration(), calibration()), runs))


# Definitions


def summary(value: float) -> Summary:
    return Summary(*[value] * 10)


def test_errors_are_of_the_mean_over_repeats_and_signed() -> None:
    measured = mean([summary(1.0), summary(2.0), summary(3.0)])
    assert measured == summary(2.0)
    assert errors(summary(3.0), measured) == summary(0.5)
    assert errors(summary(1.0), measured) == summary(-0.5)
    assert errors(summary(0.0), summary(0.0)) == summary(0.0)
    with pytest.raises(ValueError, match="no repeats"):
        mean([])


def test_each_repeat_is_taken_as_a_prediction_of_the_mean_of_the_others() -> None:
    found = repeat_error([summary(1.0), summary(2.0), summary(3.0)])
    assert found == summary(pytest.approx((1.5 / 2.5 + 0.0 + 1.5 / 1.5) / 3))  # type: ignore[arg-type]


# Predictions and replays


def test_engines_that_cost_what_is_said_are_predicted() -> None:
    for workload in WORKLOADS:
        assert predict(workload, FittedCost(PRICES)) == run_at(workload, 1.0).outcomes


@pytest.mark.parametrize(
    "workload", [it for it in read_workloads() if it.name in ("preemption-by-priority", "two-engines-multi-turn")]
)
def test_a_replay_at_measured_times_is_the_measurement(workload: Workload) -> None:
    assert replay_difference(workload, run_at(workload, 1.3)) is None


def test_what_a_replay_does_otherwise_is_told() -> None:
    workload, run = WORKLOADS[0], run_at(WORKLOADS[0], 1.0)
    steps = list(run.steps)
    steps[4] = replace(steps[4], decodes=steps[4].decodes + 1)
    assert "together, engine 0, step 4: simulated" in str(replay_difference(workload, replace(run, steps=tuple(steps))))
    assert "real one" in str(replay_difference(workload, replace(run, steps=run.steps[:-1])))
    later = (replace(run.outcomes[0], finish=run.outcomes[0].finish + 1), *run.outcomes[1:])
    assert "measured Outcome(number=0" in str(replay_difference(workload, replace(run, outcomes=later)))


# Goals


def test_what_is_priced_right_meets_its_goals() -> None:
    comparison = compared(1.0, 1.0)
    assert comparison.difference is None
    assert comparison.error(lambda it: it.latency_mean) < 0.002
    assert all(row.met for row in rows(comparison) if row.goal is not None)
    for one in comparison.workloads:
        assert abs(one.priced) < 0.01


def test_what_is_priced_wrong_misses_them_and_noise_does_not_excuse_it() -> None:
    comparison = compared(1.19, 1.21)
    missed = {row.metric for row in rows(comparison) if row.met is False}
    assert missed == {"error of throughput", "error of mean latency"}
    assert comparison.workloads[0].errors.throughput == pytest.approx(0.2, abs=0.01)
    assert comparison.workloads[0].priced == pytest.approx(1 / 1.2 - 1, abs=0.01)
    assert comparison.repeat(lambda it: it.latency_mean) == pytest.approx(0.02, abs=0.01)


def test_an_engine_that_differs_from_itself_can_be_predicted_no_better() -> None:
    comparison = compared(0.9, 1.3)
    assert comparison.error(lambda it: it.latency_mean) > 0.06
    assert all(row.met for row in rows(comparison) if row.goal is not None)


# Tables and the page


def test_tables_have_a_line_for_everything() -> None:
    comparison = compared(1.0, 1.0)
    lines = errors_table(comparison).splitlines()
    assert len(lines) == 2 + len(WORKLOADS) + 1
    assert lines[2].startswith("| together | ") and lines[-1].startswith("| mean absolute error | ")
    assert len(values_table(comparison).splitlines()) == 2 + len(WORKLOADS)
    one = comparison.workloads[1]
    assert f"| {one.measured.throughput:.1f} / {one.predicted.throughput:.1f} |" in values_table(comparison)
    assert goals_table([comparison]).count("| made | ") == 2
    assert {line.split(" |")[0] for line in residuals_table(comparison).splitlines()[2:]} == {
        f"| {kind}" for kind in ("decode", "mixed", "prefill", "several prefills")
    }


def test_a_table_with_a_line_too_short_is_refused() -> None:
    assert markdown(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | ---: |\n| 1 | 2 |"
    with pytest.raises(ValueError, match="1 cells, and the table 2"):
        markdown(["a", "b"], [["1"]])


# The command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--repeats 1", "2 or more"),
        ("--models small,large", "no large; choose of tiny, small"),
        ("--schedule-cases 0", "1 or more"),
        ("--markdown nowhere.md", "nowhere.md is no file"),
        ("--save here --measured there", "not allowed with"),
        ("--graphs --schedule sync", "not allowed with"),
        ("--measured nowhere", "nowhere/small.json.gz, nowhere/tiny.json.gz; measure with --save nowhere"),
    ],
)
def test_options_are_checked_before_anything_is_run(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments.split())
    assert message in capsys.readouterr().err


def test_the_page_names_the_command_without_the_places_of_files() -> None:
    given = [
        "--json",
        "a",
        "--quick",
        "--measured=b",
        "--save",
        "c",
        "--markdown",
        "docs/fidelity.md",
        "--repeats",
        "4",
    ]
    assert shown_command(given) == "python -m benchmarks.fidelity --quick --markdown docs/fidelity.md --repeats 4"
