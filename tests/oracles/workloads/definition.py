"""A workload as it is written down: the shape of its tasks, how much tools tell, the buckets, and where it is all from.

Invariant: what a file says is all there is to a workload. Every parameter has a source, which is a published fact or
says that it is assumed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter

from libra.trajectory import dump_trajectory
from tests.oracles.workloads.drifting_tasks import DriftingTasks
from tests.oracles.workloads.task_shape import TaskShape

FILES = Path(__file__).parent
SIGNALS = ("none", "airline", "medium", "strong")
_KINDS = ("fact: ", "derived: ", "assumption: ")


@dataclass(frozen=True, slots=True)
class Workload:
    """One kind of post-training run."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: str
    why: str
    seed: int
    steps: int  # versions of the whole drift
    groups_per_step: int
    limits: tuple[int, ...]  # largest final context of each bucket, tokens
    shape: TaskShape  # its tool_signal is that of "strong"
    signals: Mapping[str, float]  # setting -> tool_signal
    sources: Mapping[str, str]  # field of this or of the shape -> what it is from

    def __post_init__(self) -> None:
        if tuple(self.signals) != SIGNALS:
            raise ValueError(f"{self.name}: signals are {', '.join(self.signals)}; give {', '.join(SIGNALS)}")
        if self.signals["strong"] != self.shape.tool_signal:
            raise ValueError(f"{self.name}: tool_signal differs from signals.strong; set both to the same")
        wanted = {field.name for field in fields(TaskShape)} | {"seed", "steps", "groups_per_step", "limits", "signals"}
        if wanted != set(self.sources):
            raise ValueError(f"{self.name}: sources lack or do not need {sorted(wanted ^ set(self.sources))}")
        for field, source in self.sources.items():
            if not source.startswith(_KINDS):
                raise ValueError(f"{self.name}: source of {field} must begin with one of {_KINDS}")

    def episodes(self, signal: str, *, seed: int | None = None, steps: int | None = None) -> DriftingTasks:
        """Tasks with this setting of how much tool returns tell. `seed` and `steps` in place of its own: another run of
        the same workload, and the same drift in another number of steps."""
        if signal not in self.signals:
            raise ValueError(f"signal is {signal!r}; choose one of {', '.join(self.signals)}")
        return DriftingTasks(
            replace(self.shape, tool_signal=self.signals[signal]),
            self.seed if seed is None else seed,
            self.steps if steps is None else steps,
        )

    def digest(self) -> str:
        """sha256 of its parameters, not of its prose, and of what they generate: the first two groups of each setting
        at the start, the middle and the end of the drift."""
        digest = hashlib.sha256(TypeAdapter(Workload).dump_json(self, exclude={"why", "sources"}))
        for signal in SIGNALS:
            episodes = self.episodes(signal)
            for version in (0, self.steps // 2, self.steps):
                for number in (0, 1):
                    for trajectory in episodes.group(number, version):
                        digest.update(dump_trajectory(trajectory).encode())
        return digest.hexdigest()


def names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in FILES.glob("*.json")))


def read(name: str) -> Workload:
    """The workload of `name`.json. Raises ValueError for a name that is none of `names`, and for a wrong file."""
    if name not in names():
        raise ValueError(f"workload is {name!r}; choose one of {', '.join(names())}")
    return parse((FILES / f"{name}.json").read_text(encoding="utf-8"))


def parse(text: str) -> Workload:
    return TypeAdapter(Workload).validate_python(json.loads(text))
