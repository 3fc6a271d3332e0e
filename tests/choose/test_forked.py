"""Forked processes: results in order, errors of the work, and an end that does not wait for the work."""

from __future__ import annotations

import os
import signal
from multiprocessing import active_children

import pytest

from libra.choose.forked import Fork, mapping


@pytest.mark.parametrize("jobs", [1, 2, 5])
def test_results_come_in_the_order_of_the_arguments(jobs: int) -> None:
    with mapping(lambda it: it * it, jobs) as squares:
        assert list(squares(range(7))) == [0, 1, 4, 9, 16, 25, 36]
        assert list(squares([3])) == [9]
        assert len(active_children()) == (0 if jobs == 1 else jobs)
    assert active_children() == []


def test_an_interruption_waits_for_no_work() -> None:
    with pytest.raises(KeyboardInterrupt), mapping(lambda last: signal.pause() if last else os.getpid(), 2) as work:
        results = work([False, True, True])
        assert next(results) != os.getpid()
        raise KeyboardInterrupt
    assert active_children() == []


def test_an_interruption_of_all_processes_reaches_the_one_that_waits() -> None:
    """As Ctrl-C is sent to each process of a terminal."""

    def interrupt(_: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getppid(), signal.SIGINT)
        signal.pause()

    with pytest.raises(KeyboardInterrupt), mapping(interrupt, 2) as work:
        list(work([0]))
    assert active_children() == []


def test_an_error_of_the_work_is_raised_where_its_result_is_taken() -> None:
    with pytest.raises(ValueError, match="invalid literal"), mapping(int, 2) as work:
        list(work(["1", "one"]))


def test_a_process_that_dies_is_told() -> None:
    fork = Fork[int, None](os._exit)
    fork.ask(1)
    with pytest.raises(RuntimeError, match="ended before it answered"):
        fork.answer()
    fork.end()
