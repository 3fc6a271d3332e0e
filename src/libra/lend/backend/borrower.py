"""Steps of a rollout engine on a device that serves: one per grant, no longer than the grant.

Invariant: a step begins only with the token, within the lender's word, and with a grant of the gate for serving's
current notice. A step computes only as many tokens as fit the grant. A borrower that exceeded a grant learns this
before the next step, and the loan pauses for a quiet time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol, TypeVar

from libra.lend.backend.borrower_token import BorrowerToken, FencedError
from libra.lend.backend.device import LentDevice
from libra.lend.backend.device_page import POLL, BorrowerTally, LendingError, ServingNotice
from libra.lend.backend.record import LendingRecord
from libra.lend.gate import Grant, Reason, Refusal, SharingRule
from libra.lend.recall import Recall
from libra.lend.records.lending import LendingAnswer, LentStep, ServedStep
from libra.lend.step_cost import LearntServingCost, RolloutQueue, StepCost, StepShape, TokenBudget

_REST = 0.001  # seconds between two looks at a device that is not free until serving has made a step
_STUCK = 1.0  # seconds without a step that fits into a grant, before the times of steps are forgotten
_RECALLED = 0.02  # seconds until the next question after a recall, from which lending resumes by time alone

_NO_WORD = "the lender's word is not valid"
_WHY: dict[Reason, str] = {
    "first token": "a request waits for its first token",
    "due": "the next token is due",
    "load": "the load is outside its envelope",
    "owner": "nothing is lent",
}

Made_co = TypeVar("Made_co", covariant=True)
Made = TypeVar("Made")


class SteppedEngine(Protocol[Made_co]):
    """The engine that borrows."""

    @property
    def queue(self) -> RolloutQueue:
        """Turns that the next step could compute."""
        ...

    @property
    def shape(self) -> StepShape:
        """Work of the last step."""
        ...

    def bounded_step(self, tokens: int) -> Made_co:
        """Make one step of at most `tokens` tokens."""
        ...


class GatedBorrower:
    """Runs one engine's steps within the grants of its device."""

    def __init__(
        self,
        token: BorrowerToken,
        rule: SharingRule,
        device: LentDevice,
        *,
        shortest: float,
        most_tokens: int,
        recall: Recall | None = None,
        record: LendingRecord | None = None,
        missed: float = 0.0025,
    ) -> None:
        """Create a borrower. `shortest` is the gate's shortest grant, and `most_tokens` the engine's
        `max_num_batched_tokens`. `recall` ends the loan when the load leaves the rule's envelope, and resumes it
        after a quiet time; None for rules that do not recall the device. `missed` is the share of steps that may exceed
        their bound.
        """
        facts = token.about()
        self._token, self._rule, self._recall, self._device = token, rule, recall, device
        self._shortest, self._record = shortest, record
        self.serving_steps, self.own_steps = StepCost(missed), StepCost(missed)
        self._cost = LearntServingCost(self.serving_steps, facts.max_num_batched_tokens, facts.max_model_len)
        self._budget = TokenBudget(self.own_steps, most_tokens)
        self.tally = BorrowerTally()
        self._breach: str | None = None  # this borrower's own breach, which the rule does not know yet
        self._refused_at: float | None = None  # time of the notice that led to a refusal; None: the last was granted
        self._ask_again = math.inf
        self._stuck_since = math.inf  # time since when no step has fitted into a grant

    def step(self, engine: SteppedEngine[Made]) -> Made | None:
        """Make one step if there is a grant; otherwise return None after a moment."""
        clock, token, queue = self._device.clock, self._token, engine.queue
        if not queue.turns:
            self.rest()
            return None
        asked = self._asked()
        if asked is None:
            return None
        notice, grant = asked
        tokens = self._budget.within(grant.length, queue)
        if not tokens:
            token.wish(0.0)
            self._nothing_fits()
            return None
        self._stuck_since = math.inf
        expires = self._take(notice, grant)
        if expires is None:
            return None
        made, overstayed = None, False
        try:
            began = clock()
            tokens = min(tokens, self._budget.within(expires - began, queue))
            if not tokens or token.lease <= began:
                return None
            self._device.begin()
            made = engine.bounded_step(tokens)
            self._device.end()
            spent = clock() - began
        finally:
            overstayed = self._let_go()
            if overstayed:
                self._breach = "a grant was overstayed"
        self._account(LentStep(began, spent, self._budget.bound(tokens, queue), tokens, overstayed), engine.shape)
        return made

    def in_turns(self, pieces: Iterator[Made], patience: float) -> Iterator[Made]:
        """Yield pieces of work other than steps, such as loading weights, each while a grant holds the device.

        After `patience` seconds in total without a grant, the remaining pieces run without grants. The duration of a
        piece cannot be chosen, so exceeding a grant is no breach here; serving never waits longer than a grant.
        """
        clock, expires = self._device.clock, -math.inf
        held = False
        try:
            for piece in pieces:
                if held and clock() >= expires:
                    held = self._end_turn()
                while not held and patience > 0:
                    began = clock()
                    asked = self._asked()
                    taken = None if asked is None else self._take(*asked)
                    patience -= clock() - began
                    if taken is not None:
                        held, expires = True, taken
                        self._device.begin()
                yield piece
        finally:
            if held:
                self._end_turn()
            self._token.wish(0.0)

    def _end_turn(self) -> bool:
        """Release the device. Always returns False, for the caller's `held`."""
        self._device.end()
        self._let_go()
        return False

    def watch(self) -> None:
        """Request a grant without work: only a request shows whether lending has resumed."""
        if self._token.lease <= self._device.clock():
            self._say(_NO_WORD)
            return
        self._learn()
        try:
            self._ask(self._token.look())
        except LendingError as error:
            self._say(str(error))
        self._token.wish(0.0)

    @property
    def learning(self) -> bool:
        """Whether more steps of serving must be observed before lending while requests are live."""
        return self.serving_steps.seen < self.serving_steps.needed

    def rest(self) -> None:
        """Record that the engine has no work, so that serving leaves no time for it."""
        self._token.wish(0.0)
        self._learn()
        self._say("")
        if self._record is not None:
            self._record.flush(all_of_it=True)

    def _learn(self) -> None:
        for seen in self._token.steps():
            self.serving_steps.observe(StepShape(seen.sequences, seen.new_tokens, seen.context), seen.seconds)
            if self._record is not None:
                margin = None if seen.margin == math.inf else seen.margin
                self._record.append(ServedStep(seen.ended - seen.seconds, seen.seconds, seen.sequences, margin))

    def _asked(self) -> tuple[ServingNotice, Grant] | None:
        """Request a grant. Returns serving's notice and the grant; None, after a moment, if nothing is granted."""
        if self._token.lease <= self._device.clock():
            self._wait(_NO_WORD)
            return None
        self._learn()
        try:
            notice = self._token.look()
        except LendingError as error:
            self._wait(str(error))
            return None
        if notice.wants:  # serving waits for the device, and decides before the next grant
            self._device.sleep(POLL)
            return None
        if notice.at == self._refused_at and self._device.clock() < self._ask_again:
            self._wait(self.tally.why)
            return None
        grant = self._ask(notice)
        if grant is None:
            self._wait(self.tally.why)
            return None
        return notice, grant

    def _take(self, notice: ServingNotice, grant: Grant) -> float | None:
        """Take the device; returns the end of the grant, or None if the device is no longer free."""
        token = self._token
        if not token.try_take(grant.expires):
            self._device.sleep(POLL)
            return None
        try:
            again = token.look()
            if again.at == notice.at:
                return grant.expires
            changed = self._ask(again)  # a request has arrived
        except LendingError:
            self._let_go()
            raise
        if changed is None:
            self._let_go()
            return None
        # Serving may have read the earlier end and may already be waiting for it, so the end never moves later.
        expires = min(grant.expires, changed.expires)
        token.shorten(expires)
        return expires

    def _let_go(self) -> bool:
        """Release the device; returns whether serving continued without waiting for the release."""
        try:
            self._token.release()
        except FencedError:
            return True
        return False

    def _ask(self, notice: ServingNotice) -> Grant | None:
        now, (breach, self._breach) = self._device.clock(), (self._breach, None)
        if breach is not None and self._recall is not None:
            self._recall.observe(breach, now)
        answer = self._rule.decide(notice.view, now, self._cost)
        longest = self._cost.longest_step(notice.view)
        if self._record is not None:
            self._record.append(LendingAnswer.of(notice.view, now, longest, answer, breach))
        self.tally = self.tally._replace(longest_step=0.0 if longest == math.inf else longest)
        recalled = isinstance(answer, Refusal) and answer.reason in ("load", "owner")
        # A refusal because of a due token lasts until serving's next notice; a recall ends by time alone.
        self._token.wish(0.0 if recalled or longest == math.inf else longest + self._shortest)
        if isinstance(answer, Grant):
            self._refused_at = None
            self._say("")
            return answer
        self._refused_at, self._ask_again = notice.at, now + _RECALLED if recalled else math.inf
        self._say(self._why(answer, longest, notice))
        return None

    def _why(self, refusal: Refusal, longest: float, notice: ServingNotice) -> str:
        """Reason why nothing is lent, with a remedy if there is one."""
        if refusal.reason == "load" and self._recall is not None and self._recall.recalled is not None:
            return self._recall.recalled
        if refusal.reason != "due":
            return _WHY[refusal.reason]
        if longest == math.inf:
            return f"{self.serving_steps.seen} of {self.serving_steps.needed} steps of serving observed"
        if longest <= notice.pace:
            return _WHY["due"]
        fits = self._cost.budget_within(notice.pace, notice.view)
        remedy = f"lower the server's max_num_batched_tokens to {fits}" if fits else "serve fewer requests at a time"
        return f"a serving step may take {1e3 * longest:.0f} ms, the pace is {1e3 * notice.pace:.0f} ms: {remedy}"

    def _nothing_fits(self) -> None:
        now = self._device.clock()
        self._stuck_since = min(self._stuck_since, now)
        if now - self._stuck_since > _STUCK:
            self._budget.start_anew()
            self._stuck_since = math.inf
        self._wait("no step is short enough for a grant")

    def _wait(self, why: str) -> None:
        self._say(why)
        if self._record is not None:
            self._record.flush()
        self._device.sleep(_REST)

    def _say(self, why: str) -> None:
        if why != self.tally.why:
            self.tally = self.tally._replace(why=why)
            self._token.tell(self.tally)

    def _account(self, step: LentStep, shape: StepShape) -> None:
        tally = self.tally
        if shape.sequences:
            self._budget.observe(shape, step.seconds)
        if self._record is not None:
            self._record.append(step)
        self.tally = tally._replace(
            grants=tally.grants + 1,
            overstayed=tally.overstayed + step.overstayed,
            over_bound=tally.over_bound + (step.seconds > step.bound > 0),
            tokens=tally.tokens + shape.sequences + shape.new_tokens,
            unrecorded=0 if self._record is None else self._record.lost,
            lent=tally.lent + step.seconds,
            why="",
        )
        self._token.tell(self.tally)
