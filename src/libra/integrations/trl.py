"""TRL's AsyncGRPO on engines behind `libra route`: rollouts report trajectories, tools and rewards, and new weights
reach every engine.

Invariant: a scored rollout becomes a finished trajectory of the gateway, with its reward; the gateway forgets a rollout
that is not used. TRL has no public interface for this, so private methods of its rollout loop are extended, and its
version is checked.
"""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import aiohttp
import requests
import torch
import trl
from packaging.version import Version
from safetensors.torch import save_file
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker, _AsyncRolloutLoop
from trl.experimental.async_grpo.vllm_client import VLLMClient

_LOG = logging.getLogger(__name__)
_FIRST, _BEYOND = "1.16", "1.18"
_FINISH_SECONDS = 30.0
_told: ContextVar[dict[str, Any]] = ContextVar("field libra of the next turn of this rollout")

if not Version(_FIRST) <= Version(trl.__version__) < Version(_BEYOND):
    raise ImportError(f"libra.integrations.trl needs trl>={_FIRST},<{_BEYOND}; this is {trl.__version__}")


class LibraRolloutLoop(_AsyncRolloutLoop):
    """TRL's rollout loop, with the field `libra` in each turn."""

    def __init__(self, **keys: Any) -> None:
        super().__init__(**keys)
        self._run = uuid.uuid4().hex[:8]  # groups are counted from 0 in every run
        self._ids: dict[str, str] = {}  # trajectories by TRL's rollout id, until they are scored

    async def _generate_one(self, prompt: Any, tool_dict: Any, tools: Any, group_id: int = 0) -> Any:
        id = uuid.uuid4().hex
        _told.set({"trajectory": id, "prompt": f"{self._run}-{group_id}"})
        done = await super()._generate_one(prompt, tool_dict, tools, group_id)
        if sequences := done[2]:
            self._ids[sequences[0].rollout_id] = id
        else:
            await self._tell(f"/trajectories/{id}/forget", {})
        return done

    async def _execute_tool_calls(self, tool_calls: Any, tool_dict: Any) -> Any:
        done = await super()._execute_tool_calls(tool_calls, tool_dict)
        status = "error" if done[2] else "ok"
        _told.set({**_told.get(), "tool": {"name": tool_calls[-1]["function"]["name"], "status": status}})
        return done

    async def _post(self, path: str, payload: dict[str, Any], timeout: float, max_retries: int = 3) -> Any:
        if path.startswith("/v1/") and (told := _told.get(None)) is not None:
            payload = {**payload, "libra": told}
        return await super()._post(path, payload, timeout, max_retries)

    async def _score_group(self, group: Any) -> Any:
        samples = await super()._score_group(group)
        conversations, ends = group.completions_sequences, []
        for sequences, reward in zip(conversations, _rewards(conversations, samples), strict=True):
            if sequences and (id := self._ids.pop(sequences[0].rollout_id, None)) is not None:
                outcome = {"reward": reward, "policy_version": group.model_version}
                ends.append(self._tell(f"/trajectories/{id}/finish", outcome))
        await asyncio.gather(*ends)
        return samples

    async def _tell(self, path: str, body: dict[str, Any]) -> None:
        """Report an end to the gateway. Training continues if the gateway does not answer."""
        try:
            await super()._post(path, body, _FINISH_SECONDS)
        except (aiohttp.ClientError, OSError) as error:
            _LOG.warning("the gateway did not receive %s: %s", path, error)


def _rewards(conversations: Iterable[Sequence[Any]], samples: Sequence[Any]) -> Iterator[float | None]:
    """Reward of each conversation; None if it was not scored. A conversation has one sample per training sequence, in
    the same order.
    """
    first = 0
    for sequences in conversations:
        reward = samples[first].metrics["reward"] if sequences else math.nan
        yield None if math.isnan(reward) else reward
        first += len(sequences)


class LibraRolloutWorker(AsyncRolloutWorker):
    """`rollout_worker` of AsyncGRPOTrainer. It takes the arguments of TRL's worker; `vllm_server_url` is the address
    of `libra route`."""

    _loop_cls = LibraRolloutLoop


class FleetWeights:
    """`weight_transfer` of AsyncGRPOTrainer: each version is a file that all engines in service load in place.

    `directory` is on a disk that trainer and engines share. An engine that joins later gets the next version; until
    then it has its initial weights. Engines need VLLM_SERVER_DEV_MODE=1.
    """

    def __init__(self, gateway: str, directory: Path | str, timeout: float = 1800.0) -> None:
        self._client = VLLMClient(gateway)
        self._directory, self._timeout = Path(directory).absolute(), timeout

    def init_weight_transfer(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._client.wait_for_server_ready()

    def pause(self) -> None:
        """Stop engines between two iterations; turns in flight are kept."""
        self._client.pause(self._timeout)

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Send the weights to all engines. Raises RuntimeError with the engine's answer if an engine does not load
        them.
        """
        part = self._directory / "model.part"
        save_file({name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in iterator}, part)
        part.replace(self._directory / "model.safetensors")  # an engine may still have the last version mapped
        self._order("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(self._directory)}})
        self._order("/reset_prefix_cache", {})

    def resume(self) -> None:
        self._client.resume(self._timeout)

    def destroy(self) -> None:
        """Do nothing: the last version stays on disk."""

    def _order(self, path: str, body: dict[str, Any]) -> None:
        answer = requests.post(f"{self._client.server_url}{path}", json=body, timeout=self._timeout)
        if answer.status_code != 200:
            raise RuntimeError(f"{path}: status {answer.status_code}: {answer.text}")
