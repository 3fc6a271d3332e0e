"""A command as a task: a process for each episode, which talks to the model and prints its reward.

Invariant: the process reads the task from standard input, and finds the model through the environment variables of
OpenAI's clients. Its last printed line is the reward. The process and its children end with the episode.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from pathlib import Path

from libra.environments.protocol import Prompt
from libra.environments.served import EpisodeFailedError, Seat, split_of

_SAID = 300  # characters quoted from the output of a failed process


class CommandEnvironment:
    """`kind: command`. Options: `command`, a list of words; `tasks`, a file with one task per line, as JSON;
    `turn_tokens`; `seconds`, the time limit of an episode; `name`, in the records.
    """

    def __init__(
        self,
        command: Sequence[str],
        tasks: str,
        turn_tokens: int = 1024,
        seconds: float = 3600.0,
        name: str = "command",
    ) -> None:
        if isinstance(command, str) or not command or not all(isinstance(word, str) for word in command):
            raise ValueError(f"command is {command!r}: give a list of words, such as [python, task.py]")
        self.name, self.turn_tokens = name, turn_tokens
        self._command, self._seconds = list(command), seconds
        self._tasks = _tasks(Path(tasks))

    def prompts(self, split: str, count: int, seed: int) -> list[Prompt]:
        return split_of(self._tasks, split, count, seed)

    def opened(self, logs: Path) -> AbstractAsyncContextManager[object]:
        return nullcontext()

    async def play(self, prompt: Prompt, seat: Seat) -> float:
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=os.environ | _variables(seat),
            start_new_session=True,  # so that its children end with it
        )
        try:
            async with asyncio.timeout(self._seconds):
                out, err = await process.communicate(prompt.text.encode() + b"\n")
        except TimeoutError:
            raise EpisodeFailedError(f"{self._command[0]} took more than {self._seconds:g} s") from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if process.returncode != 0:
            said = err.decode(errors="replace").strip()[-_SAID:]
            raise EpisodeFailedError(f"{self._command[0]} ended with {process.returncode}: {said}")
        return _reward(out.decode(errors="replace"))


def _variables(seat: Seat) -> Mapping[str, str]:
    return {"OPENAI_BASE_URL": seat.url, "OPENAI_API_KEY": seat.key, "OPENAI_MODEL": "policy"}


def _reward(out: str) -> float:
    last = (out.strip().splitlines() or [""])[-1]
    try:
        reward = float(last)
    except ValueError:
        reward = math.nan
    if not math.isfinite(reward):
        raise EpisodeFailedError(f"the last line printed is {last[:_SAID]!r}: print the reward, a number")
    return reward


def _tasks(path: Path) -> list[Prompt]:
    """Tasks of the file. Raises ValueError that names file and line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"tasks: {path} cannot be read ({error.strerror})") from None
    tasks = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            json.loads(line)
        except ValueError as error:
            raise ValueError(f"tasks: {path}, line {number} is not JSON ({error})") from None
        tasks.append(Prompt(f"{path.stem}-{number}", line, ""))
    return tasks
