"""A taskset of verifiers as the environment of `libra run`: verifiers plays and scores, the run's engines answer.

Invariant: one rollout of verifiers is one episode, with the sum of its weighted rewards. Its agent runs as a process of
this machine unless the options name another runtime.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any

try:
    import verifiers.v1 as vf
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"{error}; pip install 'verifiers>=0.4,<0.5'") from None
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.runtimes import SubprocessConfig
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

from libra.environments.protocol import Prompt
from libra.environments.served import EpisodeFailedError, Seat, split_of

_KEY = "LIBRA_EPISODE_KEY"  # verifiers reads keys from the environment only


class VerifiersEnvironment:
    """`kind: verifiers`. Its options: `id` of a taskset that can be imported; `env`, what else `--env` of verifiers
    takes; `tasks`, to take no more than the first of a taskset; `turn_tokens`."""

    def __init__(
        self, id: str, env: Mapping[str, Any] | None = None, tasks: int | None = None, turn_tokens: int = 1024
    ) -> None:
        self.name, self.turn_tokens = id, turn_tokens
        try:
            self._env = load_environment(_config(id, env or {}))
        except (ImportError, AttributeError) as error:  # of a module that is none, or has none
            raise ValueError(f"{id}: {error}") from None
        if tasks is None and not self._env.taskset.bounded:
            raise ValueError(f"the taskset {id} has no end: give tasks, how many of them there are")
        self._tasks = {f"{id}-{number}": task for number, task in enumerate(islice(self._env.taskset, tasks))}
        self._model: Any = None

    def prompts(self, split: str, count: int, seed: int) -> list[Prompt]:
        return split_of([Prompt(name, "", "") for name in self._tasks], split, count, seed)

    @asynccontextmanager
    async def opened(self, url: str, key: str) -> AsyncIterator[None]:
        os.environ[_KEY] = key
        try:
            client = vf.EvalClientConfig(base_url=url, api_key_var=_KEY)
            self._model = vf.ModelContext(model="policy", client=client)
            async with self._env.serving():
                yield
        finally:
            del os.environ[_KEY]

    async def play(self, prompt: Prompt, seat: Seat) -> float:
        task = self._tasks[prompt.id]
        # verifiers names each rollout by the id of its trace, in the header X-Session-ID of its requests.
        episode = await self._env.run_episode(task, self._model, on_trace=lambda trace: seat.also_named(trace.id))
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            raise EpisodeFailedError("; ".join(f"{error.type}: {error.message}" for error in errors) or "not completed")
        return float(episode.traces[-1].reward)


def _config(id: str, env: Mapping[str, Any]) -> Any:
    """Raises ValueError where more than one agent plays, since an episode has one reward here."""
    config = resolve_env_config({**env, "taskset": {**env.get("taskset", {}), "id": id}})
    roles = agent_config_fields(config)
    if len(roles) != 1:
        raise ValueError(f"{id} has the agents {', '.join(roles)}: give an environment with one")
    [(name, role)] = roles.items()
    if "runtime" in role.model_fields_set:
        return config
    return config.model_copy(update={name: role.model_copy(update={"runtime": SubprocessConfig()})})
