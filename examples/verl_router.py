"""verl's own client and router handle over stand-ins of its servers: python examples/verl_router.py"""

import asyncio
import random
from pathlib import Path

import ray
from omegaconf import OmegaConf
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.router import get_router_handle


@ray.remote(num_cpus=0, max_concurrency=64)
class Server:
    """In the place of verl's vLLM server: the same call, a millisecond a token."""

    async def generate(self, request_id: str, prompt_ids: list[int], sampling_params: dict, **_: object) -> TokenOutput:
        await asyncio.sleep(sampling_params["max_tokens"] / 1000)
        return TokenOutput(token_ids=[1] * sampling_params["max_tokens"], extra_fields={"global_steps": 0})


async def episode(client: LLMServerClient, router: object, name: str) -> None:
    ids = [1] * random.randint(50, 200)
    router.began.remote(name, name, "example")
    for turn in range(random.randint(1, 6)):
        if turn:  # the loop libra_tool_agent tells the router of all this by itself
            router.returned.remote(name, "search", "ok")
            ids += [2] * 40
        out = await client.generate(name, prompt_ids=ids, sampling_params={"max_tokens": random.randint(10, 60)})
        router.answered.remote(name, len(ids), len(out.token_ids))
        ids = ids + out.token_ids
    router.finished.remote(name, 1.0, 0)


async def main() -> None:
    servers = {f"server-{i}": Server.remote() for i in range(2)}
    router = get_router_handle(servers, router_config_path=str(Path(__file__).with_name("verl_router.yaml")))
    client = LLMServerClient(OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "vllm"}}}), router)
    await asyncio.gather(*(episode(client, router, f"episode-{i}") for i in range(24)))
    print(ray.get(router.get_status.remote()))


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False)
    asyncio.run(main())
