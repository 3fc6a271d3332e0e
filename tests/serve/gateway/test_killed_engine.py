"""An engine's process is killed, with turns under way, and comes back."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from pathlib import Path
from typing import Any

from aiohttp import ClientSession
from serve.processes import ended, one_engine, start

from libra.route.cmlfq import CMLFQ
from libra.serve.gateway.config import GatewayConfig, UpstreamSection
from libra.serve.gateway.server import Gateway
from libra.serve.http_service import serving
from libra.trajectory import Trajectory

TRAJECTORIES, TURNS, TOKENS = 24, 3, 400


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_no_turn_is_lost_or_counted_twice(tmp_path: Path) -> None:
    file = str(one_engine(tmp_path))
    ports = [free_port() for _ in range(2)]
    finished: list[Trajectory] = []

    async def trajectory(session: ClientSession, id: str) -> float:
        """The seconds of its longest turn."""
        longest, prompt = 0.0, [sum(map(ord, id))] * 50
        for _ in range(TURNS):
            libra = {"trajectory": id, "prompt": id, "tool": {"name": "t", "status": "ok"}}
            body: dict[str, Any] = {"prompt": prompt, "max_tokens": TOKENS, "return_token_ids": True, "libra": libra}
            began = time.monotonic()
            async with session.post("/v1/completions", json=body) as response:
                assert response.status == 200
                answer = json.loads(await response.text())
            longest = max(longest, time.monotonic() - began)
            prompt = [*prompt, *answer["choices"][0]["token_ids"], 7, 7, 7]
        async with session.post(f"/trajectories/{id}/finish") as response:
            assert response.status == 200
        return longest

    async def main() -> None:
        sections = tuple(
            UpstreamSection(name=f"e{number}", url=f"http://127.0.0.1:{port}/v1", max_model_len=16384)
            for number, port in enumerate(ports)
        )
        gateway = Gateway(GatewayConfig(engines=sections), CMLFQ(), finished.append)
        async with serving(gateway.application(), "127.0.0.1", 0) as base, ClientSession(base) as session:
            turns = [asyncio.create_task(trajectory(session, str(number))) for number in range(TRAJECTORIES)]
            while gateway.counts.turns < TRAJECTORIES // 2 or not gateway.upstreams.all["e0"].in_flight:
                await asyncio.sleep(0.01)
            processes[0].kill()
            processes[0].wait()
            longest = max(await asyncio.gather(*turns))
            assert gateway.counts.retries > 0 and gateway.counts.turns == TRAJECTORIES * TURNS
            assert [engine.id for engine in gateway.upstreams.instances] == ["e1"]
            # What was lost is asked again at once: a turn takes about a second, and twice that if it was lost.
            assert longest < 5
            again, _ = start("emulate", file, "--speed", "10", port=ports[0])
            processes.append(again)
            began = time.monotonic()
            while len(gateway.upstreams.instances) < 2:
                assert time.monotonic() - began < 5
                await asyncio.sleep(0.02)
            assert max(await asyncio.gather(*(trajectory(session, f"later {it}") for it in range(4)))) < 5
            assert gateway.upstreams.all["e0"].turns > 0

    with ended() as processes:
        processes += [start("emulate", file, "--speed", "10", port=port)[0] for port in ports]
        asyncio.run(main())
    assert sorted(it.id for it in finished) == sorted(
        [str(number) for number in range(TRAJECTORIES)] + [f"later {it}" for it in range(4)]
    )
    for it in finished:
        assert [turn.generated_tokens for turn in it.turns] == [TOKENS] * TURNS
        assert [turn.returned_tokens for turn in it.turns] == [3] * (TURNS - 1) + [0]
        assert it.contexts() == (50, 453, 856)
