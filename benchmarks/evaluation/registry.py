"""The experiments there are, in the order of the page.

Invariant: a name stands for one experiment, and is its module's.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from benchmarks.evaluation.experiment import Experiment
from libra.config.yaml_file import unknown

MODULES = (  # of this package; each has an `EXPERIMENT`
    "tp_by_length",
    "time_by_length",
    "step_price",
    "neighbourhood",
    "routing_strong",
    "throughput",
    "ceiling",
    "long_run",
    "reward_time",
    "ablation",
    "sensitivity",
    "scaling",
    "routing_real",
    "lending",
)


def experiments(names: Sequence[str] = ()) -> tuple[Experiment, ...]:
    """The named ones, or all, in the order of the page. Raises ValueError for a name that there is not."""
    known = tuple(_load(module) for module in MODULES)
    by_name = {experiment.name: experiment for experiment in known}
    for name in names:
        if name not in by_name:
            raise ValueError(unknown("experiment", name, by_name))
    return tuple(experiment for experiment in known if not names or experiment.name in names)


def _load(module: str) -> Experiment:
    found = import_module(f"benchmarks.evaluation.{module}").EXPERIMENT
    if not isinstance(found, Experiment):
        raise TypeError(f"{module}.EXPERIMENT is a {type(found).__name__}; make it an Experiment")
    if found.name != module.replace("_", "-"):
        raise ValueError(f"{module}.EXPERIMENT is called {found.name}; call it {module.replace('_', '-')}")
    return found
