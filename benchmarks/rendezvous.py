"""Time to form the gradient exchange of replicas: Libra's store with a secret, next to torch's own store.

Invariant: both stores form the same groups in the same processes, in turn, so that other work on the machine slows
both alike. A group's time is that of its slowest replica, from a barrier on.

    python -m benchmarks.rendezvous [--quick] [--json FILE]
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from statistics import median
from typing import Any

from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore

from benchmarks.command import command_line, processor_seconds, quiet_machine, show
from benchmarks.rows import Row, at_most
from libra.backends.grpo.rendezvous import RendezvousServer, RendezvousStore

HOST, SECRET, PATIENCE = "127.0.0.1", "a secret of this benchmark", timedelta(seconds=30)
OWN, TORCH = "Libra's store", "torch's store"
STORES = (OWN, TORCH)
SLOWER = 1.05  # goal: the time over that with torch's store

Makers = dict[str, Callable[[str], Store]]  # a client with that prefix, by store


def replica(rank: int, size: int, rounds: int, start: Barrier, sent: Queue[Any], ports: Queue[Any]) -> None:
    """Form `rounds` groups with each store; send round, store, and seconds by clock and of CPU of each."""
    makers = _makers(rank, size, ports)
    for number in range(-1, rounds):  # the first round warms up
        for name in STORES[:: 1 if number % 2 else -1]:
            start.wait()
            began, used = time.perf_counter(), processor_seconds()
            group = _form(makers[name](f"{number}/"), rank, size)
            sent.put((number, name, time.perf_counter() - began, processor_seconds() - used))
            start.wait()  # no replica leaves before all have met
            del group


def _makers(rank: int, size: int, ports: Queue[Any]) -> Makers:
    """Rank 0 serves both stores, as the core trainer does."""
    if rank == 0:
        own = RendezvousServer(HOST, 0, SECRET)
        served = TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)
        for _ in range(size - 1):
            ports.put((own.port, served.port))
    own_port, torch_port = (own.port, served.port) if rank == 0 else ports.get()

    def torch_store(prefix: str) -> Store:
        client = served if rank == 0 else TCPStore(HOST, torch_port, is_master=False, timeout=PATIENCE)
        return PrefixStore(prefix, client)

    return {OWN: lambda prefix: RendezvousStore(HOST, own_port, SECRET, prefix, PATIENCE), TORCH: torch_store}


def _form(store: Store, rank: int, size: int) -> ProcessGroupGloo:
    options = ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_device(hostname=HOST)]
    return ProcessGroupGloo(store, rank, size, options)


def compared(size: int, rounds: int) -> Iterator[Row]:
    """Compare both stores with `size` replicas over `rounds` groups."""
    context = get_context("spawn")
    start, sent, ports = context.Barrier(size), context.Queue(), context.Queue()
    replicas = [context.Process(target=replica, args=(rank, size, rounds, start, sent, ports)) for rank in range(size)]
    for process in replicas:
        process.start()
    clocks: dict[tuple[str, int], list[float]] = {}
    used: dict[tuple[str, int], list[float]] = {}
    for number, name, clock, cpu in (sent.get(timeout=120) for _ in range(size * len(STORES) * (rounds + 1))):
        if number >= 0:
            clocks.setdefault((name, number), []).append(clock)
            used.setdefault((name, number), []).append(cpu)
    for process in replicas:
        process.join()
    for metric, summed, found in (("seconds of the slowest replica", max, clocks), ("CPU of all replicas", sum, used)):
        own, torch = ([1e3 * summed(found[name, number]) for number in range(rounds)] for name in STORES)
        case = f"{size} replicas, {rounds} groups each"
        yield Row(case, f"{TORCH}: {metric}, median", median(torch), "ms")
        yield Row(case, f"{OWN}: {metric}, median", median(own), "ms")
        ratio = median(mine / other for mine, other in zip(own, torch, strict=True))
        yield at_most(case, f"median ratio of pairs: {metric}", ratio, "", SLOWER)


def rows(options: Namespace) -> Iterator[Row]:
    with quiet_machine():
        for size in (2, 4, 8):
            yield from compared(size, 20 if options.quick else 200)


if __name__ == "__main__":
    show(command_line("rendezvous", __doc__, quick="20 groups of each size"), rows, judged=True)
