"""Steps in which some GPUs first generate and then train, while others only generate.

Invariant: the shared GPUs generate only if this is expected to shorten the step, including both role
changes. The shared GPUs start to train as soon as no later batch of the step would have to wait.
"""

from __future__ import annotations

from dataclasses import dataclass

_MEMORY = 0.5  # weight of the previous estimate after a measured step


@dataclass(frozen=True, slots=True)
class SharedStep:
    """Rates of a step. Rates are samples per second, times are seconds."""

    samples: int  # trained in the step
    batches: int  # number of batches in which the samples are trained
    alone: float  # rate of the GPUs that only generate
    shared: float  # additional rate of the shared GPUs
    training: float
    switch: float  # from training to generating and back

    @property
    def without(self) -> float:
        """Seconds of a step in which the shared GPUs only train; infinite if no other engine generates."""
        return max(self.training, self.samples / self.alone) if self.alone > 0 else float("inf")

    @property
    def generating(self) -> float:
        """Seconds for which the shared GPUs generate, if they do: until the other engines can generate the remaining
        samples during training.
        """
        missing = self.samples - self.alone * (self.training + self.switch)
        return max(0.0, missing / (self.alone + self.shared))

    @property
    def pays(self) -> bool:
        """Whether the shared GPUs should generate."""
        return self.generating > 0 and self.generating + self.training + self.switch < self.without

    @property
    def ready(self) -> int:
        """Samples that must be ready when the shared GPUs begin to train: the first batch, and enough samples for each
        later batch to be ready in time.
        """
        later = self.samples - self.alone * self.training * (self.batches - 1) / self.batches
        return min(self.samples, max(-(-self.samples // self.batches), round(later)))


@dataclass(slots=True)
class SharedRates:
    """Estimates the rates of future steps. `ratio`: shared engines per engine that only generates, all of equal speed;
    infinite if all are shared. Role changes are assumed to take no time until one is measured, so that a first change
    is tried.
    """

    samples: int
    batches: int
    ratio: float
    _switch: float = 0.0
    _alone: float | None = None
    _training: float | None = None

    def observe(self, seconds: float, generated: int, shared: float, waited: float, switch: float) -> None:
        """Learn from a step of `seconds`. The shared GPUs generated for `shared` seconds, training then waited `waited`
        seconds, and both role changes took `switch` seconds (0 without changes). If training did not wait, engines may
        have been idle, so their rate may be higher than measured.
        """
        if switch > 0:
            self._switch = switch
        self._training = _mixed(self._training, max(0.0, seconds - shared - waited - switch))
        if self.ratio == float("inf"):
            return
        rate = generated / (seconds + self.ratio * shared) if seconds > 0 else 0.0
        if waited > 0 or shared > 0 or self._alone is None:
            self._alone = _mixed(self._alone, rate)
        else:
            self._alone = max(self._alone, rate)

    @property
    def expected(self) -> SharedStep | None:
        """Expected seconds; None: no step has been observed, or all GPUs are shared."""
        if self._alone is None or self._training is None:
            return None
        return SharedStep(
            self.samples, self.batches, self._alone, self.ratio * self._alone, self._training, self._switch
        )


def _mixed(before: float | None, now: float) -> float:
    return now if before is None else _MEMORY * before + (1 - _MEMORY) * now
