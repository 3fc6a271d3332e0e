"""What the soak finds wrong with loans, from made records."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.soak.faults import Kind
from benchmarks.soak.lenders import Served
from benchmarks.soak.loans import (
    ALONE,
    FAULT,
    LENDING,
    OTHERS,
    Slo,
    Window,
    _in_service,
    _outlived,
    against_the_gate,
    whose,
)
from benchmarks.soak.storm import Struck
from benchmarks.soak.survival import Seen

TERMS = {"kind": "terms", "longest": 0.04}


def answer(at: float, granted: float | None, due: float | None = None, waiting: int = 0, live: int = 2) -> dict:
    return {
        "kind": "answer",
        "at": at,
        "granted": granted,
        "waiting": waiting,
        "live": live,
        "due": due,
        "longest_step": 0.05,
    }


def step(at: float, seconds: float = 0.02) -> dict:
    return {"kind": "step", "at": at, "seconds": seconds, "overstayed": False}


@pytest.mark.parametrize(
    ("rows", "wrong"),
    [
        ([answer(1.0, 0.04, due=1.1), step(1.001), answer(2.0, None), answer(3.0, 0.02, live=0), step(3.01)], []),
        ([answer(1.0, 0.04, waiting=1)], ["granted while 1 wait"]),
        ([answer(1.0, 0.04, due=1.08)], ["a token would be late"]),
        ([answer(1.0, 0.08, live=0)], ["granted 0.08 s"]),
        ([answer(1.0, None), step(1.01)], ["a step without a grant"]),
        ([answer(1.0, 0.04, live=0), step(1.001), step(1.01)], ["a step without a grant"]),
        ([answer(1.0, 0.04, live=0), step(1.05)], ["a step that begins outside its grant"]),
        ([answer(1.0, 0.04, live=0), TERMS, step(1.01)], ["a step without a grant"]),  # of a borrower before
    ],
)
def test_steps_that_no_answer_allows(rows: list[dict], wrong: list[str]) -> None:
    found = list(against_the_gate([TERMS, *rows]))
    assert [it.partition(": ")[2] for it in found] == wrong


def struck(kind: Kind, time: float, worker: str = "", seconds: float = 0.0) -> Struck:
    return Struck(time, 1, kind, worker, 7, seconds)


def request(ttft: float, tpot: float, waited: float = 0.0) -> Served:
    """Of 11 tokens, come at 100."""
    return Served(1, 0, 100.0, 100.0 + ttft, 100.0 + ttft + 10 * tpot, ttft, tpot, 11, waited)


@pytest.mark.parametrize(
    ("served", "lent", "faults", "why"),
    [
        (request(0.4, 0.1), [], [], None),
        (request(0.6, 0.1), [], [], ALONE),
        (request(0.6, 0.1), [step(100.1, 0.2)], [], LENDING),
        (request(0.6, 0.1), [step(99.7, 0.35)], [], ALONE),  # 50 ms of it were in its life
        (request(0.1, 0.2), [step(100.5, 0.3), step(101.0, 0.3)], [], LENDING),
        (request(0.1, 0.2), [step(100.5, 0.3)], [], ALONE),
        (request(0.6, 0.1, waited=0.15), [step(100.1, 0.2)], [], OTHERS),
        (request(0.6, 0.1), [step(100.1, 0.2)], [struck(Kind.STOP_BORROWER, 99.0, "lent-0", 1.0)], FAULT),
        (request(0.6, 0.1), [step(100.1, 0.2)], [struck(Kind.STOP_BORROWER, 99.0, "lent-1", 1.0)], LENDING),
        (request(0.6, 0.1), [step(100.1, 0.2)], [struck(Kind.STOP_BORROWER, 90.0, "lent-0", 1.0)], LENDING),
        (request(0.6, 0.1), [step(100.1, 0.2)], [struck(Kind.HOG, 99.0, seconds=3.0)], FAULT),
    ],
)
def test_whose_fault_a_miss_is(served: Served, lent: list[dict], faults: list[Struck], why: str | None) -> None:
    assert whose(served, lent, Slo(0.5, 0.15), faults) == why


def test_steps_after_the_end_of_the_lender() -> None:
    killed = struck(Kind.KILL_SERVER, 50.0, "server-1")
    assert list(_outlived([[step(60.0)], [step(51.9), step(95.0)]], {killed: 90.0})) == []
    [wrong] = _outlived([[], [step(52.5), step(60.0)]], {killed: 90.0})
    assert wrong == "session 1: 2.5 s after server-1 was killed"


def seen(time: float, kind: str, **row: Any) -> Seen:
    return Seen(time, 1, {"kind": kind, "worker": "lent-0", **row})


@pytest.mark.parametrize(
    ("faults", "spans"),
    [
        ([], [(20.0, 65.0), (65.0, 110.0)]),
        ([struck(Kind.KILL_SERVER, 80.0, "server-0")], [(20.0, 65.0)]),
        ([struck(Kind.STOP_BORROWER, 30.0, "lent-0", 2.0)], [(32.0, 77.0)]),
        ([struck(Kind.STOP_BORROWER, 30.0, "lent-1", 2.0)], [(20.0, 65.0), (65.0, 110.0)]),
        ([struck(Kind.FULL_DISK, 21.0, "lent-0")], []),
    ],
)
def test_when_an_engine_on_a_lent_device_is_to_borrow_it(
    faults: list[Struck], spans: list[tuple[float, float]]
) -> None:
    rollout, idle = {"after": {"role": "rollout"}}, {"after": {"role": "idle"}}
    steps = [seen(19.0, "step"), seen(70.0, "step")]
    journal = [
        *steps,
        seen(10.0, "intend", **rollout),
        seen(20.0, "done"),
        seen(112.0, "intend", **idle),
        seen(113.0, "done"),
    ]
    found = [(it.begin, it.end) for _, it in _in_service(1, faults, journal, {1: Window(1, 0.0, 300.0)})]
    assert found == spans
