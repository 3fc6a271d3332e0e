"""Forked processes that simulate in parallel with this process.

Invariant: a forked process inherits all data that its work needs; only arguments and results are sent. No process
outlives the parent that waits for its answers, and all end with the context that made them.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Generic, TypeVar

A = TypeVar("A")
R = TypeVar("R")


class Fork(Generic[A, R]):
    """A process that calls `work` on one argument after another."""

    def __init__(self, work: Callable[[A], R]) -> None:
        context = get_context("fork")
        self.connection, its = context.Pipe()
        self._process = context.Process(target=_answer, args=(its, work), daemon=True)
        self._process.start()
        its.close()

    def ask(self, argument: A) -> None:
        self.connection.send(argument)

    def answer(self) -> R:
        """The next result. Raises the exception of the work, and RuntimeError if the process has ended."""
        try:
            result, error = self.connection.recv()
        except EOFError:
            raise RuntimeError(
                "a simulation process ended before it answered: run again with fewer --jobs, or more memory"
            ) from None
        if error is not None:
            raise error
        found: R = result
        return found

    def end(self) -> None:
        self.connection.close()
        self._process.terminate()
        self._process.join()


def _answer(connection: Connection, work: Callable[[A], R]) -> None:
    # The parent handles the interrupt, and ends this process by SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    while True:
        try:
            argument = connection.recv()
        except EOFError:
            return
        try:
            connection.send((work(argument), None))
        except (ValueError, RuntimeError) as error:
            connection.send((None, error))


@contextmanager
def mapping(work: Callable[[A], R], jobs: int) -> Iterator[Callable[[Sequence[A]], Iterator[R]]]:
    """Yield a function that maps `work` over arguments, in order: in up to `jobs` processes, forked when needed, or in
    this process with one job. Take all results of a call before the next call.
    """
    forks: list[Fork[A, R]] = []

    def mapped(arguments: Sequence[A]) -> Iterator[R]:
        if jobs <= 1:
            return map(work, arguments)
        while len(forks) < min(jobs, len(arguments)):
            forks.append(Fork(work))
        return _in_order(forks, arguments)

    try:
        yield mapped
    finally:
        for fork in forks:
            fork.end()


def _in_order(forks: Sequence[Fork[A, R]], arguments: Sequence[A]) -> Iterator[R]:
    left, free = deque(enumerate(arguments)), list(forks)
    busy: dict[Connection, tuple[int, Fork[A, R]]] = {}
    found: dict[int, R] = {}
    for place in range(len(arguments)):
        while place not in found:
            while left and free:
                (number, argument), fork = left.popleft(), free.pop()
                fork.ask(argument)
                busy[fork.connection] = number, fork
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                number, fork = busy.pop(ready)
                found[number] = fork.answer()
                free.append(fork)
        yield found.pop(place)
