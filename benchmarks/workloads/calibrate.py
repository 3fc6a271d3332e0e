"""Sets what the published numbers leave open: `python -m benchmarks.workloads.calibrate [--write]`.

Invariant: only published baselines are run, and each published number sets one parameter, in this order: mean lengths
and the accuracy of attained-service MLFQ the class shares, the accuracy of a length predictor what prompts tell, the
accuracy of the published C-MLFQ what tools tell. What is set once is never set again by what comes later.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from benchmarks.workloads.baselines import PUBLISHED, quality
from benchmarks.workloads.definition import FILES, Workload, parse
from benchmarks.workloads.facts import at_version, facts
from libra.sim.training_run.drifting_tasks import DriftingTasks
from libra.sim.training_run.task_shape import LengthClass, TaskShape

MEANS = {"search_r1": (2_500, 11_500), "dapo_math": (3_000, 13_800), "r2e_gym": (8_000, 18_400)}  # tokens
SEARCH_SHORTEST = 0.79  # share of the shortest class at the start; its share at the end is set
SHORTEST = {"dapo_math": (0.76, 0.12), "r2e_gym": (0.72, 0.18)}  # its shares at the two ends, as assumed
SIGNALS = {"airline": 0.18, "medium": 0.40}  # R^2
TASK_PART = 0.4  # of what prompts tell
KNOWN, TOLD = 0.65, 0.95  # what prompts and tools tell while what goes before is set
SEEDS = (1, 2, 3)  # an accuracy is the mean over these runs
GROUPS = 250  # drawn for a mean or an R^2
TOLERANCE = 0.004  # of an accuracy or an R^2


def calibrated(files: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The workload files with the parameters that follow from published numbers."""
    search = _with_signal(_with_known(parse(json.dumps(files["search_r1"])), KNOWN), TOLD)

    def accuracy(policy: str) -> Callable[[Workload], float]:
        def measure(workload: Workload) -> float:
            runs = [quality(workload, workload.episodes("strong", seed=seed), policy) for seed in SEEDS]
            return sum(run.single_shot_accuracy for run in runs) / len(runs)

        return measure

    search, last = _solve(
        lambda share: _with_shares(search, MEANS["search_r1"], (SEARCH_SHORTEST, share)),
        accuracy("mlfq"),
        PUBLISHED["mlfq"],
        0.06,
        0.12,
    )
    search, known = _solve(
        lambda part: _with_known(search, part),
        accuracy("length-predictor"),
        PUBLISHED["length-predictor"],
        0.5,
        0.8,
    )
    search, told = _solve(
        lambda signal: _with_signal(search, signal),
        accuracy("cmlfq-published"),
        PUBLISHED["cmlfq-published"],
        0.94,
        1.0,
    )
    print(f"last share of the shortest class {last}, what prompts tell {known}, tool_signal {told}")
    others = {
        name: _with_shares(
            _with_signal(_with_known(parse(json.dumps(files[name])), known), told), MEANS[name], SHORTEST[name]
        )
        for name in SHORTEST
    }
    return {
        name: {
            **files[name],
            "shape": {**files[name]["shape"], **_changed(workload.shape)},
            "signals": {
                "none": 0.0,
                **{setting: _telling(workload, wanted) for setting, wanted in SIGNALS.items()},
                "strong": workload.shape.tool_signal,
            },
        }
        for name, workload in {"search_r1": search, **others}.items()
    }


def _solve(
    make: Callable[[float], Workload], measure: Callable[[Workload], float], wanted: float, low: float, high: float
) -> tuple[Workload, float]:
    """The workload whose measure is what is wanted, by bisection between `low` and `high`; the measure grows
    with the parameter. Raises ValueError where none of them has it."""
    while high - low > 1e-3:
        value = round((low + high) / 2, 4)
        made = make(value)
        found = measure(made)
        print(f"{made.name}: {value} gives {found:.4f}, wanted {wanted}")
        if abs(found - wanted) <= TOLERANCE:
            return made, value
        low, high = (value, high) if found < wanted else (low, value)
    raise ValueError(f"no value reaches {wanted}: change what is assumed of the classes or the tools")


def _with_shares(workload: Workload, means: tuple[float, float], shortest: tuple[float, float]) -> Workload:
    """The workload with class shares that have these mean final contexts at the two ends of the drift."""
    ends = [
        _shares(_class_means(workload, version), mean, share)
        for version, mean, share in zip((0, workload.steps), means, shortest, strict=True)
    ]
    lengths = tuple(
        replace(each, first_share=first, last_share=last)
        for each, first, last in zip(workload.shape.lengths, *ends, strict=True)
    )
    return replace(workload, shape=replace(workload.shape, lengths=lengths))


def _class_means(workload: Workload, version: int) -> list[float]:
    """Mean final context of each class alone, tokens."""
    means = []
    for chosen in workload.shape.lengths:
        alone: tuple[LengthClass, ...] = (replace(chosen, first_share=1.0, last_share=1.0),)
        episodes = DriftingTasks(replace(workload.shape, lengths=alone), workload.seed, workload.steps)
        trajectories = at_version(episodes, version, GROUPS)
        means.append(sum(trajectory.final_context for trajectory in trajectories) / len(trajectories))
    return means


def _shares(means: Sequence[float], wanted: float, shortest: float) -> tuple[float, float, float]:
    """Shares of three classes of these means that have the `wanted` mean, given the shortest's; to four places."""
    short, middle, long = means
    rest = 1 - shortest
    longest = round((wanted - shortest * short - rest * middle) / (long - middle), 4)
    if not 0 <= longest <= rest:
        raise ValueError(
            f"a mean of {wanted} tokens and {shortest} of the shortest class need {longest} of the longest: change"
            " the medians of the classes"
        )
    return shortest, round(rest - longest, 4), longest


def _with_known(workload: Workload, known: float) -> Workload:
    task = round(TASK_PART * known, 4)
    return replace(workload, shape=replace(workload.shape, task_share=task, prompt_share=round(known - task, 4)))


def _with_signal(workload: Workload, signal: float) -> Workload:
    return replace(
        workload,
        shape=replace(workload.shape, tool_signal=signal),
        signals={**workload.signals, "strong": signal},
    )


def _telling(workload: Workload, wanted: float) -> float:
    """The tool_signal with which the first tool return explains this much of what remains, half-way."""

    def signal(workload: Workload) -> float:
        return facts(at_version(workload.episodes("strong"), workload.steps // 2, GROUPS), 0.0).signal

    return _solve(lambda value: _with_signal(workload, value), signal, wanted, 0.0, 1.0)[1]


def _changed(shape: TaskShape) -> dict[str, Any]:
    return {
        "task_share": shape.task_share,
        "prompt_share": shape.prompt_share,
        "tool_signal": shape.tool_signal,
        "lengths": [asdict(each) for each in shape.lengths],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="keep the parameters in the workloads' files")
    write = parser.parse_args().write
    files = {name: json.loads((FILES / f"{name}.json").read_text(encoding="utf-8")) for name in MEANS}
    for name, found in calibrated(files).items():
        kept = parse(json.dumps(found))
        print(f"{name}: {'unchanged' if found == files[name] else 'changed'}, sha256 {kept.digest()}")
        if write:
            (FILES / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
