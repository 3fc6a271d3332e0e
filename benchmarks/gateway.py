"""Latency that `libra route` adds to a turn, with thousands of trajectories in flight over emulated engines.

Invariant: added latency is a turn's seconds as its client sees them, less those that the engine reports; for the same
load sent to the engines directly and through the gateway.

    python -m benchmarks.gateway [--quick] [--trajectories N] [--json FILE]

Emulator, gateway and the client that makes the load are a process each. 10,000 trajectories are in flight over 200
engines, each of three turns of 450 to 1,300 tokens (with `--quick` 100 over 20, and a tenth of the tokens); when one
ends another begins. The load goes to the engines directly, then through the gateway (C-MLFQ, three buckets), then
directly again, so that a machine that slows down shows. All three share the machine's cores; two are enough, if nothing
else runs. The report also says what the numbers are worth: whether as many turns pass through the gateway as directly,
whether the client was late, each process's CPU, and the longest pause of each process, seen by polling its /health: P99
says nothing of turns where a pause covers 1 % of them.

A turn in flight has two sockets at the gateway, so 10,000 need a limit of 21,000 open files.
"""

from __future__ import annotations

import asyncio
import gc
import random
import resource
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
from aiohttp import ClientSession, DummyCookieJar, TCPConnector

from benchmarks.command import RefusedError, command_line, show
from benchmarks.rows import Row, below
from tests.fakes.servers import LONGEST, Server, emulate, gateway, started

MEDIAN_GOAL, P99_GOAL = 5.0, 25.0  # ms
_TAIL = 0.99
_TURNS, _PROMPT, _RETURNED = 3, (300, 900), 100
_LIMITS = (2_500, 4_500, LONGEST)  # of buckets, tokens
_OTHER_FILES = 1000
_JSON = {"Content-Type": "application/json"}
_LOOK_SECONDS, _WATCH_SECONDS = 0.01, 0.05


@dataclass(frozen=True, slots=True)
class Size:
    engines: int
    trajectories: int
    tokens: tuple[int, int]  # that a turn generates, at least and at most
    ramp: float  # seconds in which all trajectories begin, and as many again until it is measured
    seconds: float  # that are measured


FULL, QUICK = Size(200, 10_000, (450, 1300), 30.0, 60.0), Size(20, 100, (45, 130), 4.0, 8.0)


@dataclass(slots=True)
class Load:
    """Turns that ended while it was measured."""

    added: list[float] = field(default_factory=list)  # seconds
    seconds: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)  # seconds by which the client's event loop was
    paused: dict[str, list[float]] = field(default_factory=dict)  # seconds until a process said that it is well
    cpu: dict[str, float] = field(default_factory=dict)  # seconds, by process
    elsewhere: float = 0.0  # seconds of the machine's processors that none of them used
    span: float = 0.0  # seconds that were measured
    in_flight: int = 0
    failed: int = 0


def rows(options: Namespace) -> list[Row]:
    size = QUICK if options.quick else FULL
    size = size if options.trajectories is None else replace(size, trajectories=options.trajectories)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * size.trajectories + _OTHER_FILES  # the router has a socket on either side of each
    if needed > most:
        raise RefusedError(
            f"{size.trajectories:,} trajectories need {needed:,} open files, and the limit is {most:,}: raise it (as"
            f" root: ulimit -Hn {needed}; of a container: --ulimit nofile={needed}), or give --trajectories"
            f" {(most - _OTHER_FILES) // 2}"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # also of the processes that are started
    gc.disable()  # pauses of the client would count as latency; it ends before it needs a collection
    return measured(size)


def measured(size: Size) -> list[Row]:
    case = f"{size.trajectories:,} trajectories, {size.engines} engines"
    found: list[Row] = []
    loads: dict[str, Load] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("direct", "through", "direct again"):
            load = loads[name] = _phase(Path(folder), size, name == "through")
            found += [Row(case, f"{name}: {metric}", value, unit) for metric, value, unit in _found(load)]
    direct, through, again = loads.values()
    for what, share, most in (("median", 0.5, MEDIAN_GOAL), ("P99", _TAIL, P99_GOAL)):
        beside = max(_quantile(direct.added, share), _quantile(again.added, share))
        adds = 1e3 * (_quantile(through.added, share) - beside)
        found.append(below(case, f"router adds, {what}", adds, "ms", most))
    turns, longest = _rate(through) / _rate(direct), max(it for load in loads.values() for _, it in _pauses(load))
    late = 1e3 * _quantile(through.late, _TAIL)
    return [
        *found,
        Row(case, "turns through the router, over those directly", turns, "", "0.95 or more", turns >= 0.95),
        below(case, "the client's event loop is late, P99", late, "ms", P99_GOAL / 2),
        below(case, "the client is busy", through.cpu["client"] / through.span, "of a core", 0.7),
        below(case, "longest pause of any process", 1e3 * longest, "ms", 1e3 * (1 - _TAIL) * size.seconds),
    ]


def _found(load: Load) -> list[tuple[str, float, str]]:
    turns = len(load.added)
    return [
        ("turns", _rate(load), "a second"),
        ("a turn takes", sum(load.seconds) / turns, "s"),
        ("in flight", load.in_flight, "turns"),
        ("failed", load.failed, "turns"),
        ("added, median", 1e3 * _quantile(load.added, 0.5), "ms"),
        ("added, P99", 1e3 * _quantile(load.added, _TAIL), "ms"),
        ("the client is late, P99", 1e3 * _quantile(load.late, _TAIL), "ms"),
        *((f"longest pause of the {who}", 1e3 * pause, "ms") for who, pause in _pauses(load)),
        *((f"CPU of {who}", 1e3 * used / turns, "ms a turn") for who, used in load.cpu.items()),
        ("CPU of all these", sum(load.cpu.values()) / load.span, "cores"),
        ("CPU elsewhere", load.elsewhere / load.span, "cores"),
    ]


def _pauses(load: Load) -> list[tuple[str, float]]:
    """The longest of each process, in seconds."""
    return [*((who, max(seconds)) for who, seconds in load.paused.items()), ("client", max(load.late))]


def _rate(load: Load) -> float:
    return len(load.added) / load.span


def _quantile(values: Sequence[float], share: float) -> float:
    return float(np.quantile(values, share, method="lower"))


def _phase(folder: Path, size: Size, through: bool) -> Load:
    engine = emulate(folder / "engines.yaml", "--port", 0, count=size.engines, max_num_seqs=128)
    with started(*engine) as emulator:
        engines, servers = emulator.said["engines"], {"emulator": emulator}
        if not through:
            return asyncio.run(_run(size, list(engines.values()), servers, finish=False))
        described = [
            {"name": name, "url": url, "max_model_len": LONGEST, "bucket": index % len(_LIMITS)}
            for index, (name, url) in enumerate(engines.items())
        ]
        keys = {"limits": list(_LIMITS), "turn_tokens": size.tokens[1], "route": "cmlfq"}
        with started(*gateway(folder / "gateway.yaml", described, **keys)) as router:
            servers["router"] = router
            return asyncio.run(_run(size, [router.said["v1"]], servers, finish=True))


async def _run(size: Size, addresses: Sequence[str], servers: dict[str, Server], finish: bool) -> Load:
    load = Load(paused={who: [] for who in servers})
    processes = {who: psutil.Process(it.process.pid) for who, it in servers.items()} | {"client": psutil.Process()}
    async with ClientSession(connector=TCPConnector(limit=0), cookie_jar=DummyCookieJar()) as session:
        client = _Client(session, addresses, load, size.tokens, finish)
        tasks = [
            asyncio.create_task(client.trajectories(number, size.ramp * number / size.trajectories))
            for number in range(size.trajectories)
        ]
        tasks.append(asyncio.create_task(client.look()))
        tasks += [asyncio.create_task(client.watch(who, server.said["base"])) for who, server in servers.items()]
        await asyncio.sleep(2 * size.ramp)
        before, elsewhere, began = _cpu(processes), _busy(), time.monotonic()
        client.measuring = True
        await asyncio.sleep(size.seconds / 2)
        load.in_flight = client.in_flight
        await asyncio.sleep(size.seconds / 2)
        client.measuring = False
        load.span = time.monotonic() - began
        load.cpu = {who: used - before[who] for who, used in _cpu(processes).items()}
        load.elsewhere = max(0.0, _busy() - elsewhere - sum(load.cpu.values()))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return load


def _cpu(processes: dict[str, psutil.Process]) -> dict[str, float]:
    return {who: sum(process.cpu_times()[:2]) for who, process in processes.items()}


def _busy() -> float:
    """Seconds of all processors."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)


class _Choice(msgspec.Struct):
    token_ids: list[int]


class _Answer(msgspec.Struct):
    choices: list[_Choice]


_answer = msgspec.json.Decoder(_Answer)


@dataclass(slots=True)
class _Client:
    session: ClientSession
    addresses: Sequence[str]
    load: Load
    tokens: tuple[int, int]
    finish: bool
    measuring: bool = False
    in_flight: int = 0

    async def look(self) -> None:
        """Record how late this event loop is."""
        while True:
            began = time.monotonic()
            await asyncio.sleep(_LOOK_SECONDS)
            if self.measuring:
                self.load.late.append(time.monotonic() - began - _LOOK_SECONDS)

    async def watch(self, who: str, base: str) -> None:
        """Record how long a process takes to answer requests that need next to no work."""
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            began = time.monotonic()
            async with self.session.get(f"{base}/health") as response:
                await response.read()
            if self.measuring:
                self.load.paused[who].append(time.monotonic() - began)

    async def trajectories(self, number: int, delay: float) -> None:
        """One after the other, for ever."""
        await asyncio.sleep(delay)
        drawn, address, count = random.Random(number), self.addresses[number % len(self.addresses)], 0
        while True:
            count += 1
            id, prompt = f"{number}/{count}", [number + 7] * drawn.randint(*_PROMPT)
            for turn in range(_TURNS):
                libra = {"trajectory": id, "prompt": str(number)}
                told = libra | ({"tool": {"name": "t", "status": "ok"}} if turn else {})
                body = {"prompt": prompt, "max_tokens": drawn.randint(*self.tokens), "return_token_ids": True}
                answer = await self._turn(f"{address}/completions", {**body, "libra": told})
                if answer is None:
                    break
                prompt = [*prompt, *answer, *[turn] * _RETURNED]
            else:
                if self.finish:
                    async with self.session.post(f"{address.removesuffix('/v1')}/trajectories/{id}/finish"):
                        pass

    async def _turn(self, url: str, body: dict[str, Any]) -> list[int] | None:
        data = msgspec.json.encode(body)
        began = time.monotonic()
        self.in_flight += 1
        try:
            async with self.session.post(url, data=data, headers=_JSON) as response:
                text = await response.read()
                took = time.monotonic() - began
        finally:
            self.in_flight -= 1
        if response.status != 200:
            self.load.failed += 1
            return None
        engine = float(response.headers["Server-Timing"].rpartition("=")[2]) / 1e3
        if self.measuring:
            self.load.added.append(took - engine)
            self.load.seconds.append(took)
        return _answer.decode(text).choices[0].token_ids


if __name__ == "__main__":
    parser = command_line("gateway", __doc__, quick="few trajectories and short turns: a first look")
    parser.add_argument("--trajectories", type=int, metavar="N", help="in flight")
    show(parser, rows)
