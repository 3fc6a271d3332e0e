"""The example of a command as an environment, against a model that calls the calculator."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from fakes.chats import write_chat_model
from fakes.engines import Script, ScriptedEngine, turn
from fakes.scripted import FirstInstance, Unwatched, make_fleet

from libra.backends.chat_format import ChatFormat
from libra.environments.command import CommandEnvironment
from libra.loop.episode import Episode
from libra.loop.episode_server import EpisodeServer
from libra.loop.served_rollout import ServedRollout
from libra.loop.turn_maker import TurnMaker

EXAMPLE = Path(__file__).parents[2] / "examples/calculator_command.py"


def play(tmp_path: Path, *texts: str) -> Episode:
    write_chat_model(tmp_path)
    chat = ChatFormat(tmp_path)
    tasks = tmp_path / "sums.jsonl"
    tasks.write_text('{"question": "Q12+7", "answer": 19}\n' * 5)
    environment = CommandEnvironment([sys.executable, str(EXAMPLE)], str(tasks))
    [prompt] = environment.prompts("heldout", 1, 0)
    script = Script(*(turn(chat.encode(text)) for text in texts))

    async def run() -> Episode:
        fleet = make_fleet(FirstInstance(), ScriptedEngine("rollout-0", script))
        turns = TurnMaker("sums", chat.stop_token, fleet, Unwatched())
        async with EpisodeServer.open() as server:
            return await ServedRollout(environment, chat, server, turns, 100, lambda: 0.0).episode(
                "e", prompt, 0.0, 1.0
            )

    return asyncio.run(run())


def test_it_calls_the_calculator_and_scores_the_answer(tmp_path: Path) -> None:
    episode = play(tmp_path, ">12+7;", "A19;")
    assert episode.reward == 1.0
    assert episode.tokens == ChatFormat(tmp_path).encode("Q12+7;>12+7;=19;A19;")
    assert play(tmp_path, ">12+;", "A2;").reward == 0.0
