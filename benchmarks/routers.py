"""`libra route` and vllm-router, in real time, on the emulated engines of plans: of one size, and of several.

Invariant: every router gets the same trajectories, all at once, over the same engines, which start empty. Each repeat
draws others.

    python -m benchmarks.routers [--quick] [--speed N] [--repeats N] [--json FILE]

Plans are for a log of search agents: two equal engines on 24 GPUs, and engines of two sizes on 16. Plan and Libra know
one half of the log's prompts; 256 trajectories of the other half are played. Seconds are the engines', whose time runs
`--speed` times as fast. Every request names its session; tools and prompts are told to Libra alone.
Without buckets Libra has to learn which engine is the faster one. With `--quick` each plan has 32 trajectories.
vllm-router is that beside this Python. Where other work has the cores, clients and routers are late, and the figures
are theirs: two cores must be free.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import socket
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
from aiohttp import ClientSession, ClientTimeout, DummyCookieJar, TCPConnector

from benchmarks.command import RefusedError, command_line, show
from benchmarks.evaluation.setting import a800_nodes, profiles_of
from benchmarks.routing_plans import SEARCH, Question, batch_seconds, halves, question
from benchmarks.rows import Row, at_most
from libra import Planner
from libra.config.listeners import EMULATOR
from libra.config.recipe import Recipe
from libra.hardware.model_file import load_model
from libra.route.cmlfq import CMLFQ
from libra.serve.emulate.server import Emulator
from libra.serve.http import serving
from libra.sim.deployment import Deployment
from libra.sim.of_plan import planned_run
from libra.trajectory import Trajectory, read_trajectories, write_trajectories
from tests.fakes.servers import answering, gateway, started, wait_until_healthy

OURS, STICKY = "libra", "sticky_least_loaded"
RIVALS = (STICKY, "cache_aware", "power_of_two", "consistent_hash", "round_robin")
SIMULATED, BARE = "libra in simulation", "libra without buckets"
EQUAL, MIXED = 1.01, 0.85  # of a rival's time
KEPT = 1.05  # of the simulated time
_MODEL, _LONGEST = "Qwen/Qwen3-14B", 40_960
_PROGRAM = Path(sys.executable).parent / "vllm-router"
Times = tuple[float, float]  # seconds of the batch, and the mean of its trajectories


def rows(options: Namespace) -> Iterator[Row]:
    if not _PROGRAM.exists():
        raise RefusedError(f"{_PROGRAM} is not there: after make test-integrations, use build/hosts/router/bin/python")
    for name, nodes, sizes, rivals in (("equal", 3, 1, (STICKY,)), ("mixed", 2, 3, (BARE, *RIVALS))):
        asked = _question(nodes, sizes)
        found: dict[str, list[Times]] = {router: [] for router in (SIMULATED, OURS, *rivals)}
        for draw in range(options.repeats):
            batch = asked.batch(draw)[:: 8 if options.quick else 1]
            for router, times in found.items():
                times.append(_played(asked, batch, router, options.speed))
        most = EQUAL if name == "equal" else MIXED
        yield from _rows(f"{name}, {asked.name}", found, most, whole=name == "equal")


def _question(nodes: int, sizes: int) -> Question:
    recipe = Recipe(batch=256, samples_per_prompt=16, max_length=_LONGEST, mode="async", staleness=1, max_buckets=sizes)
    cluster, model = a800_nodes(nodes), load_model(_MODEL)
    logs = halves([it for it in read_trajectories(SEARCH) if it.finished], 0)
    return question("search", logs, Planner(cluster, model, recipe, profiles_of(cluster, model, recipe)))


def _rows(case: str, found: Mapping[str, Sequence[Times]], most: float, whole: bool) -> Iterator[Row]:
    for index, measure in enumerate(("batch", "mean of trajectories")):
        seconds = {router: fmean(its[index] for its in times) for router, times in found.items()}
        yield from (Row(case, f"{measure}: {router}", its, "s") for router, its in seconds.items())
        ours, told, _ = seconds.pop(OURS), seconds.pop(SIMULATED), seconds.pop(BARE, None)
        yield at_most(case, f"{measure}: {OURS} / {SIMULATED}", ours / told, "x", KEPT)
        ratio = ours / min(seconds.values())
        limit = most if whole or index else None
        yield at_most(case, f"{measure}: {OURS} / best of the others", ratio, "x", limit)


def _played(asked: Question, batch: Sequence[Trajectory], router: str, speed: float) -> Times:
    if router == SIMULATED:
        return batch_seconds(asked, batch, CMLFQ.NAME)
    planned, _ = planned_run(asked.plan, batch)
    engines = tuple(replace(it, name=f"e{number}") for number, it in enumerate(planned.engines))
    deployment = replace(planned, engines=engines)
    with _emulated(deployment, speed) as base:
        urls = {it.name: f"{base}/engines/{it.name}" for it in engines}
        own = router in (OURS, BARE)
        with _ours(deployment, urls, asked.known, router == OURS) if own else _theirs(router, urls) as url:
            return asyncio.run(_play(url, batch, speed, told=own))


@contextmanager
def _emulated(deployment: Deployment, speed: float) -> Iterator[str]:
    forked = multiprocessing.get_context("fork")
    ours, its = forked.Pipe()
    process = forked.Process(target=lambda: asyncio.run(_serve(deployment, speed, its)), daemon=True)
    process.start()
    try:
        yield ours.recv()
    finally:
        process.kill()
        process.join()


async def _serve(deployment: Deployment, speed: float, told: Connection) -> None:
    application = Emulator(deployment.engines, speed, default_tokens=128, seed=0).application()
    async with serving(application, "127.0.0.1", 0, EMULATOR) as base:
        told.send(base)
        await asyncio.Event().wait()


@contextmanager
def _ours(deployment: Deployment, urls: Mapping[str, str], known: Sequence[Trajectory], buckets: bool) -> Iterator[str]:
    engines = [
        {
            "name": it.name,
            "url": f"{urls[it.name]}/v1",
            "max_model_len": it.config.max_model_len,
            "bucket": it.bucket if buckets else 0,
        }
        for it in deployment.engines
    ]
    limits = {"limits": list(deployment.limits or ())} if buckets else {}
    keys = {"turn_tokens": deployment.turn_tokens, "route": "cmlfq", **limits}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        write_trajectories(log, known)
        with started(*gateway(Path(folder) / "gateway.yaml", engines, "--learn-from", log, **keys)) as server:
            wait_until_healthy(server.process, server.said["base"])
            yield server.said["base"]


@contextmanager
def _theirs(policy: str, urls: Mapping[str, str]) -> Iterator[str]:
    with socket.socket() as one, socket.socket() as other:
        for taken in (one, other):
            taken.bind(("127.0.0.1", 0))
        port, metrics = (str(taken.getsockname()[1]) for taken in (one, other))
    command = [str(_PROGRAM), "--host", "127.0.0.1", "--port", port, "--prometheus-port", metrics]
    command += ["--policy", policy, "--request-id-headers", "x-session-id", "--worker-urls", *urls.values()]
    url = f"http://127.0.0.1:{port}"
    with answering(command, url):
        yield url


async def _play(url: str, batch: Sequence[Trajectory], speed: float, told: bool) -> Times:
    options: dict[str, Any] = {"connector": TCPConnector(limit=0), "timeout": ClientTimeout(None)}
    async with ClientSession(**options, cookie_jar=DummyCookieJar()) as client:
        began = time.monotonic()
        took = await asyncio.gather(*(_trajectory(client, url, *each, speed, told) for each in enumerate(batch)))
        return (time.monotonic() - began) * speed, fmean(took) * speed


async def _trajectory(
    client: ClientSession, url: str, number: int, played: Trajectory, speed: float, told: bool
) -> float:
    began, session = time.monotonic(), f"s{number}"
    drawn = random.Random(played.prompt_id)  # samples of a prompt share it
    ids = drawn.choices(range(1000, 90_000), k=played.prompt_tokens)
    said: dict[str, Any] = {}
    headers = {"X-Session-ID": session, "Content-Type": "application/json"}
    for turn in played.turns:
        body: dict[str, Any] = {"prompt": ids, "max_tokens": turn.generated_tokens, "return_token_ids": True}
        if told:
            body["libra"] = {"trajectory": session, "prompt": played.prompt_id, "task": played.task, **said}
        data = msgspec.json.encode(body)  # of long contexts, for which a client has no time to lose
        async with client.post(f"{url}/v1/completions", data=data, headers=headers) as answer:
            answer.raise_for_status()
            ids = ids + msgspec.json.decode(await answer.read())["choices"][0]["token_ids"]
        ids = ids + random.Random(f"{session} {len(ids)}").choices(range(1000, 90_000), k=turn.returned_tokens)
        said = {"tool": {"name": turn.tool, "status": turn.status}} if turn.tool else {}
        await asyncio.sleep((turn.tool_seconds or 0.0) / speed)
    async with client.post(f"{url}/finish_session", params={"session_id": session}):
        return time.monotonic() - began


if __name__ == "__main__":
    parser = command_line("routers", __doc__, quick="few trajectories: a first look")
    parser.add_argument("--speed", type=float, default=2.0, metavar="N", help="of the engines' time (default: 2)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="runs of each router (default: 3)")
    show(parser, rows)
