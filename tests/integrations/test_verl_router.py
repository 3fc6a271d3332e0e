"""The router has verl's protocol, and answers verl's own clients."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl is not here: make test-integrations")

import ray
from integrations.verl_stage import ScriptedServer, config, ray_here, router_file, tokenizer
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.router import GlobalRequestLoadBalancer, RequestLoadBalancer, get_router_handle

from libra.integrations.verl import Router

PROTOCOL = [name for name, _ in inspect.getmembers(RequestLoadBalancer, inspect.isfunction) if name[0] != "_"]
HANDLES = {f"s{i}": f"handle {i}" for i in range(3)}


def test_it_has_all_methods_of_the_protocol() -> None:
    assert len(PROTOCOL) == 10
    for name in PROTOCOL:
        wanted, given = inspect.signature(getattr(RequestLoadBalancer, name)), inspect.signature(getattr(Router, name))
        required = [it for it in wanted.parameters if it != "extra"]
        assert list(given.parameters)[: len(required)] == required, name
    assert set(Router({}, {}).require_acquire_fields()) <= set(inspect.signature(LLMServerClient.generate).parameters)


@pytest.mark.parametrize("made", [lambda: Router(HANDLES, {}), lambda: GlobalRequestLoadBalancer(HANDLES)])
def test_answers_have_the_shapes_of_verls_own(made: Any) -> None:
    of = made()
    keys = {"prompt_ids": [1, 2]} if isinstance(of, Router) else {}
    server, handle = of.acquire_server(request_id="r", **keys)
    assert HANDLES[server] == handle
    assert of.get_total_inflight() == 1 and of.get_all_servers() == list(HANDLES)
    status = of.get_status()
    assert status["servers"] == {name: int(name == server) for name in HANDLES}
    assert (status["total_inflight"], status["active_servers"]) == (1, 3)
    assert of.clear_sticky_cache() == {"cleared_entries": 1, "server_loads": status["servers"]}
    of.release_server(server_id=server, request_id="r")
    of.remove_servers(server_ids=["s0", "s1", "unknown"])
    assert of.get_all_servers() == ["s2"] and of.get_total_inflight() == 0
    of.add_servers(servers={"s9": "handle 9"})
    assert of.get_all_servers() == ["s2", "s9"]
    of.remove_servers(server_ids=["s2", "s9"])
    with pytest.raises(RuntimeError, match="No available servers in load balancer"):
        of.acquire_server(request_id="r", **keys)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ({"rout": "cmlfq"}, "did you mean route"),
        ({"route": "cmlf"}, "did you mean cmlfq"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"route": "cmlfq", "sticky": False}, "leave sticky true"),
    ],
)
def test_a_file_that_is_wrong_is_refused(file: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Router({}, file)


async def test_verls_client_waits_for_the_first_server_of_an_empty_pool(tmp_path: Path) -> None:
    with ray_here():
        router = get_router_handle({}, router_file(tmp_path, route="least-loaded"))
        prompt = tokenizer().encode("<tool>|<tool>|<tool>|<assistant>")
        waits = FullyAsyncLLMServerClient(config(), router, only_hybrid=True)
        asked = asyncio.create_task(waits.generate("r", prompt_ids=prompt, sampling_params={"max_tokens": 20}))
        with pytest.raises(RuntimeError, match="No available servers"):
            await FullyAsyncLLMServerClient(config(), router).generate("q", prompt_ids=prompt, sampling_params={})
        await asyncio.sleep(0)
        assert not asked.done()
        ray.get(router.add_servers.remote({"s0": ScriptedServer.remote()}))
        assert tokenizer().decode((await asked).token_ids) == "the end|"
