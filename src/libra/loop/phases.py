"""Words about what a run does before and after its steps.

Invariant: what is shown is a view of the run like any other, with a phase and without measures.
"""

from __future__ import annotations

from libra.config.run import RunConfig
from libra.loop.warmup import WarmUpProgress
from libra.report.live import Display, RunView


class Phases:
    """Words about what happens before the first step."""

    def __init__(self, config: RunConfig, display: Display) -> None:
        self._config, self._display = config, display

    def show(self, phase: str, step: int = 0) -> None:
        self._display.show(
            RunView(
                name=self._config.name,
                step=step,
                steps=self._config.training.steps,
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
