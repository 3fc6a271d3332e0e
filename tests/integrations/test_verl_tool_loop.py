"""verl's own tool agent loop over Libra's router, in Ray actors: its trajectories are those that it had."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl is not here: make test-integrations")

import ray
from integrations.verl_stage import ScriptedServer, config, loop_parts, ray_here, router_file
from verl.experimental.agent_loop.agent_loop import ToolListWrap, _agent_loop_registry
from verl.tools.function_tool import FunctionTool, OpenAIFunctionToolSchema
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient
from verl.workers.rollout.router import get_router_handle

from libra.integrations.verl import LibraToolAgentLoop
from libra.trajectory import Trajectory, read_trajectories


def double(number: int) -> str:
    if number == 1:
        raise ValueError("an odd one")
    return str(2 * number)


SCHEMA = OpenAIFunctionToolSchema.model_validate(
    {
        "type": "function",
        "function": {
            "name": "double",
            "description": "twice a number",
            "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
        },
    }
)
TOOLS = ToolListWrap([FunctionTool("double", double, SCHEMA)])


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, Any]]:
    with ray_here():
        yield {f"s{i}": ScriptedServer.remote(seconds=0.3) for i in range(3)}


async def episodes(client: Any, number: int) -> list[Any]:
    async def episode(index: int) -> Any:
        loop = LibraToolAgentLoop(**loop_parts(client), tools=TOOLS)
        prompt = [{"role": "user", "content": f"question {index // 2}"}]
        return await loop.run({"max_tokens": 200}, raw_prompt=prompt, uid=f"uid-{index // 2}", data_source="numbers")

    return await asyncio.gather(*(episode(index) for index in range(number)))


def kept(path: Path, number: int, router: Any) -> list[Trajectory]:
    ray.get(router.get_status.remote())  # after all that the loops have told
    trajectories = list(read_trajectories(path))
    assert len(trajectories) == number
    return trajectories


async def test_trajectories_are_those_of_the_loops(servers: dict[str, Any], tmp_path: Path) -> None:
    router = get_router_handle(servers, router_file(tmp_path, log=str(tmp_path / "log.jsonl"), max_model_len=8192))
    client = FullyAsyncLLMServerClient(config(), router)
    outputs = await episodes(client, 8)
    trajectories = kept(tmp_path / "log.jsonl", 8, router)
    assert sorted(it.prompt_id for it in trajectories) == sorted(2 * [f"uid-{i}" for i in range(4)])
    for it in trajectories:
        assert it.task == "numbers" and it.policy_version == 4 and it.finished
        assert [(turn.tool, turn.status) for turn in it.turns] == [
            ("double", "ok"), ("double", "error"), ("double", "ok"), (None, None),
        ]  # fmt: skip
    tokens = sorted((len(it.prompt_ids), sum(it.response_mask), len(it.response_ids)) for it in outputs)
    assert tokens == sorted(
        (it.prompt_tokens, sum(turn.generated_tokens for turn in it.turns), it.final_context - it.prompt_tokens)
        for it in trajectories
    )
    status = ray.get(router.get_status.remote())
    assert status["total_inflight"] == 0 and status["trajectories"] == 0
    assert set(status["load_tokens"].values()) == {0}


async def test_a_loop_that_fails_is_forgotten(servers: dict[str, Any], tmp_path: Path) -> None:
    router = get_router_handle(servers, router_file(tmp_path))
    loop = LibraToolAgentLoop(**loop_parts(FullyAsyncLLMServerClient(config(), router)), tools=TOOLS)
    with pytest.raises(Exception, match="no sampling"):
        await loop.run({"max_tokens": Unsound()}, raw_prompt=[{"role": "user", "content": "?"}])
    assert ray.get(router.get_status.remote())["trajectories"] == 0


class Unsound(int):
    def __sub__(self, other: int) -> int:
        raise ValueError("no sampling")

    def __reduce__(self) -> Any:
        return int, (200,)


def test_it_is_registered_and_refuses_the_default_router(servers: dict[str, Any]) -> None:
    assert _agent_loop_registry["libra_tool_agent"]["_target_"].endswith("LibraToolAgentLoop")
    client = FullyAsyncLLMServerClient(config(), get_router_handle(servers))
    with pytest.raises(TypeError, match="router_config_path"):
        LibraToolAgentLoop(**loop_parts(client), tools=TOOLS)


def test_the_log_is_learned_from_at_the_next_start(servers: dict[str, Any], tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    path = router_file(tmp_path, log=str(log))
    for number in range(2):
        router = get_router_handle(servers, path)
        asyncio.run(episodes(FullyAsyncLLMServerClient(config(), router), 2))
        assert len(kept(log, 2 * (number + 1), router)) == 2 * (number + 1)
    assert all("crc" in json.loads(line) for line in log.read_text().splitlines())


async def test_a_server_that_is_removed_in_mid_run_loses_no_turn(servers: dict[str, Any], tmp_path: Path) -> None:
    router = get_router_handle(servers, router_file(tmp_path, log=str(tmp_path / "log.jsonl")))
    client = FullyAsyncLLMServerClient(config(), router)
    running = asyncio.create_task(episodes(client, 12))
    while min(ray.get(router.get_status.remote())["servers"].values()) == 0:
        await asyncio.sleep(0.01)
    ray.get(router.remove_servers.remote(["s1"]))
    await servers["s1"].abort.remote()
    outputs = await running
    assert {sum(it.response_mask) for it in outputs} == {sum(outputs[0].response_mask)}
    trajectories = kept(tmp_path / "log.jsonl", 12, router)
    assert {len(it.turns) for it in trajectories} == {4}
    assert {sum(turn.generated_tokens for turn in it.turns) for it in trajectories} == {sum(outputs[0].response_mask)}
    assert ray.get(router.get_all_servers.remote()) == ["s0", "s2"]
