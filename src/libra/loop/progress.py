"""What a person who watches a run is shown."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import fmean

from libra.records.schema import StepRecord
from libra.report.live import Display, RunView

_RECENT_STEPS = 10  # over which the shown reward is averaged


class RunProgress:
    """The phases and steps of one run, on its display."""

    def __init__(self, name: str, steps: int, display: Display) -> None:
        self._name, self._steps, self._display = name, steps, display
        self._rewards = deque[float](maxlen=_RECENT_STEPS)

    def line(self, text: str) -> None:
        self._display.line(text)

    def phase(self, phase: str, step: int = 0) -> None:
        """Before the first step and after the last one."""
        self._display.show(RunView(self._name, step, self._steps, phase=phase))

    def warm_up(self, step: int, steps: int, loss: float) -> None:
        self.phase(f"supervised warm-up {step}/{steps}, loss {loss:.3f}")
        if step == steps:
            self.line(f"supervised warm-up: {steps} steps, loss {loss:.3f}")

    def step(self, record: StepRecord, last_decision: str, messages: Iterable[str]) -> None:
        self._rewards.append(record.reward_mean)
        self._display.show(
            RunView(
                name=self._name,
                step=record.step,
                steps=self._steps,
                reward=fmean(self._rewards),
                reward_steps=len(self._rewards),
                tokens_per_second=record.generated_tokens / record.step_seconds,
                staleness_mean=record.staleness_mean,
                staleness_max=record.staleness_max,
                workers=tuple((worker, role, "") for worker, role in record.roles.items()),
                last_decision=last_decision,
                phase=f"step {record.step_seconds:.2f} s, training waits {record.wait_seconds:.2f} s",
                messages=tuple(messages),
            )
        )
