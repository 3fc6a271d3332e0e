"""The process in which verifiers plays and scores the episodes of `libra run`: `integrations/verifiers.py` starts it.

Invariant: one rollout of verifiers is one episode, with the sum of its weighted rewards. Its agent runs as a process on
this machine unless the options name another runtime. A line of JSON on standard input requests an episode, and a line
on standard output answers. All other output goes to the log.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping
from itertools import islice
from typing import Any, TextIO

import verifiers.v1 as vf
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.runtimes import SubprocessConfig
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

_KEY = "LIBRA_EPISODE_KEY"  # verifiers reads keys from the environment only
_SAID = 2000  # characters of an error
_LEAVE_SECONDS = 5  # to end what verifiers has started


class VerifiersPlayer:
    """The tasks of a taskset. Raises ValueError if it cannot be loaded."""

    def __init__(self, id: str, env: Mapping[str, Any], most: int | None) -> None:
        try:
            self._env = load_environment(_config(id, env))
        except (ImportError, AttributeError) as error:  # error of a module without a taskset
            raise ValueError(f"{id}: {error}") from None
        if most is None and not self._env.taskset.bounded:
            raise ValueError(f"the taskset {id} is infinite: set tasks to the number of tasks to use")
        self.tasks = list(islice(self._env.taskset, most))

    async def answer(self, asked: TextIO, answers: TextIO) -> None:
        """Play the requested episodes until standard input ends."""
        lines = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), asked)
        playing: set[asyncio.Task[None]] = set()
        async with self._env.serving():
            while line := await lines.readline():
                task = asyncio.create_task(self._tell(json.loads(line), answers))
                playing.add(task)
                task.add_done_callback(playing.discard)
            signal.alarm(_LEAVE_SECONDS)  # ends this process if it does not end by itself
            for task in playing:
                task.cancel()

    async def _tell(self, order: Mapping[str, Any], answers: TextIO) -> None:
        try:
            said: dict[str, Any] = {"reward": await self._play(order)}
        except Exception as error:  # noqa: BLE001 - a task may raise anything
            said = {"failed": f"{type(error).__name__}: {error}"[:_SAID]}
        print(json.dumps({"number": order["number"], **said}), file=answers)

    async def _play(self, order: Mapping[str, Any]) -> float:
        def named(trace: vf.Trace) -> None:
            trace.id = order["session"]  # verifiers sends it as X-Session-ID

        os.environ[_KEY] = order["key"]
        # One URL for all episodes: verifiers keeps a client for each URL until it ends.
        model = vf.ModelContext(model="policy", client=vf.EvalClientConfig(base_url=order["server"], api_key_var=_KEY))
        episode = await self._env.run_episode(self.tasks[order["task"]], model, on_trace=named)
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors) or "not completed")
        return float(episode.traces[-1].reward)


def _config(id: str, env: Mapping[str, Any]) -> Any:
    """Configuration of verifiers. Raises ValueError if more than one agent plays, since an episode has one reward."""
    config = resolve_env_config({**env, "taskset": {**env.get("taskset", {}), "id": id}})
    roles = agent_config_fields(config)
    if len(roles) != 1:
        raise ValueError(f"{id} has the agents {', '.join(roles)}: give an environment with one")
    [(name, role)] = roles.items()
    if "runtime" in role.model_fields_set:
        return config
    return config.model_copy(update={name: role.model_copy(update={"runtime": SubprocessConfig()})})


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    options = json.loads(sys.argv[1])
    sys.path[:] = options.pop("path")  # of the run, which finds tasksets beside its file
    try:
        player = VerifiersPlayer(**options)
    except ValueError as error:
        print(json.dumps({"refused": str(error)}), file=answers)
        return
    print(json.dumps({"tasks": len(player.tasks)}), file=answers)
    asyncio.run(player.answer(sys.stdin, answers))


if __name__ == "__main__":
    main()
