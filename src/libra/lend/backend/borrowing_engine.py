"""A rollout engine on a lent device, driven by its worker.

Invariant: the engine computes on the device only within a grant, and only in the KV blocks that it has at that moment.
No other process borrows the device from before the engine is made until its process ends.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from libra.backends.transport.engine_messages import DeviceLoan, Generate, LoanState
from libra.lend.backend.borrower import GatedBorrower
from libra.lend.backend.borrower_token import BorrowerToken
from libra.lend.backend.device import device_here
from libra.lend.backend.kv_loan import BorrowedKV
from libra.lend.backend.record import LendingRecord
from libra.lend.backend.scheduler import BorrowingScheduler
from libra.lend.backend.terms import terms_of
from libra.lend.recall import WatchedRule
from libra.lend.records.lending import QuotaChange
from libra.lend.step_cost import RolloutQueue, StepShape

if TYPE_CHECKING:
    from libra.backends.vllm.engine import VllmEngine
    from libra.backends.vllm.report import Sampled

_LOOK = 0.02  # seconds between two looks at serving's needs, for an engine that has memory and no turns
_NO_MEMORY = 0.001  # the same, for an engine that has turns and no memory
_PATIENCE = 1.0  # seconds without a grant after which the engine counts as away


class SteppedVllm:
    """A vLLM engine with a `BorrowingScheduler`, as a borrower steps it."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine, self._scheduler = engine, engine.scheduler

    @property
    def queue(self) -> RolloutQueue:
        queue: RolloutQueue = self._scheduler.queue
        return queue

    @property
    def shape(self) -> StepShape:
        shape: StepShape = self._scheduler.shape
        return shape

    @property
    def most_tokens(self) -> int:
        """Most tokens that one step can compute."""
        return self._engine.most_tokens

    def bounded_step(self, tokens: int) -> list[Sampled]:
        self._scheduler.max_num_scheduled_tokens = tokens  # vLLM reads this attribute at every step
        return self._engine.step()


class BorrowingEngine:
    """The loan of one rollout engine. Create this object first, then the engine, and then pass the engine to `lend`."""

    scheduler = BorrowingScheduler

    def __init__(self, loan: DeviceLoan) -> None:
        """Raises LendingError if the device cannot be borrowed, DiskError if the record cannot be written."""
        terms = self._terms = terms_of(loan)
        self._token = BorrowerToken(Path(loan.device), terms.pace)
        self._record = None if loan.record is None else LendingRecord(Path(loan.record), terms, _tell)
        self._loan = loan
        self._memory: BorrowedKV | None = None  # None: all of the engine's KV memory is its own
        self._wanted = 0.0  # seconds in which the engine had turns and the device was not recalled
        self._since: float | None = None  # time up to which `_wanted` is counted; None: the engine had no turns
        self._granted = 0.0  # time of the last granted step, or at which the engine last had no turns
        self._told = ""  # the last reported value of `away`

    def lend(self, engine: VllmEngine) -> None:
        """Begin to lend to `engine`. Its first steps, which include one-time set-up, are made here."""
        terms = self._terms
        rule = terms.rule()
        self._recall = rule.recall if isinstance(rule, WatchedRule) else None
        self._engine, self._steps, self._device = engine, SteppedVllm(engine), device_here(self._loan.share)
        self._borrower = GatedBorrower(
            self._token,
            rule,
            self._device,
            shortest=terms.shortest,
            most_tokens=self._steps.most_tokens,
            recall=self._recall,
            record=self._record,
        )
        engine.in_turns = partial(self._borrower.in_turns, patience=_PATIENCE)
        engine.add(Generate("warm-up", [4 + index % 16 for index in range(16)], 4, 1.0, -1, 0, salt="warm-up"))
        for _ in self._borrower.in_turns(iter(lambda: engine.busy, False), _PATIENCE):
            engine.step()
        beside = self._loan.kv_beside
        if beside is not None:
            engine.forget()
            self._memory = BorrowedKV(
                engine.scheduler,
                self._token,
                context=engine.scheduler.max_model_len,
                quiet=terms.recall.quiet,
                beside=beside,
            )

    def settle(self) -> list[str]:
        """Between two steps, return memory or take free memory. Returns the turns that had to be stopped."""
        memory, engine = self._memory, self._engine
        if memory is None:
            return []
        held, turns = memory.held, [engine.put_out(request) for request in memory.in_the_way(time.monotonic())]
        memory.settle()
        if memory.held != held and self._record is not None:
            self._record.append(QuotaChange(self._device.clock(), memory.held, len(turns)))
        return turns

    def step(self) -> list[Sampled] | None:
        """Make one step if there is a grant; otherwise return None after a moment."""
        began = self._device.clock()
        sampled = self._granted_step()
        now = self._device.clock()
        if sampled is not None:
            self._granted = now
        if not self.away:
            self._wanted += now - (began if self._since is None else self._since)
        self._since = now
        return sampled

    def _granted_step(self) -> list[Sampled] | None:
        if self._memory is not None and not self._memory.own:
            self._borrower.rest()
            time.sleep(_NO_MEMORY)
            return None
        return self._borrower.step(self._steps)

    def rest(self) -> float | None:
        """Record that there are no turns. Returns the seconds after which to call `settle`: to return memory, to check
        whether lending has resumed, or to read the times of serving's steps. None: no such call is needed.
        """
        self._since = None
        if self.away:
            self._borrower.watch()
            return _LOOK
        self._granted = self._device.clock()
        self._borrower.rest()
        return _LOOK if self._borrower.learning or (self._memory is not None and self._memory.own) else None

    @property
    def away(self) -> str:
        """Reason why nothing has been lent for longer than a few serving steps; otherwise empty."""
        if self._recall is not None and self._recall.recalled is not None:
            return self._recall.recalled
        return self._borrower.tally.why if self._device.clock() - self._granted > _PATIENCE else ""

    @property
    def changed(self) -> bool:
        """Whether the device was recalled, or lent again, since its state was last reported."""
        return bool(self.away) != bool(self._told)

    def state(self) -> LoanState:
        """The state of the loan, for a report."""
        self._told, tally = self.away, self._borrower.tally
        return LoanState(self._told, self._wanted, tally.lent, tally.grants, tally.overstayed)

    def trained(self) -> None:
        """Record that the weights of another training step have arrived."""
        if self._memory is not None:
            self._memory.trained()


def _tell(line: str) -> None:
    print(f"libra: {line}", file=sys.stderr, flush=True)
