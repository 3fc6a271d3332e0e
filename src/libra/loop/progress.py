"""Shows the progress of a run on the user's display."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from statistics import fmean
from time import monotonic

from libra.records.schema import StepLoan, StepRecord
from libra.report.live import Display, RunView, left_words
from libra.report.remaining import RemainingTime
from libra.report.words import percent

_RECENT_STEPS = 10  # of the averages for the shown reward and pace
_NAMED = 2  # recalled devices shown by name; above this number, only the number is shown


class RunProgress:
    """The phases and steps of one run, on its display."""

    def __init__(self, name: str, steps: int, display: Display, clock: Callable[[], float] = monotonic) -> None:
        self._name, self._steps, self._display, self._clock = name, steps, display, clock
        self._remaining = RemainingTime()  # of the warm-up
        self._step_seconds = deque[float](maxlen=_RECENT_STEPS)
        self._rewards = deque[float](maxlen=_RECENT_STEPS)

    def line(self, text: str) -> None:
        self._display.line(text)

    def phase(self, phase: str, step: int = 0) -> None:
        """Show a phase before the first step or after the last one."""
        self._display.show(RunView(self._name, step, self._steps, phase=phase))

    def warm_up(self, step: int, steps: int, loss: float) -> None:
        left = left_words(self._remaining.observe(step, steps, self._clock()))
        self.phase(f"supervised warm-up {step}/{steps}, loss {loss:.3f}" + (f", {left}" if left else ""))
        if step == steps:
            self.line(f"supervised warm-up: {steps} steps, loss {loss:.3f}")

    def step(self, record: StepRecord, last_decision: str, messages: Iterable[str]) -> None:
        self._rewards.append(record.reward_mean)
        self._step_seconds.append(record.step_seconds)
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
                lending=loan_words(record.loans),
                last_decision=last_decision,
                phase=f"step {record.step_seconds:.2f} s, training waits {record.wait_seconds:.2f} s",
                messages=tuple(messages),
                left=fmean(self._step_seconds) * (self._steps - record.step),
            )
        )


def loan_words(loans: Mapping[str, StepLoan]) -> str:
    """A step's share of the lent devices, and the devices that are recalled, in words.

    >>> away = "4 requests/s, lent up to 3"
    >>> loan_words({"lent-0": StepLoan(2.0, 1.5, 7, ""), "lent-1": StepLoan(0.0, 0.0, 7, away)})
    'had for 75 % of the time wanted; lent-1 is recalled (4 requests/s, lent up to 3)'
    """
    if not loans:
        return ""
    wanted, lent = (sum(getattr(loan, name) for loan in loans.values()) for name in ("wanted", "lent"))
    said = [f"had for {percent(lent / wanted, 0)} of the time wanted" if wanted else "not wanted"]
    away = {name: loan.away for name, loan in loans.items() if loan.away}
    if len(away) > _NAMED:
        said.append(f"{len(away)} of {len(loans)} are recalled")
    else:
        said += [f"{name} is recalled ({why})" for name, why in away.items()]
    return "; ".join(said)
