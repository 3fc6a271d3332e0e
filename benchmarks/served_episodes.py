"""CPU time of a turn in the controller of a run: of the built-in agent loop, of a chat client, and of verifiers.

    python -m benchmarks.served_episodes [--quick] [--json FILE]

Engines answer at once: three calls of the calculator, then a number. The chat client is in the same process, so its
time counts, too; verifiers has a process of its own. It is measured where it is installed.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import aiohttp
import psutil
from transformers import PreTrainedTokenizerFast

from benchmarks.command import command_line, show
from benchmarks.rows import Row, below
from libra.backends.chat_format import ChatFormat
from libra.backends.protocols import Engine
from libra.backends.tiny_model import TokenizerCodec, write_tiny_model
from libra.backends.transport.engine_messages import Generate, Piece
from libra.config.run import EnvironmentConfig, ModelConfig
from libra.environments.calculator import Calculator
from libra.environments.protocol import Prompt
from libra.environments.registry import load_environment
from libra.environments.served import Seat, ServedEnvironment
from libra.live.pace import Pace
from libra.live.work import LiveWork
from libra.loop.episode import EpisodeMaker, EpisodeRequest
from libra.loop.episode_server import EpisodeServer
from libra.loop.fleet import ServingEngine, ServingFleet
from libra.loop.rollout import Rollout
from libra.loop.served_rollout import ServedRollout
from libra.loop.turn_maker import TurnMaker, TurnReport
from libra.plan.allocation import Allocation, Bucket
from libra.route.baselines import LeastLoaded
from tests.fakes.engines import OnItsOwnDevice

_EXAMPLES = Path(__file__).parents[1] / "examples"
_GOAL = 5.0  # ms of a turn above that of the built-in agent loop
_CALLS = 3  # of an episode
_AT_ONCE = 16  # episodes
_LONGEST = 192
_PROMPT = Prompt("p", "Q1+2+2+2;", "7")
_TEMPLATE = "{% for m in messages %}{{ m.content }}{% if not m.content.endswith(';') %};{% endif %}{% endfor %}"


class _ReadyEngine(OnItsOwnDevice):
    """Answers at once."""

    name = "e"

    def __init__(self, codec: TokenizerCodec) -> None:
        self.work = LiveWork(Pace())
        self._call, self._answer, [self._returned] = (codec.encode(text) for text in (">1+2;", "A7;", "="))

    async def generate(self, request: Generate, take: Callable[[Piece], None]) -> None:
        over = request.tokens.count(self._returned) >= _CALLS
        tokens = self._answer if over else self._call
        take(Piece(request.id, 0, list(tokens), [-1.0] * len(tokens)))


class _Unwatched:
    def turn(self, report: TurnReport) -> None: ...
    def turns(self, worker: str, change: int) -> None: ...
    def tools(self, worker: str, change: int) -> None: ...


class _Client:
    """An environment that is no more than a chat client."""

    name, turn_tokens = "calculator", 16

    def prompts(self, split: str, count: int, seed: int) -> list[Prompt]:
        return [_PROMPT] * count

    @asynccontextmanager
    async def opened(self, logs: Path) -> AsyncIterator[None]:
        async with aiohttp.ClientSession() as self._session:
            yield

    async def play(self, prompt: Prompt, seat: Seat) -> float:
        messages = [{"role": "user", "content": prompt.text}]
        url, headers = f"{seat.url}/chat/completions", {"Authorization": f"Bearer {seat.key}"}
        for _ in range(_CALLS + 1):
            async with self._session.post(url, headers=headers, json={"messages": messages}) as answer:
                messages.append((await answer.json())["choices"][0]["message"])
            messages.append({"role": "user", "content": "=3;"})
        return 1.0


def rows(options: Namespace) -> list[Row]:
    with tempfile.TemporaryDirectory() as directory:
        return asyncio.run(_rows(Path(directory), 50 if options.quick else 500))


async def _rows(directory: Path, episodes: int) -> list[Row]:
    calculator = Calculator(latency=0.0)
    write_tiny_model(directory, ModelConfig(), calculator.alphabet, _LONGEST)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(directory / "tokenizer.json"), eos_token=";", chat_template=_TEMPLATE
    )
    tokenizer.save_pretrained(directory)
    codec, chat = TokenizerCodec(directory), ChatFormat(directory)
    fleet = ServingFleet(LeastLoaded(), Allocation(1, (Bucket("all", 1, 0, _LONGEST),)))
    fleet.add(ServingEngine(cast(Engine, _ReadyEngine(codec)), "all", _LONGEST))
    built_in = Rollout(calculator, ["calculator"], codec, fleet, _LONGEST, _Unwatched(), time.monotonic)
    base, _ = await _milliseconds(built_in, _PROMPT, episodes)
    rows = [Row("built-in agent loop", "CPU time of a turn", base, "ms")]
    environments: dict[str, ServedEnvironment] = {"a chat client": _Client()}
    if find_spec("verifiers") is not None:
        options = {"id": "calculator_verifiers", "env": {"agent": {"harness": {"id": "calculator_verifiers"}}}}
        found: Any = load_environment(EnvironmentConfig(kind="verifiers", options=options), _EXAMPLES)
        environments["verifiers"] = found
    for name, environment in environments.items():
        async with EpisodeServer.open() as server, environment.opened(directory):
            turns = TurnMaker(name, chat.stop_token, fleet, _Unwatched())
            served = ServedRollout(environment, chat, server, turns, _LONGEST, time.monotonic)
            [prompt] = environment.prompts("heldout", 1, 0)
            own, apart = await _milliseconds(served, prompt, episodes)
            rows.append(below(name, "CPU time of a turn, beyond that", own - base, "ms", _GOAL))
            if apart:
                rows.append(Row(name, "CPU time of a turn in its own process", apart, "ms"))
    return rows


async def _milliseconds(maker: EpisodeMaker, prompt: Prompt, episodes: int) -> tuple[float, float]:
    """Mean CPU time of a turn in this process, and in those that it has started, after a few episodes to warm up."""
    under_way = asyncio.Semaphore(_AT_ONCE)

    async def one(name: str) -> int:
        async with under_way:
            return len((await maker.episode(EpisodeRequest(name, prompt, 0.0, 1.0))).trajectory.turns)

    await asyncio.gather(*(one(f"warm-{number}") for number in range(_AT_ONCE)))
    began, apart = time.process_time(), _apart()
    turns = sum(await asyncio.gather(*(one(f"{number}") for number in range(episodes))))
    return 1e3 * (time.process_time() - began) / turns, 1e3 * (_apart() - apart) / turns


def _apart() -> float:
    """CPU seconds of the processes that this one has started."""
    times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return sum(each.user + each.system for each in times)


if __name__ == "__main__":
    show(command_line("served_episodes", __doc__, quick="a tenth of the episodes"), rows)
