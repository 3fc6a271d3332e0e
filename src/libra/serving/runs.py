"""Simulations of one candidate on the draws of a record, and on the record itself.

Invariant: a run depends only on the question, the candidate, the draw and the rate; no run is made twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import ceil

from libra.serving.candidate import ServingCandidate
from libra.serving.draws import draws
from libra.serving.ladder import repeated, sustained_arrivals
from libra.serving.question import SizingQuestion
from libra.serving.trial import Trial, trial
from libra.serving.verdict import Rival, SlowerError
from libra.sim.workload.requests import RecordedRequest

RECORD = "the record"
_BRIEFLY = 16  # duration of the arrivals in a short run, in multiples of the shortest allowed wait
_FEWEST = 50  # least requests of a short run


class Runs:
    """Simulations of one candidate on the draws of the record, the hardest first, and on the record."""

    def __init__(self, question: SizingQuestion, candidate: ServingCandidate) -> None:
        self.question, self.candidate, self.made = question, candidate, 0
        self._records = {it.name: it.requests for it in draws(question.requests)} | {RECORD: question.requests}
        self.names = tuple(self._records)
        self._lasting: dict[tuple[str, float, bool], Trial] = {}

    @property
    def drawn(self) -> tuple[str, ...]:
        """The names of the draws, or of the record if the question has no draws."""
        return self.names[:-1] or self.names

    def brief(self, name: str, rate: float) -> Trial:
        """A trial of few requests, whose result is only a hint."""
        record = _repeated(self._records[name], sustained_arrivals(self.question, rate))
        return self._trial(record[: max(_FEWEST, ceil(_BRIEFLY * rate * self.question.shortest_wait))], rate)

    def lasting(self, name: str, rate: float, *, to_the_end: bool = False, rivals: Sequence[Rival] = ()) -> Trial:
        """A trial that is long enough to show a lasting rate. If the question gives a rate, the requests run once.
        Raises `SlowerError` if the candidate is no faster than a rival."""
        key = name, rate, to_the_end
        if key not in self._lasting:
            least = 1 if self.question.rate is not None else sustained_arrivals(self.question, rate)
            one = self._trial(_repeated(self._records[name], least), rate, to_the_end, rivals)
            if one.slower is not None:
                raise SlowerError(one.slower)
            self._lasting[key] = one
        return self._lasting[key]

    def _trial(
        self,
        requests: tuple[RecordedRequest, ...],
        rate: float,
        to_the_end: bool = False,
        rivals: Sequence[Rival] = (),
    ) -> Trial:
        self.made += 1
        return trial(self.question, self.candidate, rate, requests=requests, to_the_end=to_the_end, rivals=rivals)


def _repeated(requests: tuple[RecordedRequest, ...], least: int) -> tuple[RecordedRequest, ...]:
    return _times(requests, max(1, -(-least // len(requests))))


@lru_cache(maxsize=16)
def _times(requests: tuple[RecordedRequest, ...], times: int) -> tuple[RecordedRequest, ...]:
    """The requests repeated `times` times. Cached, since all candidates need the same repetitions."""
    return repeated(requests, times * len(requests))
