"""What `libra route` adds to a turn, with thousands of trajectories in flight over emulated engines.

Invariant: added are the seconds of a turn, as its client sees them, less those that the emulated engine took, which the
engine says itself; of the same load, sent to engines directly and through the router.

    python -m benchmarks.gateway [--quick] [--trajectories N] [--json FILE]

Emulator, router and the client that makes the load are a process each. 10,000 trajectories are in flight over 200
engines, each of three turns of 450 to 1,300 tokens (with `--quick` 100 over 20, and a tenth of the tokens); when one
ends another begins. First they go to engines directly, then through the router (C-MLFQ, three buckets), then directly
again, so that a machine that slows down shows. All three share the machine's cores: leave it alone meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import yaml
from aiohttp import ClientSession, TCPConnector

from benchmarks.rows import Row, report

MEDIAN_GOAL, P99_GOAL = 5.0, 25.0  # ms
_TURNS, _PROMPT, _RETURNED = 3, (300, 900), 100
_LIMITS = (2_500, 4_500, 16_384)  # of buckets, tokens
_OTHER_FILES = 1000
_LIBRA = [sys.executable, "-c", "from libra.cli import main; main()"]


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
    in_flight: int = 0
    failed: int = 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few trajectories and short turns: a first look")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to FILE as a JSON list")
    parser.add_argument("--trajectories", type=int, metavar="N", help="in flight")
    options = parser.parse_args(arguments)
    size = QUICK if options.quick else FULL
    size = size if options.trajectories is None else replace(size, trajectories=options.trajectories)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * size.trajectories + _OTHER_FILES  # the router has a socket on either side of each
    if needed > most:
        parser.exit(
            2,
            f"{parser.prog}: {size.trajectories:,} trajectories need {needed:,} open files, and the limit is {most:,}:"
            f" raise it (ulimit -Hn), or give --trajectories {(most - _OTHER_FILES) // 2}\n",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # also of the processes that are started
    gc.disable()  # the client's own pauses are nobody's; it ends before they would be needed
    report(measured(size), options.json)
    return 0


def measured(size: Size) -> list[Row]:
    case = f"{size.trajectories:,} trajectories, {size.engines} engines"
    rows, found = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for name, through in (("direct", False), ("through", True), ("direct again", False)):
            load, cpu, seconds = _phase(Path(folder), size, through)
            found[name] = added = sorted(1e3 * it for it in load.added)
            rows += [
                Row(case, f"{name}: turns", len(added) / seconds, "a second"),
                Row(case, f"{name}: a turn takes", sum(load.seconds) / len(load.seconds), "s"),
                Row(case, f"{name}: in flight", load.in_flight, "turns"),
                Row(case, f"{name}: failed", load.failed, "turns"),
                Row(case, f"{name}: added, median", median(added), "ms"),
                Row(case, f"{name}: added, P99", _p99(added), "ms"),
            ]
            rows += [
                Row(case, f"{name}: CPU of {who}", 1e3 * used / len(added), "ms a turn") for who, used in cpu.items()
            ]
    for what, of, goal in (("median", median, MEDIAN_GOAL), ("P99", _p99, P99_GOAL)):
        difference = of(found["through"]) - max(of(found["direct"]), of(found["direct again"]))
        rows.append(Row(case, f"router adds, {what}", difference, "ms", f"below {goal:g} ms", difference < goal))
    return rows


def _p99(ordered: Sequence[float]) -> float:
    return ordered[int(0.99 * (len(ordered) - 1))]


def _phase(folder: Path, size: Size, through: bool) -> tuple[Load, dict[str, float], float]:
    """The load, CPU seconds of each process and how long was measured."""
    engines = folder / "engines.yaml"
    engines.write_text(yaml.safe_dump({"engines": [_engine(size)], "route": "least-loaded"}), encoding="utf-8")
    with _started("emulate", engines) as (emulator, said):
        processes = {"emulator": emulator}
        if not through:
            return _measured(size, list(said["engines"].values()), processes, finish=False)
        described = [
            {"name": name, "url": url, "max_model_len": 16384, "bucket": index % len(_LIMITS)}
            for index, (name, url) in enumerate(said["engines"].items())
        ]
        file = folder / "gateway.yaml"
        content = {"engines": described, "limits": list(_LIMITS), "turn_tokens": size.tokens[1], "route": "cmlfq"}
        file.write_text(yaml.safe_dump(content), encoding="utf-8")
        with _started("route", file) as (router, address):
            return _measured(size, [address["v1"]], processes | {"router": router}, finish=True)


def _engine(size: Size) -> dict[str, Any]:
    return {
        "name": "a800",
        "count": size.engines,
        "model": "Qwen/Qwen3-14B",
        "gpu": "A800",
        "profile": "roofline",
        "max_model_len": 16384,
        "max_num_seqs": 128,
    }


@contextmanager
def _started(command: str, file: Path) -> Iterator[tuple[psutil.Process, dict[str, Any]]]:
    process = subprocess.Popen(
        [*_LIBRA, command, str(file), "--port", "0", "--json"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield psutil.Process(process.pid), json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


def _measured(
    size: Size, addresses: Sequence[str], processes: dict[str, psutil.Process], finish: bool
) -> tuple[Load, dict[str, float], float]:
    return asyncio.run(_run(size, addresses, processes | {"client": psutil.Process()}, finish))


async def _run(
    size: Size, addresses: Sequence[str], processes: dict[str, psutil.Process], finish: bool
) -> tuple[Load, dict[str, float], float]:
    load = Load()
    async with ClientSession(connector=TCPConnector(limit=0)) as session:
        client = _Client(session, addresses, load, size.tokens, finish)
        tasks = [
            asyncio.create_task(client.trajectories(number, size.ramp * number / size.trajectories))
            for number in range(size.trajectories)
        ]
        await asyncio.sleep(2 * size.ramp)
        client.measuring, before, began = True, _cpu(processes), time.monotonic()
        await asyncio.sleep(size.seconds / 2)
        load.in_flight = client.in_flight
        await asyncio.sleep(size.seconds / 2)
        client.measuring, seconds = False, time.monotonic() - began
        cpu = {who: used - before[who] for who, used in _cpu(processes).items()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return load, cpu, seconds


def _cpu(processes: dict[str, psutil.Process]) -> dict[str, float]:
    return {who: sum(process.cpu_times()[:2]) for who, process in processes.items()}


@dataclass(slots=True)
class _Client:
    session: ClientSession
    addresses: Sequence[str]
    load: Load
    tokens: tuple[int, int]
    finish: bool
    measuring: bool = False
    in_flight: int = 0

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
                body = {
                    "prompt": prompt,
                    "max_tokens": drawn.randint(*self.tokens),
                    "return_token_ids": True,
                    "libra": told,
                }
                answer = await self._turn(f"{address}/completions", body)
                if answer is None:
                    break
                prompt = [*prompt, *answer, *[turn] * _RETURNED]
            else:
                if self.finish:
                    async with self.session.post(f"{address.removesuffix('/v1')}/trajectories/{id}/finish"):
                        pass

    async def _turn(self, url: str, body: dict[str, Any]) -> list[int] | None:
        data = json.dumps(body).encode()
        began = time.monotonic()
        self.in_flight += 1
        try:
            async with self.session.post(url, data=data) as response:
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
        tokens: list[int] = json.loads(text)["choices"][0]["token_ids"]
        return tokens


if __name__ == "__main__":
    sys.exit(main())
