"""Sessions of an agent through the gateway, while its engines are killed, stopped and started again.

Invariant: each request has one answer, or an error that names the reason; a trajectory that the gateway said is
finished is in its log once, and no other is. Nothing of the gateway is used to count that.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, DummyCookieJar, TCPConnector

from benchmarks.rows import Row, below, never
from tests.fakes.servers import Server, emulate, route, start, started

ATTACK = "sessions while engines die"
_ENGINES, _TURNS, _TOKENS = 5, 3, (8, 40)
_PROMPT, _RETURNED = 200, 40  # tokens
_THINK = (2.0, 8.0)  # seconds between two requests of a session
_PAUSE = (2.0, 8.0)  # seconds between two faults of an engine
_DOWN = (0.5, 4.0)  # seconds that an engine is away, or stands still
_ANSWER_SECONDS = 120.0
_SETTLE_SECONDS = 10.0
_MOST_MEGABYTES = 30.0


@dataclass(slots=True)
class _Told:
    """Counts of the answers that clients got."""

    answers: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    finished: Counter[str] = field(default_factory=Counter)  # answers that said so, by trajectory
    unsure: set[str] = field(default_factory=set)  # trajectories whose end had no answer


def attack_sessions(
    folder: Path, count: int, seconds: float, say: Callable[[str], None], seed: int = 0
) -> Iterator[Row]:
    """Keep `count` sessions for `seconds` while faults strike."""
    rng, log = random.Random(f"sessions:{seed}"), folder / "log.jsonl"
    engines = [start(*emulate(folder / f"engine-{it}.yaml", "--port", 0)) for it in range(_ENGINES)]
    try:
        with started(*route(folder / "gateway.yaml", engines, "--log", log)) as gateway:
            told, before, after, faults = asyncio.run(_run(gateway, engines, count, seconds, rng))
            alive = gateway.alive
    finally:
        for engine in engines:
            engine.end()
    logged = Counter(json.loads(line)["id"] for line in log.read_text(encoding="utf-8").splitlines())
    wrong = [f"trajectory {it} is in the log {logged[it]} times" for it in told.finished if logged[it] != 1]
    wrong += [f"trajectory {it} was never finished" for it in logged if it not in (told.unsure | set(told.finished))]
    said = ", ".join(f"{times:,} {what}" for what, times in told.answers.most_common())
    say(f"sessions: {said}; {sum(faults.values())} faults; {len(logged):,} trajectories in the log")
    requests = f"{told.answers.total():,} requests of {count:,} sessions, {sum(faults.values())} faults ({said})"
    yield never(ATTACK, "requests neither answered whole nor told why", told.wrong, requests)
    yield never(ATTACK, "trajectories not finished exactly once", wrong, f"{len(told.finished):,}")
    yield never(ATTACK, "ends of the gateway", [] if alive else ["it ended"], "looked once")
    metric = f"memory {_SETTLE_SECONDS:.0f} s after, beyond that of before"
    yield below(ATTACK, metric, after - before, "MB", _MOST_MEGABYTES)


async def _run(
    gateway: Server, engines: list[Server], count: int, seconds: float, rng: random.Random
) -> tuple[_Told, float, float, Counter[str]]:
    told, faults = _Told(), Counter[str]()
    limit = ClientTimeout(total=_ANSWER_SECONDS)
    async with ClientSession(connector=TCPConnector(limit=0), cookie_jar=DummyCookieJar(), timeout=limit) as session:
        client = _Client(session, gateway.said["base"], told)
        await client.trajectory("first", random.Random(0))  # what is loaded at first is of no session
        before, ends = gateway.megabytes, time.monotonic() + seconds
        over = asyncio.Event()
        striking = asyncio.gather(
            *(_strike(engines, it, random.Random(rng.random()), faults, over) for it in range(_ENGINES))
        )
        await asyncio.gather(*(client.until(ends, number) for number in range(count)))
        over.set()
        await striking
    await asyncio.sleep(_SETTLE_SECONDS)
    return told, before, gateway.megabytes, faults


async def _strike(
    engines: list[Server], number: int, rng: random.Random, faults: Counter[str], over: asyncio.Event
) -> None:
    """Strike an engine again and again, each time in one of three ways; in the end it is there."""
    while not over.is_set():
        await asyncio.sleep(rng.uniform(*_PAUSE))
        kind, down = rng.choice(("kill", "stop", "restart")), rng.uniform(*_DOWN)
        process = engines[number].process
        faults[kind] += 1
        if kind == "stop":
            process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(down)
            process.send_signal(signal.SIGCONT)
            continue
        process.send_signal(signal.SIGKILL if kind == "kill" else signal.SIGTERM)
        await asyncio.to_thread(process.wait)
        await asyncio.sleep(down if kind == "kill" else 0.0)
        engine = engines[number]  # is started again at its port
        engines[number] = await asyncio.to_thread(start, *engine.words[:-1], engine.port)


@dataclass(slots=True)
class _Client:
    session: ClientSession
    base: str
    told: _Told

    async def until(self, ends: float, number: int) -> None:
        """One session: one trajectory after the other. The last one is brought to its end, too."""
        rng, done = random.Random(number), 0
        await asyncio.sleep(rng.uniform(0.0, _THINK[1]))
        while time.monotonic() < ends:
            await self.trajectory(f"{number}/{done}".replace("/", "-"), rng)
            done += 1

    async def trajectory(self, id: str, rng: random.Random) -> None:
        prompt = [rng.randrange(1000)] * _PROMPT
        for turn in range(_TURNS):
            libra = {"trajectory": id, "prompt": id.partition("-")[0]} | ({"tool": {"name": "t"}} if turn else {})
            asked = {"prompt": prompt, "max_tokens": rng.randint(*_TOKENS), "return_token_ids": True, "libra": libra}
            answer = await self._post("/v1/completions", asked)
            if answer is None:
                break
            tokens = answer["choices"][0]["token_ids"]
            if len(tokens) != asked["max_tokens"]:
                self.told.wrong.append(f"a turn of {asked['max_tokens']} tokens has {len(tokens)}")
            prompt = [*prompt, *tokens, *[turn] * _RETURNED]
            if id != "first":
                await asyncio.sleep(rng.uniform(*_THINK))
        else:
            finished = await self._post(f"/trajectories/{id}/finish", {"reward": 1.0})
            if finished is None:
                self.told.unsure.add(id)
            else:
                self.told.finished[id] += 1
            return
        await self._post(f"/trajectories/{id}/forget", {})

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """The answer; None for an error, which is counted."""
        try:
            async with self.session.post(self.base + path, json=body) as response:
                text = await response.text()
                answer: dict[str, Any] = json.loads(text) if text else {}
        except (ClientError, OSError, TimeoutError, ValueError) as error:
            self.told.wrong.append(f"{path.split('/')[-1]}: {type(error).__name__} {error}")
            return None
        self.told.answers[f"of status {response.status}"] += 1
        if response.status < 400:
            return answer
        if not answer.get("error", {}).get("message"):
            self.told.wrong.append(f"{path}: status {response.status} without a reason")
        return None
