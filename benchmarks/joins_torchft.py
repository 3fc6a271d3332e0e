"""Effect of a joining replica on the steps of a torchft group's member: the contrast to `benchmarks.joins`.

Invariant: the member's step is timed from the start of its quorum to the end of its optimiser step. Work and state are
those of a model with `parameters` parameters: matrix products, gradients, AdamW moments; only their meaning is missing.

    pip install torchft
    python -m benchmarks.joins_torchft [--quick] [--json FILE]

torchft is no dependency of Libra. Its joiner heals during the first step that it shares: the member stages its state
and then waits in the gradient all-reduce, which the joiner enters once it has loaded everything.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.rows import Row, report

_WAIT = timedelta(seconds=60)
_MATRIX = 512  # rows and columns
_TOGETHER = 3  # steps of a joiner before it ends

Step = tuple[float, bool]
"""Seconds of one step of the member, and whether a replica healed in it."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.joins_torchft", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--quick", action="store_true", help="a smaller state and two joins")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to FILE, a JSON line each")
    options = parser.parse_args(arguments)
    try:
        from torchft.coordination import LighthouseServer
    except ImportError as error:
        print(f"torchft cannot be imported ({error}): pip install torchft", file=sys.stderr)
        return 2
    parameters, products, joins = (10_000_000, 40, 2) if options.quick else (60_000_000, 400, 8)
    os.environ["OMP_NUM_THREADS"] = "1"  # inherited
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=100)
    try:
        steps = measure(lighthouse.address(), parameters, products, joins)
    finally:
        lighthouse.shutdown()
    report(rows_of(steps, parameters), options.json)
    return 0


def measure(lighthouse: str, parameters: int, products: int, joins: int) -> list[Step]:
    """Steps of the member alone, and those in which one of the joiners healed."""
    steps: list[Step] = []
    member, rows = _start("member", lighthouse, parameters, products, None)
    try:
        steps += [rows.recv() for _ in range(8)]
        for number in range(joins):
            joiner, own = _start(f"joiner-{number}", lighthouse, parameters, products, _TOGETHER)
            while not (step := rows.recv())[1]:
                pass  # the joiner is still starting
            steps.append(step)
            joiner.join()
            own.close()
            while rows.poll():
                rows.recv()  # with the joiner
            rows.recv()  # when it had gone
            steps += [rows.recv() for _ in range(4)]
    finally:
        member.kill()
        member.join()
    return steps[3:]  # the first ones pay for what is set up once


def rows_of(steps: Sequence[Step], parameters: int) -> list[Row]:
    alone = [seconds for seconds, healed in steps if not healed]
    healing = [seconds for seconds, healed in steps if healed]
    case = f"{parameters // 1_000_000} M parameters, {len(healing)} joins"
    return [
        Row(case, "member's step, alone, median", median(alone), "s"),
        Row(case, "member's step, alone, worst", max(alone), "s"),
        Row(case, "member's step, a joiner heals, median", median(healing), "s"),
        Row(case, "healing / alone, median", median(healing) / median(alone), "ratio"),
    ]


def _start(
    name: str, lighthouse: str, parameters: int, products: int, steps: int | None
) -> tuple[SpawnProcess, Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_train, args=(name, lighthouse, parameters, products, steps, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _train(name: str, lighthouse: str, parameters: int, products: int, steps: int | None, rows: Connection) -> None:
    """One replica; `steps` None: until it is killed."""
    import torch
    from torch.distributed import TCPStore
    from torchft import Manager, ProcessGroupGloo

    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    weights = torch.nn.Parameter(torch.randn(parameters))
    weights.grad = torch.randn(parameters)
    optimiser = torch.optim.AdamW([weights], lr=1e-5)

    def load(state: dict[str, Any]) -> None:
        weights.data.copy_(state["weights"])
        optimiser.load_state_dict(state["optimiser"])

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = ProcessGroupGloo(timeout=_WAIT)
    manager = Manager(
        pg=group,
        load_state_dict=load,
        state_dict=lambda: {"weights": weights.data, "optimiser": optimiser.state_dict()},
        min_replica_size=1,
        replica_id=name,
        timeout=_WAIT,
        quorum_timeout=_WAIT,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        hostname="127.0.0.1",
    )
    left, right = torch.randn(_MATRIX, _MATRIX), torch.randn(_MATRIX, _MATRIX)
    while steps is None or manager.current_step() == 0 or steps > 0:
        began = time.monotonic()
        manager.start_quorum()
        for _ in range(products):
            torch.mm(left, right)
        manager.allreduce(weights.grad).wait()
        if manager.should_commit():
            optimiser.step()
        rows.send((time.monotonic() - began, group.size() > manager.num_participants()))
        steps = None if steps is None else steps - 1
    os._exit(0)  # as a replica that is gone


if __name__ == "__main__":
    sys.exit(main())
