"""Tasksets of verifiers played on engines of a run: what was sampled is what is trained on, with verifiers' reward."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verifiers", reason="verifiers is not here: make test-integrations")

from fakes.chats import write_chat_model
from fakes.engines import Script, ScriptedEngine, turn
from fakes.scripted import FirstInstance, Unwatched, make_fleet

from libra.backends.chat_format import ChatFormat
from libra.config.run import ConfigError, EnvironmentConfig, load_config
from libra.environments.registry import load_environment
from libra.environments.served import EpisodeFailedError, ServedEnvironment
from libra.loop.episode import Episode
from libra.loop.episode_server import EpisodeServer
from libra.loop.served_rollout import ServedRollout
from libra.loop.turn_maker import TurnMaker

EXAMPLES = Path(__file__).parents[2] / "examples"
CONFIG = load_config(EXAMPLES / "calculator_verifiers.yaml").environment


def calculator(**options: Any) -> ServedEnvironment:
    config = EnvironmentConfig(kind="verifiers", options={**CONFIG.options, **options})
    made = load_environment(config, EXAMPLES)
    assert isinstance(made, ServedEnvironment)
    return made


class Stage:
    """Engines that play the tasks of the example as they are told, with a task's question and answer."""

    def __init__(self, directory: Path, longest: int = 150) -> None:
        write_chat_model(directory)
        self.chat, self.longest = ChatFormat(directory), longest
        self.environment: Any = calculator()
        [self.prompt] = self.environment.prompts("heldout", 1, 0)
        data = self.environment._tasks[self.prompt.id].data
        self.question, self.answer = data.prompt, data.answer

    def play(self, *texts: str, episodes: int = 1) -> list[Episode]:
        script = Script(*(turn(self.chat.encode(text)) for text in texts))

        async def run() -> list[Episode]:
            fleet = make_fleet(FirstInstance(), ScriptedEngine("rollout-0", script))
            turns = TurnMaker(self.environment.name, self.chat.stop_token, fleet, Unwatched())
            async with EpisodeServer.open() as server, self.environment.opened(server.url, server.key):
                rollout = ServedRollout(self.environment, self.chat, server, turns, self.longest, lambda: 0.0)
                return [await rollout.episode(f"e{number}", self.prompt, 0.0, 1.0) for number in range(episodes)]

        return asyncio.run(run())


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_a_rollout_is_an_episode_of_the_tokens_that_were_sampled(stage: Stage) -> None:
    [right, wrong] = stage.play(">1+2;", f"A{stage.answer};", "A-1;", episodes=2)
    assert right.reward == 1.0 and wrong.reward == 0.0
    assert right.tokens == stage.chat.encode(f"{stage.question}>1+2;=3;A{stage.answer};")
    sampled = [token for token, own in zip(right.tokens, right.generated, strict=True) if own]
    assert sampled == stage.chat.encode(f">1+2;A{stage.answer};")
    assert [turn.generated_tokens for turn in right.trajectory.turns] == [5, len(stage.answer) + 2]
    assert right.branches == wrong.branches == ()
    assert not [name for name in os.environ if name.startswith("LIBRA_EPISODE")]  # the token goes with the run


def test_a_rollout_that_outgrows_the_longest_context_has_no_reward(tmp_path: Path) -> None:
    stage = Stage(tmp_path, longest=30)
    [episode] = stage.play(*[">1+2;"] * 10)
    assert episode.reward == 0.0
    assert len(episode.tokens) - 5 < 30 <= len(episode.tokens) + 3  # the turn after these was refused


def test_a_rollout_that_fails_is_named_with_the_words_of_verifiers(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    import calculator_verifiers

    async def broken(*_: Any, **__: Any) -> Any:
        raise OSError("no sandbox")

    monkeypatch.setattr(calculator_verifiers.CalculatorHarness, "launch", broken)
    with pytest.raises(EpisodeFailedError, match=r"failed 3 times.*no sandbox"):
        stage.play()


def test_options_that_cannot_do_are_refused() -> None:
    with pytest.raises(ConfigError, match="no_such_taskset"):
        calculator(id="no_such_taskset")
    with pytest.raises(ConfigError, match=r"has the agents .*: give an environment with one"):
        calculator(env={"id": "user_sim"})
    assert calculator(tasks=10).prompts("heldout", 2, 0)
