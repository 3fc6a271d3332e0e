"""A policy of the user's own that raises: an answer, and a line in the log."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from aiohttp import ClientSession
from serve.field_engine import FieldEngine

from libra.route.custom import load_policy
from libra.serve.gateway.config import GatewayConfig, UpstreamSection
from libra.serve.gateway.server import Gateway
from libra.serve.http import serving
from libra.trajectory import Trajectory

OWN = """
from libra.route.baselines import LeastLoaded
from libra.route.policy import Placement


class Mine(LeastLoaded):
    def place(self, request, fleet):
        if request.task == "raises":
            raise RuntimeError("over and\\nout")
        if request.task == "elsewhere":
            return Placement("nowhere", 0, False, "a guess")
        return super().place(request, fleet)

    def finished(self, trajectory):
        raise KeyError("learned nothing")

    def instance_gone(self, instance):
        raise OSError("gone")
"""


async def test_each_failure_is_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    name, kept, engine = f"{tmp_path / 'mine.py'}:Mine", list[Trajectory](), FieldEngine()
    async with engine.serving() as root:
        section = UpstreamSection(name="f0", url=root, max_model_len=4096)
        gateway = Gateway(GatewayConfig(engines=(section,), route=name), load_policy(name), kept.append)
        async with serving(gateway.application(), "127.0.0.1", 0) as base, ClientSession(base) as session:

            async def ask(task: str) -> tuple[int, str]:
                body = {"prompt": "a", "libra": {"trajectory": "t", "task": task}}
                async with session.post("/v1/completions", json=body) as answer:
                    return answer.status, await answer.text()

            for task in ("raises", "elsewhere"):
                status, said = await ask(task)
                assert status == 500 and "the routing policy failed" in said and str(tmp_path) not in said
                async with session.post("/trajectories/t/forget") as answer:
                    assert answer.status == 204
            assert (await ask("well"))[0] == 200  # the trajectory is not stuck
            async with session.post("/trajectories/t/finish", json={}) as answer:
                assert answer.status == 200
            engine.health = 503
            gateway.upstreams.all["f0"].look.set()
            async with asyncio.timeout(10):
                while gateway.upstreams.instances:
                    await asyncio.sleep(0.01)
                engine.health = 200
                while not gateway.upstreams.instances:  # it is checked on
                    await asyncio.sleep(0.01)
    assert len(kept) == 1 and gateway.counts.finished == 1
    lines = [it.getMessage() for it in caplog.records if it.levelname == "ERROR"]
    assert lines == [
        f"policy {name}: place raised RuntimeError: over and out",
        f"policy {name}: its choice 'nowhere' is not an engine; see GET /engines",
        f"policy {name}: finished raised KeyError: 'learned nothing'",
        f"policy {name}: instance_gone raised OSError: gone",
    ]
    assert not any(it.exc_info for it in caplog.records)
