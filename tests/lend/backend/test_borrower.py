"""A borrower and a serving engine on one device's page, step by step: on a clock that the test moves."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from libra.config.run import LendingRule
from libra.lend.backend.borrower import GatedBorrower
from libra.lend.backend.borrower_token import BorrowerToken
from libra.lend.backend.device_page import EngineFacts, LendingError, ServingStep
from libra.lend.backend.lender_token import LenderToken
from libra.lend.backend.record import LendingRecord
from libra.lend.backend.serving_token import ServingToken
from libra.lend.gate import IDLE, Grant, ServingView
from libra.lend.quota import KVView
from libra.lend.recall import RecallPolicy
from libra.lend.records.lending import LendingAnswer, LendingTerms, LentStep, ServedStep, read_lending, replay
from libra.lend.step_cost import RolloutQueue, StepShape
from libra.lend.traffic.envelope import Envelope

TERMS = LendingTerms(
    "chat", "policy", 0.08, 0.025, 0.002, Envelope(50.0, 4000, 6, 9000, 2.0), RecallPolicy(quiet=1.0, most_quiet=8.0)
)
CHAT = EngineFacts("chat", max_model_len=2048, max_num_seqs=64, max_num_batched_tokens=128)


class Clock:
    """A device whose time passes as the test says."""

    def __init__(self) -> None:
        self.now = 100.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def begin(self) -> None:
        pass

    def end(self) -> None:
        pass


@dataclass
class Engine:
    """Steps take 4 ms and 50 us a token, times `noise`."""

    clock: Clock
    serving: ServingToken
    noise: float = 1.0
    queue: RolloutQueue = field(default_factory=lambda: RolloutQueue(8, 0, True, 800))
    shape: StepShape = field(default_factory=lambda: StepShape(0, 0, 0))
    began: list[float] = field(default_factory=list)
    while_it_runs: list[ServingView] = field(default_factory=list)  # serving comes, says this, and wants the device

    def bounded_step(self, tokens: int) -> int:
        self.began.append(self.clock.now)
        self.clock.now += self.noise * (0.004 + 5e-5 * tokens)
        self.shape = StepShape(1, tokens - 1, 800)
        for view in self.while_it_runs:
            self.serving.publish(view, KVView(), TERMS.pace)
            self.serving.acquire()
            self.serving.note(ServingStep(4, 0, 400, 0.01))
            self.serving.release()
        return tokens


@dataclass
class Shared:
    clock: Clock
    serving: ServingToken
    lender: LenderToken
    borrower: GatedBorrower
    engine: Engine
    record: LendingRecord
    path: Path
    told: list[str]

    def learn(self, steps: int = 450) -> None:
        """Idle, until steps of both are bounded."""
        rng = random.Random(0)
        for _ in range(steps):
            sequences = rng.randint(1, 6)
            spent = rng.uniform(0.9, 1.1) * (0.002 + 1e-3 * sequences)
            self.serving.acquire()
            self.serving.publish(IDLE, KVView(), TERMS.pace)
            self.serving.note(ServingStep(sequences, rng.choice([0, 100]), 100 * sequences, spent))
            self.serving.release()
            self.engine.noise = rng.uniform(0.9, 1.1)
            self.borrower.step(self.engine)
            self.clock.now += 0.05
        self.engine.noise = 1.0
        assert self.borrower.serving_steps.bound(StepShape(1, 0, 100)) is not None

    def lines(self, kind: type) -> list:
        self.record.flush(all_of_it=True)
        return [line for line in read_lending(self.path) if isinstance(line, kind)]


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Shared]:
    clock, page, told = Clock(), tmp_path / "device", list[str]()
    serving = ServingToken(page, CHAT, clock.clock)
    lender = LenderToken(page)
    lender.extend(math.inf)
    token = BorrowerToken(page, TERMS.pace)
    record = LendingRecord(tmp_path / "lending.jsonl", TERMS, told.append)
    rule = TERMS.rule()
    borrower = GatedBorrower(
        token, rule, clock, shortest=TERMS.shortest, most_tokens=2048, recall=rule.recall, record=record
    )
    yield Shared(clock, serving, lender, borrower, Engine(clock, serving), record, tmp_path / "lending.jsonl", told)
    record.close()
    token.close()
    lender.close()
    serving.close()


def test_a_step_begins_only_where_nobody_waits_and_the_next_token_stays_in_time(shared: Shared) -> None:
    """Serving says whatever it likes, also while the borrower looks and between two steps."""
    shared.learn()
    rng, steps = random.Random(1), 0
    for _ in range(1500):
        live = 8 if rng.random() < 0.004 else rng.randint(0, 6)
        waiting = min(live, rng.choice([0, 0, 0, 1]))
        due = shared.clock.now + rng.choice([math.inf, 0.005, 0.02, 0.03, 0.05, 0.2])
        view = ServingView(live, waiting, due if live > waiting else math.inf, context=100 * live)
        shared.serving.publish(view, KVView(), TERMS.pace)
        shared.engine.noise = rng.uniform(0.5, 1.05)
        before = shared.clock.now
        made = shared.borrower.step(shared.engine)
        if made is not None:
            steps += 1
            assert not waiting and live <= TERMS.envelope.live
            longest = shared.borrower._cost.longest_step(view)
            assert shared.engine.began[-1] == before
            assert shared.clock.now <= before + TERMS.longest
            assert view.due == math.inf or shared.clock.now + longest <= view.due
        shared.clock.now += rng.choice([0.0, 0.003, 0.1])
    assert 100 < steps < 1400
    assert replay(shared.path).different == ()
    answers = shared.lines(LendingAnswer)
    assert replay(shared.path).answers == len(answers) > 1000
    assert {answer.refused for answer in answers} == {None, "due", "first token", "load"}


def test_nothing_is_borrowed_while_serving_decodes_before_its_steps_are_known(shared: Shared) -> None:
    for _ in range(300):
        shared.serving.publish(ServingView(1, 0, shared.clock.now + 60), KVView(), TERMS.pace)
        assert shared.borrower.step(shared.engine) is None
        shared.serving.note(ServingStep(1, 0, 50, 0.003))
    assert shared.borrower.tally.why == "299 of 399 steps of serving observed"


def test_serving_that_waits_for_a_grant_to_be_over_waits_for_one(shared: Shared) -> None:
    shared.learn()
    shared.serving._wants = True
    shared.serving.publish(IDLE, KVView(), TERMS.pace)
    steps = len(shared.engine.began)
    for _ in range(50):
        assert shared.borrower.step(shared.engine) is None
    assert len(shared.engine.began) == steps
    shared.serving._wants = False
    shared.serving.publish(IDLE, KVView(), TERMS.pace)
    assert shared.borrower.step(shared.engine) is not None


def test_a_grant_that_is_out_never_becomes_longer(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serving comes between the borrower's two looks, and waits from then on."""
    shared.learn()
    shared.serving.publish(IDLE, KVView(), TERMS.pace)
    token, told = shared.borrower._token, list[float]()
    take = token.try_take

    def taken_slowly(expires: float) -> bool:
        told.append(expires)
        taken = take(expires)
        shared.clock.now += 0.01
        shared.serving._wants = True
        shared.serving.publish(IDLE, KVView(), TERMS.pace)
        return taken

    monkeypatch.setattr(token, "try_take", taken_slowly)
    shared.borrower.step(shared.engine)
    assert shared.serving.expires == told[0]
    assert shared.clock.now <= told[0]


def test_a_page_that_was_left_half_written_is_waited_for(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("libra.lend.backend.device_page._PATIENCE", 0.01)
    page = shared.serving._page.bytes
    whole = page[64:72]
    page[64:72] = b"\xff" * 8
    assert shared.borrower.step(shared.engine) is None
    assert "the serving engine ended while it wrote" in shared.lender.tally.why
    page[64:72] = whole
    assert shared.borrower.step(shared.engine) is not None


def test_a_loan_does_not_outlive_the_word_of_its_lender(shared: Shared) -> None:
    shared.learn()
    shared.serving.publish(IDLE, KVView(), TERMS.pace)
    shared.lender.extend(shared.clock.now + 0.1)
    until = shared.clock.now + 0.1
    for _ in range(200):
        shared.borrower.step(shared.engine)
    assert shared.engine.began[-1] < until < shared.clock.now
    assert shared.lender.tally.why == "the lender's word is not valid"
    shared.lender.extend(shared.clock.now + 1)
    assert shared.borrower.step(shared.engine) is not None
    assert shared.lender.tally.why == ""


def test_a_serving_step_that_is_longer_than_the_pace_is_told_with_the_remedy(shared: Shared) -> None:
    rng = random.Random(0)
    for _ in range(450):
        new = rng.choice([0, 60, 120])
        shared.serving.note(ServingStep(1, new, 100, rng.uniform(0.9, 1.0) * (0.005 + 1e-3 * new)))
        shared.serving.publish(ServingView(1, 0, shared.clock.now + 60), KVView(), TERMS.pace)
        shared.borrower.step(shared.engine)
    shared.serving.publish(ServingView(1, 0, shared.clock.now + TERMS.pace), KVView(), TERMS.pace)
    assert shared.borrower.step(shared.engine) is None
    why = shared.lender.tally.why
    assert why.startswith("a serving step may take 1") and why.endswith(
        "lower the server's max_num_batched_tokens to 64"
    )
    assert shared.lender.tally.longest_step > TERMS.pace


def test_who_overstays_learns_it_and_the_loan_rests(shared: Shared) -> None:
    shared.learn()
    before = shared.borrower.tally
    shared.serving.publish(IDLE, KVView(), TERMS.pace)
    shared.engine.noise = 40.0
    shared.engine.while_it_runs = [ServingView(3, 0, math.inf, context=300)]
    assert shared.borrower.step(shared.engine) is not None
    assert shared.serving.fenced == 1
    tally = shared.borrower.tally
    assert (tally.overstayed, tally.over_bound) == (before.overstayed + 1, before.over_bound + 1)
    shared.engine.noise, shared.engine.while_it_runs = 1.0, []
    shared.serving.publish(IDLE, KVView(), TERMS.pace)
    back = shared.clock.now
    assert shared.borrower.step(shared.engine) is None
    assert shared.lender.tally.why == "a grant was overstayed"
    while shared.borrower.step(shared.engine) is None:
        pass
    # That step is now among those that bound the next: it takes another second to find that nothing fits.
    assert TERMS.recall.quiet <= shared.engine.began[-1] - back < TERMS.recall.quiet + 1.2
    assert replay(shared.path).different == ()
    assert [step.overstayed for step in shared.lines(LentStep)].count(True) == 1


def test_an_engine_that_raises_gives_the_device_back(shared: Shared) -> None:
    class Broken(Engine):
        def bounded_step(self, tokens: int) -> int:
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        shared.borrower.step(Broken(shared.clock, shared.serving))
    shared.serving.publish(ServingView(1, 1, math.inf), KVView(), TERMS.pace)
    assert shared.serving.acquire() and shared.serving.fenced == 0 and not shared.serving.lent


def test_the_record_has_the_steps_of_serving(shared: Shared) -> None:
    for margin in (0.03, math.inf):
        shared.serving.note(ServingStep(2, 0, 90, 0.01, ended=5.0, margin=margin))
    shared.borrower.step(shared.engine)
    assert shared.lines(ServedStep) == [
        ServedStep(4.99, 0.01, 2, pytest.approx(0.03)),  # type: ignore[arg-type]
        ServedStep(4.99, 0.01, 2, None),
    ]


def test_without_turns_serving_is_left_alone(shared: Shared) -> None:
    shared.engine.queue = RolloutQueue(0, 0, False, 0)
    assert shared.borrower.step(shared.engine) is None
    shared.lender.extend(math.inf)
    shared.serving.publish(ServingView(1, 0, shared.clock.now + 9), KVView(), TERMS.pace)
    assert not shared.serving.can_spare()


def test_bounds_that_let_nothing_through_are_learnt_again(shared: Shared) -> None:
    shared.learn()
    shared.engine.noise = 30.0
    shared.serving.publish(IDLE, KVView(), TERMS.pace)
    while shared.borrower.tally.why != "no step is short enough for a grant":
        shared.borrower.step(shared.engine)
    shared.engine.noise = 1.0
    made = len(shared.engine.began)
    for _ in range(1200):
        shared.borrower.step(shared.engine)
    assert len(shared.engine.began) > made + 20


FULL = """
import resource, sys
from pathlib import Path
from libra.lend.backend.record import LendingRecord
from libra.lend.quota import KVView
from libra.lend.recall import RecallPolicy
from libra.lend.records.lending import LendingTerms, LentStep, read_lending
from libra.lend.traffic.envelope import Envelope

path = Path(sys.argv[1])
terms = LendingTerms("chat", "policy", 0.08, 0.025, 0.002, Envelope(1, 1, 1, 1, 1.0), RecallPolicy(1.0, 8.0))
record = LendingRecord(path, terms, lambda line: print("told:", line))
resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20_000, resource.RLIM_INFINITY))
for number in range(1000):
    record.append(LentStep(float(number), 0.01, 0.02, 3, False))
    record.flush()
record.close()
print(len(list(read_lending(path))))
"""


def test_a_record_is_of_one_borrower_at_a_time_and_goes_on_with_the_next(tmp_path: Path) -> None:
    path = tmp_path / "lending.jsonl"
    first = LendingRecord(path, TERMS, print)
    with pytest.raises(LendingError, match="is written for another loan; name another file"):
        LendingRecord(path, TERMS, print)
    first.close()
    with path.open("a") as file:
        file.write("cut o")
    LendingRecord(path, TERMS, print).close()
    assert list(read_lending(path)) == [TERMS, TERMS]


@pytest.mark.parametrize("text", ["no newline", '{"kind":"step"}\n', "{}\n{", "\n\n", "x" * 100_000 + "\n"])
def test_a_file_that_is_no_record_is_left_as_it_is(tmp_path: Path, text: str) -> None:
    path = tmp_path / "notes"
    path.write_text(text)
    with pytest.raises(
        LendingError, match=r"record: .*notes exists and is not the record of a loan; name another file"
    ):
        LendingRecord(path, TERMS, print)
    assert path.read_text() == text


def test_a_full_disk_ends_the_record_and_is_told_once(tmp_path: Path) -> None:
    made = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path / "lending.jsonl")], capture_output=True, text=True, timeout=60
    )
    told, lines = made.stdout.splitlines()
    assert told.endswith("lending continues without a record")
    assert f"told: {tmp_path / 'lending.jsonl'} cannot be written" in told
    assert 64 < int(lines) < 400


def test_who_has_nothing_to_compute_still_hears_that_a_loan_came_back(shared: Shared) -> None:
    """Outside its envelope a loan is recalled, and its turns go elsewhere: nobody steps any more."""
    shared.learn()
    crowd = ServingView(live=7, waiting=0, due=math.inf)  # one more than the envelope has
    shared.serving.publish(crowd, KVView(), TERMS.pace)
    assert shared.borrower.step(shared.engine) is None
    assert shared.borrower.tally.why == "7 requests, lent up to 6"
    shared.serving.publish(IDLE, KVView(), TERMS.pace)
    shared.borrower.watch()
    assert shared.borrower.tally.why  # it was calm for less than the quiet time
    for _ in range(40):
        shared.clock.now += 0.1
        shared.lender.extend(shared.clock.now + 1.0)
        shared.serving.publish(IDLE, KVView(), TERMS.pace)
        shared.borrower.watch()
    assert shared.borrower.tally.why == "" and shared.engine.began
    shared.lender.extend(0.0)
    shared.borrower.watch()
    assert shared.borrower.tally.why == "the lender's word is not valid"
    assert [step.at for step in shared.lines(LentStep)] == shared.engine.began  # to watch is no step
    assert replay(shared.path).different == ()


@pytest.mark.parametrize(
    ("sharing", "live", "granted"),
    [
        ("gate", 0, True),
        ("serve-first", 0, True),
        ("serve-first", 1, False),
        ("naive", 1, False),
        ("published", 0, True),
        ("off", 0, False),
    ],
)
def test_terms_name_the_rule(sharing: LendingRule, live: int, granted: bool) -> None:
    class OneSecond:
        def longest_step(self, view: ServingView) -> float:
            return 1.0

        def catch_up(self, view: ServingView) -> float:
            return 1.0

    rule = replace(TERMS, sharing=sharing, ttft=0.5).rule()
    view = ServingView(live, 0, 100.5 if live else math.inf)
    assert isinstance(rule.decide(view, 100.0, OneSecond()), Grant) == granted


def test_a_fixed_split_gives_each_side_half_of_every_second() -> None:
    rule, granted = replace(TERMS, sharing="fixed").rule(), 0.0
    now = 7.0
    while now < 8.0:
        answer = rule.decide(ServingView(3, 3, math.inf), now, None)  # type: ignore[arg-type]
        length = answer.length if isinstance(answer, Grant) else 0.0
        granted += length
        now += length or 0.001
    assert granted == pytest.approx(0.5)


def test_work_that_is_no_step_has_the_device_a_grant_at_a_time(shared: Shared) -> None:
    shared.learn()
    ends = []
    for _ in shared.borrower.in_turns(iter(range(5)), patience=1.0):
        ends.append(shared.serving.expires)
        assert ends[-1] > shared.clock.now
        shared.clock.now += 0.01
    assert ends[0] == ends[1] == ends[2] < ends[3] == ends[4] <= ends[0] + 2 * TERMS.longest
    assert shared.serving.acquire()  # nobody has it
    shared.serving.release()


def test_serving_goes_ahead_of_work_that_overstays_and_lending_goes_on(shared: Shared) -> None:
    shared.learn()
    for _ in shared.borrower.in_turns(iter([0]), patience=1.0):
        shared.clock.now += 1.0
        assert shared.serving.acquire() and shared.serving.fenced == 1
        shared.serving.publish(IDLE, KVView(), TERMS.pace)
        shared.serving.release()
    assert shared.borrower.step(shared.engine) is not None


def test_work_that_no_grant_comes_for_is_done_beside_serving(shared: Shared) -> None:
    shared.learn()
    shared.serving.publish(ServingView(1, 1, math.inf, queued=10), KVView(), TERMS.pace)  # somebody waits
    began, done = shared.clock.now, 0
    for _ in shared.borrower.in_turns(iter(range(3)), patience=0.5):
        done += 1
        assert shared.serving.acquire()  # it is not held up
        shared.serving.release()
    assert done == 3
    assert 0.5 <= shared.clock.now - began < 0.51
