"""What the display shows before the first step and after the last one."""

from __future__ import annotations

from libra.loop.warmup import WarmUpProgress
from libra.report.live import Display, RunView


class Phases:
    """The phases of one run on its display."""

    def __init__(self, name: str, steps: int, display: Display) -> None:
        self._name, self._steps, self._display = name, steps, display

    def show(self, phase: str, step: int = 0) -> None:
        self._display.show(
            RunView(
                name=self._name,
                step=step,
                steps=self._steps,
                reward=None,
                reward_steps=0,
                tokens_per_second=None,
                staleness_mean=None,
                staleness_max=None,
                workers=(),
                last_decision="",
                phase=phase,
            )
        )

    def line(self, text: str) -> None:
        self._display.line(text)

    def warm_up(self, progress: WarmUpProgress) -> None:
        self.show(f"supervised warm-up {progress.step}/{progress.steps}, loss {progress.loss:.3f}")
        if progress.step == progress.steps:
            self.line(f"supervised warm-up: {progress.steps} steps, loss {progress.loss:.3f}")
