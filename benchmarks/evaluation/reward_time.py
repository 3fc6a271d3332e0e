"""Time that each system takes to the reward that colocated training ends with.

Invariant: the runs are those of `throughput`, and the reward is that of `reward_curve`, the same for all systems. How
much less a stale token is worth is not known, so it is varied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.evaluation import estimate
from benchmarks.evaluation.cells import Result
from benchmarks.evaluation.estimate import Estimate
from benchmarks.evaluation.experiment import Experiment
from benchmarks.evaluation.figures import Line, lines
from benchmarks.evaluation.page import markdown_table
from benchmarks.evaluation.palette import SYSTEMS, number_of
from benchmarks.evaluation.reward_curve import reward, seconds_to, worth
from benchmarks.evaluation.runs import Runs, Values, model_name, words_of
from benchmarks.evaluation.scale import measured_axis
from benchmarks.evaluation.setting import Setting
from benchmarks.evaluation.throughput import cells, file_name
from benchmarks.rows import Row

DISCOUNTS = (0.0, 0.1, 0.3)  # assumed
_DRAWN = 0.1  # in figures
_LEVELLED = 4.0  # scales of tokens in the colocated run: it is assumed to end when its reward has all but levelled off
# Of the reward that the colocated run ends with: 38 % of its tokens, which every run trains on whatever the discount.
TARGET = 0.8
PUBLISHED = 2.5  # times less, at most: Libra (arXiv 2606.03077)
_REFERENCE = "colocated"
_HOUR = 3600.0

Times = Mapping[str, Mapping[int, float | None]]  # seconds to the target, by system and seed; None: not reached


def curve(values: Values, reference: Values, discount: float) -> list[float]:
    """Rewards at the ends of the steps; `reference` is the colocated run of the same seed, which sets the scale."""
    scale = sum(reference["tokens"]) / _LEVELLED
    return [reward(tokens, scale) for tokens in worth(values["tokens"], values["staleness"], discount)]


def times(runs: Runs, setting: Setting, discount: float) -> Times:
    found: dict[str, dict[int, float | None]] = {}
    for system in runs.systems(setting):
        for seed, values in runs.of(setting, system).items():
            reference = runs.of(setting, _REFERENCE)[seed]
            target = TARGET * curve(reference, reference, discount)[-1]
            reached = seconds_to(target, curve(values, reference, discount), values["ended"])
            found.setdefault(system, {})[seed] = reached
    return found


def less(found: Times, system: str, than: str) -> Estimate | None:
    """Times less that `system` takes; None where one of the two did not get there with some seed."""
    own, other = list(found[system].values()), list(found[than].values())
    reached = [second for second in own if second is not None]
    theirs = [second for second in other if second is not None]
    if len(reached) < len(own) or len(theirs) < len(other):
        return None
    return estimate.ratio(theirs, reached)


def _rows(results: Sequence[Result]) -> list[Row]:
    runs = Runs(results)
    rows = []
    for setting in runs.settings:
        for discount in DISCOUNTS:
            found = times(runs, setting, discount)
            case = f"{words_of(setting)}, discount {discount:g}"
            for system, by_seed in found.items():
                reached = [seconds for seconds in by_seed.values() if seconds is not None]
                rows.append(Row(case, f"{system}: runs that reach the reward", len(reached), f"of {len(by_seed)}"))
                if len(reached) == len(by_seed):
                    rows.append(Row(case, f"{system}: time to it", estimate.mean(reached).value / _HOUR, "h"))
                gain = less(found, "ours", system)
                if system != "ours" and gain is not None:
                    rows.append(Row(case, f"time of {system} over ours", gain.value, "x"))
    return rows


def _tables(results: Sequence[Result]) -> dict[str, str]:
    runs = Runs(results)
    return {file_name(setting): _table(runs, setting) for setting in runs.settings}


def _table(runs: Runs, setting: Setting) -> str:
    by_discount = {discount: times(runs, setting, discount) for discount in DISCOUNTS}
    header = ["system", *(f"hours, discount {discount:g}" for discount in DISCOUNTS)]
    header += [f"over ours, discount {discount:g}" for discount in DISCOUNTS]
    body = []
    for system in runs.systems(setting):
        hours = [_hours(list(found[system].values())) for found in by_discount.values()]
        gains = [less(found, "ours", system) for found in by_discount.values()]
        told = ["" if system == "ours" else "not reached" if it is None else it.written(".2f") for it in gains]
        body.append([system, *hours, *told])
    said = f"Published for Libra: up to {PUBLISHED:g} times less than baselines, of the reward of real policies."
    return f"{markdown_table(header, body)}\n\n{said}"


def _hours(seconds: Sequence[float | None]) -> str:
    reached = [second / _HOUR for second in seconds if second is not None]
    if len(reached) < len(seconds):
        return f"reached by {len(reached)} of {len(seconds)}"
    return estimate.mean(reached).written(".2f")


def _figures(results: Sequence[Result]) -> dict[str, str]:
    runs = Runs(results)
    return {file_name(setting): _figure(runs, setting) for setting in runs.settings}


def _figure(runs: Runs, setting: Setting) -> str:
    reference = runs.of(setting, _REFERENCE)[0]
    series = []
    for system in SYSTEMS:
        if system in runs.systems(setting):
            values = runs.of(setting, system)[0]
            hours = [second / _HOUR for second in values["ended"]]
            points = tuple(zip(hours, curve(values, reference, _DRAWN), strict=True))
            series.append(Line(system, points, like=number_of(system)))
    return lines(
        f"Reward against time: {setting.gpus} A800, {model_name(setting)}, {setting.workload}",
        f"Reward, as a saturating function of the tokens that were trained on, at the end of each step of the run with"
        f" seed 0, against hours; a token that is one version stale is worth 1/{1 + _DRAWN:g} of a fresh one. The"
        " function is assumed, and the same for all systems.",
        series,
        measured_axis("hours", [x for line in series for x, _ in line.points]),
        measured_axis("reward (1: all there is to learn)", [1.0]),
    )


EXPERIMENT = Experiment(
    name="reward-time",
    title="Time to a reward",
    question="How long does each system take to 80 % of the reward that colocated training ends with?",
    cells=cells,
    rows=_rows,
    tables=_tables,
    figures=_figures,
)
