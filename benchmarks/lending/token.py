"""Time that serving waits for a borrower that is killed, stopped or slow, and the overhead without a borrower.

Invariant: real processes: a serving engine, the agent's borrower with its weights, and signals at random moments. A
wait is from the moment that serving asks for the device to that at which it goes on, less the time in which other
processes of the machine had its core.

    python -m benchmarks.lending token [--kills 8] [--stops 40] [--json FILE]
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from vllm.v1.engine.llm_engine import LLMEngine

from benchmarks.command import command_line
from benchmarks.lending._engines import ask, serving_engine, start_rollout, turn, write_models
from benchmarks.rows import Row, report
from libra.backends.launch.launcher import WorkerLink
from libra.backends.transport.channel import ControllerChannel
from libra.backends.transport.engine_messages import Borrow, Lent
from libra.backends.vllm.engine_handle import EngineHandle
from libra.exec.protocols import WorkerFailedError, WorkerLostError
from libra.lend.backend.agent import LendingAgent
from libra.lend.backend.lender_file import LoanOrder
from libra.lend.backend.scheduler import DEVICE
from libra.lend.recall import RecallPolicy
from libra.lend.records.lending import LendingTerms
from libra.lend.traffic.envelope import Envelope

_MARGIN = 0.002  # seconds beyond the grant
_TERMS = LendingTerms(
    model="serve",
    rollout="roll",
    pace=1.0,  # so slow that there is always a grant out
    longest=0.025,
    shortest=0.004,
    envelope=Envelope(rate=1000.0, queued=100_000, live=64, context=100_000, window=10.0),
    recall=RecallPolicy(quiet=0.2, most_quiet=0.2),
)
_TURNS = 16
_STOPPED = 0.2  # seconds
_BLOCKS, _BLOCK_STEPS = 40, 50  # of steps without a borrower, in turn with and without the scheduler

_SLOW = """
import random, sys, time
from pathlib import Path
from libra.lend.backend.borrower_token import BorrowerToken, FencedError
token, longest = BorrowerToken(Path(sys.argv[1]), float(sys.argv[3])), float(sys.argv[2])
token.wish(0.001)
print("ready", flush=True)
until = time.monotonic() + float(sys.argv[4])
while time.monotonic() < until:
    if not token.look().wants and token.try_take(time.monotonic() + longest):
        ends = time.monotonic() + random.choice([0.5, 4.0]) * longest
        while time.monotonic() < ends:
            pass
        try:
            token.release()
        except FencedError:
            pass
    time.sleep(0.0005)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line("lending token", __doc__)
    parser.add_argument("--kills", type=int, default=8, help="of the borrower (default: 8)")
    parser.add_argument("--stops", type=int, default=40, help="of the borrower, for a moment each (default: 40)")
    options = parser.parse_args(arguments)
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_models(directory)
        os.environ[DEVICE] = str(directory / "device")
        waits = {
            "killed": asyncio.run(_with_borrower(directory, options.kills, 0)),
            "stopped": asyncio.run(_with_borrower(directory, 0, options.stops)),
            "slow": _with_slow(directory, 10.0),
        }
        rows = [row for fate, found in waits.items() for row in _rows(fate, found)]
        rows += _nothing_lent(directory)
    report(rows, options.json)
    print(f"load of the machine before and after: {before:.1f}, {os.getloadavg()[0]:.1f}; {os.cpu_count()} cores")
    return 0


@dataclass(frozen=True, slots=True)
class Waited:
    """Final report of a serving engine."""

    waits: list[float]  # seconds
    left: list[float]  # of them, until the grant was over
    fenced: int
    events: int  # that happened to its borrower


class Server:
    """The serving engine in its process."""

    def __init__(self, directory: Path) -> None:
        (directory / "device").unlink(missing_ok=True)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.lending._server", str(directory), "3"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(directory / "server.log").open("w"),
            text=True,
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line == "ready\n":
                return
        raise RuntimeError(f"the serving engine did not start: {(directory / 'server.log').read_text()[-500:]}")

    def stop(self, events: int) -> Waited:
        said = json.loads(self._process.communicate("", timeout=60)[0])
        waits, left = zip(*said["waits"], strict=True)
        return Waited(list(waits), list(left), said["fenced"], events)


async def _with_borrower(directory: Path, kills: int, stops: int) -> Waited:
    server, page = Server(directory), directory / "device"
    start = start_rollout(directory, page, _TERMS)
    lender = LoanOrder(page, directory / "agent", str(directory / "serve"), 2.0, start)
    ended, rng = asyncio.Event(), np.random.default_rng(0)
    async with LendingAgent.open(lender, directory / "logs", lambda line: None) as agent:
        running = asyncio.create_task(agent.run(ended))
        for _ in range(max(kills, 1)):
            pid = await _ready(agent, running)
            load = asyncio.create_task(_load(lender))
            await _granted(agent, 20)
            for _ in range(stops):
                await asyncio.sleep(float(rng.uniform(0.1, 0.3)))
                os.kill(pid, signal.SIGSTOP)
                await asyncio.sleep(_STOPPED)
                os.kill(pid, signal.SIGCONT)
            if kills:
                await asyncio.sleep(float(rng.uniform(0.1, 0.3)))
                os.kill(pid, signal.SIGKILL)
            else:
                load.cancel()
            await asyncio.gather(load, return_exceptions=True)
        ended.set()
        await running
    return server.stop(kills + stops)


async def _ready(agent: LendingAgent, running: asyncio.Task[None]) -> int:
    """The process of the engine that borrows, once it can."""
    while (pid := agent.borrower) is None:
        if running.done():
            await running
        await asyncio.sleep(0.05)
    return pid


async def _granted(agent: LendingAgent, count: int) -> None:
    """Wait until `count` grants were used since the agent began."""
    while agent.tally.grants < count:
        await asyncio.sleep(0.05)


async def _load(lender: LoanOrder) -> None:
    """Turns, until the engine goes away."""
    channel = ControllerChannel(*await asyncio.open_unix_connection(lender.listen))
    engine = EngineHandle(WorkerLink("lent", 0, channel, (0,), 0), lambda name, why: None)
    turns: set[asyncio.Task[None]] = set()
    try:
        await engine.ask(Borrow(1, 1, 1), Lent)
        for number in count():
            turns.add(asyncio.create_task(engine.generate(turn(number, 40 + number % 300, 100), lambda piece: None)))
            if len(turns) >= _TURNS:
                done, turns = await asyncio.wait(turns, return_when=asyncio.FIRST_COMPLETED)
                if any([each.exception() for each in done]):
                    return
    except (WorkerLostError, WorkerFailedError):
        pass
    finally:
        engine.close()
        await asyncio.gather(*turns, return_exceptions=True)


def _with_slow(directory: Path, seconds: float) -> Waited:
    """A borrower that holds the device for half a grant, or for four."""
    server = Server(directory)
    arguments = [str(directory / "device"), str(_TERMS.longest), str(_TERMS.pace), str(seconds)]
    done = subprocess.run([sys.executable, "-c", _SLOW, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout == "ready\n"
    return server.stop(0)


def _rows(fate: str, found: Waited) -> list[Row]:
    waits, bound = np.array(found.waits), _TERMS.longest + _MARGIN
    worst, left = float(waits.max()), max(found.left)
    case = f"borrower {fate}"
    rows = [Row(case, "times", found.events, "")] if found.events else []
    return [
        *rows,
        Row(case, "serving waited", int((waits > 0.001).sum()), f"of {len(waits):,} steps"),
        Row(case, "did not wait for its end", found.fenced, "times"),
        Row(case, "wait, 99.9 % are below", 1e3 * float(np.quantile(waits, 0.999)), "ms"),
        Row(case, "wait, longest", 1e3 * worst, "ms", f"<= {1e3 * bound:.0f}", worst <= bound),
        # The moment in which the borrower may take its turn is part of it.
        Row(case, "left of a grant, longest", 1e3 * left, "ms", f"<= {1e3 * bound:.0f}", left <= bound),
    ]


def _nothing_lent(directory: Path) -> list[Row]:
    """The same steps with vLLM's own scheduler and with ours, in turn, in CPU time; and files that steps open.

    The scheduler class has its two methods to itself, and they are what is judged: two engines with the same scheduler
    differ by as much from step to step as what is looked for.
    """
    (directory / "device").unlink(missing_ok=True)
    engines = {"without": _Timed(serving_engine(directory, None)), "with": _Timed(serving_engine(directory))}
    opened: list[str] = []
    watching = False

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        if watching and event == "open":
            opened.append(str(arguments[0]))

    sys.addaudithook(watch)
    ratios, more, steps = [], [], []
    for block in range(_BLOCKS + 2):
        for number in range(8):
            for timed in engines.values():
                ask(timed.engine, f"{block}-{number}", 60, _BLOCK_STEPS + 20, number)
        spent: list[dict[str, tuple[float, float]]] = []
        for step in range(_BLOCK_STEPS + 10):
            spent.append({})
            for name, timed in engines.items() if step % 2 else reversed(engines.items()):
                watching = name == "with"
                spent[-1][name] = timed.step()
                watching = False
        for timed in engines.values():
            while timed.engine.has_unfinished_requests():
                timed.step()
        if block >= 2:
            whole = {name: median(it[name][0] for it in spent[10:]) for name in engines}
            ratios.append(whole["with"] / whole["without"])
            steps.append(whole["without"])
            more.append(median(it["with"][1] - it["without"][1] for it in spent[10:]))
    cost, case = median(more) / median(steps), "nothing lent"
    return [
        Row(case, "a step", 1e3 * median(steps), "ms"),
        Row(case, "its schedule and update_from_output take longer by", 1e6 * median(more), "us"),
        Row(case, "that is, of a step", 100 * cost, "%", "<= 1", cost <= 0.01),
        Row(case, "whole steps take longer by", 100 * (median(ratios) - 1), "%"),
        Row(case, "standard error of that", 100 * float(np.std(ratios)) / math.sqrt(len(ratios)), "%"),
        Row(case, "files opened by steps", len(opened), "", "0", not opened),
    ]


class _Timed:
    """An engine, and the CPU time of its steps and of its scheduler's part of them."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine, self._scheduling = engine, 0.0
        scheduler = engine.engine_core.engine_core.scheduler
        for name in ("schedule", "update_from_output"):
            setattr(scheduler, name, self._timed(getattr(scheduler, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began = time.process_time()
            result = method(*arguments)
            self._scheduling += time.process_time() - began
            return result

        return timed

    def step(self) -> tuple[float, float]:
        """Seconds of a step, and of its scheduler in it."""
        self._scheduling, began = 0.0, time.process_time()
        self.engine.step()
        return time.process_time() - began, self._scheduling


if __name__ == "__main__":
    sys.exit(main())
