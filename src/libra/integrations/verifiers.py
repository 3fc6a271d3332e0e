"""A taskset of verifiers as the environment of `libra run`: verifiers plays and scores episodes, and the run's engines
answer its requests.

Invariant: verifiers runs in a separate process (`verifiers_player.py`), so that it cannot block or end the run's
controller. If this process ends before the run, every episode in progress fails at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

from libra.environments.protocol import Prompt
from libra.environments.served import EpisodeFailedError, Seat, split_of
from libra.exec.background import background

if find_spec("verifiers") is None:
    raise ModuleNotFoundError("No module named 'verifiers'; pip install 'verifiers>=0.4,<0.5'")

_END_SECONDS = 10.0  # seconds from the order to end
_SAID = 300  # characters quoted from its last output


class VerifiersEnvironment:
    """`kind: verifiers`. Options: `id` of a taskset that can be imported; `env`, more settings of verifiers' `--env`;
    `tasks`, a limit on the number of tasks; `turn_tokens`.
    """

    def __init__(
        self, id: str, env: Mapping[str, Any] | None = None, tasks: int | None = None, turn_tokens: int = 1024
    ) -> None:
        self.name, self.turn_tokens = id, turn_tokens
        options = json.dumps({"path": sys.path, "id": id, "env": env or {}, "most": tasks})
        self._command = [sys.executable, "-m", "libra.integrations.verifiers_player", options]
        # Without a request, the process prints the number of tasks and ends.
        described = subprocess.run(self._command, input=b"", capture_output=True)
        told = json.loads(described.stdout.partition(b"\n")[0] or "{}")
        if "tasks" not in told:
            raise ValueError(told.get("refused") or f"{id}: {_end(described.returncode, described.stderr)}")
        self._tasks = {f"{id}-{number}": number for number in range(told["tasks"])}
        self._player: _Player | None = None

    def prompts(self, split: str, count: int, seed: int) -> list[Prompt]:
        return split_of([Prompt(name, "", "") for name in self._tasks], split, count, seed)

    @asynccontextmanager
    async def opened(self, logs: Path) -> AsyncIterator[None]:
        log = logs / "verifiers.log"
        with log.open("wb") as written:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=written,
                start_new_session=True,  # so that all that it starts ends with it
            )
        self._player = _Player(process, log)
        try:
            yield
        finally:
            await self._player.end()

    async def play(self, prompt: Prompt, seat: Seat) -> float:
        assert self._player is not None
        return await self._player.play(self._tasks[prompt.id], seat)


class _Player:
    """The process, from its start to its end."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process, self._orders, self._answers, self._log = process, process.stdin, process.stdout, log
        self._numbers = count()
        self._asked: dict[int, asyncio.Future[float]] = {}
        self._gone = ""  # the reason, after its end
        self._listening = background(self._listen())

    async def play(self, task: int, seat: Seat) -> float:
        if self._gone:
            raise EpisodeFailedError(self._gone)
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        order = {"number": number, "task": task, **asdict(seat)}
        self._orders.write(json.dumps(order).encode() + b"\n")
        try:
            return await answer
        finally:
            del self._asked[number]

    async def end(self) -> None:
        self._orders.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_SECONDS):
                await self._process.wait()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._listening

    async def _listen(self) -> None:
        await self._answers.readline()  # the number of tasks
        while line := await self._answers.readline():
            told = json.loads(line)
            answer = self._asked.get(told["number"])
            if answer is None or answer.done():
                continue  # its episode was cancelled
            if "reward" in told:
                answer.set_result(told["reward"])
            else:
                answer.set_exception(EpisodeFailedError(told["failed"]))
        self._gone = _end(await self._process.wait(), self._log.read_bytes())
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(EpisodeFailedError(self._gone))


def _end(code: int, said: bytes) -> str:
    last = (said.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
    return f"the process of verifiers ended with {code}: {last[-_SAID:]}"
