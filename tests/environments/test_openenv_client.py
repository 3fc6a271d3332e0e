"""Environments of an OpenEnv server: its orders, what the model reads, and the errors of one that fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.openenv_server import OpenEnvServer
from fakes.played import play, text

from libra.config.run import ConfigError, EnvironmentConfig
from libra.environments.openenv import OpenEnvEnvironment
from libra.environments.registry import load_environment
from libra.environments.served import EpisodeFailedError

HELD_OUT = 2  # the seed of the first task that is held out, of ten


@pytest.fixture
def server() -> Iterator[OpenEnvServer]:
    with OpenEnvServer().running() as running:
        yield running


def made(url: str, **options: Any) -> OpenEnvEnvironment:
    environment = load_environment(EnvironmentConfig(kind="openenv", options={"url": url, **options}), Path())
    assert isinstance(environment, OpenEnvEnvironment)
    return environment


def test_a_turn_is_an_action_and_an_episode_earns_what_its_steps_do(server: OpenEnvServer, tmp_path: Path) -> None:
    environment = made(f"{server.url}/sums/", tasks=10, observation="text", reset={"level": "easy"})
    [episode] = play(environment, tmp_path, ">2+7;", "A9;")
    assert text(episode, tmp_path) == "Q2+7;>2+7;=go_on;A9;"
    assert episode.reward == 1.25
    assert server.told == [
        {"type": "reset", "data": {"level": "easy", "seed": HELD_OUT}},
        {"type": "step", "data": {"answer": ">2+7"}},
        {"type": "step", "data": {"answer": "A9"}},
        {"type": "close"},
    ]


def test_tools_of_an_environment_are_those_of_the_model(server: OpenEnvServer, tmp_path: Path) -> None:
    environment = made(f"{server.url}/tools", tasks=10, observation="text")
    [episode] = play(environment, tmp_path, ">x;", ">8;", ">9;", calls=True)
    assert text(episode, tmp_path) == "null;>x;not_x;>8;=8;>9;"
    assert episode.reward == 1.0
    assert [turn.tool for turn in episode.trajectory.turns] == ["calculator", "calculator", None]
    [gave_up] = play(environment, tmp_path, "9;", calls=True)
    assert gave_up.reward == 0.0


def test_the_model_reads_that_its_action_is_none(server: OpenEnvServer, tmp_path: Path) -> None:
    environment = made(f"{server.url}/sums", tasks=10, observation="text")
    [episode] = play(environment, tmp_path, "what;", "A9;")
    assert text(episode, tmp_path) == "Q2+7;what;no action;A9;"
    assert episode.reward == 1.0


def test_the_model_reads_the_instructions_and_a_whole_observation(server: OpenEnvServer, tmp_path: Path) -> None:
    environment = made(f"{server.url}/sums", tasks=10, instructions="add")
    [episode] = play(environment, tmp_path, "A9;")
    assert text(episode, tmp_path).startswith("add;")
    assert len(episode.tokens) == len('add;{"text": "Q2+7", "sum": 9};A9;')


@pytest.mark.parametrize(("options", "longest"), [({"steps": 2}, 100), ({}, 25)], ids=["steps", "context"])
def test_an_episode_that_is_cut_off_has_what_it_earned(
    server: OpenEnvServer, tmp_path: Path, options: dict[str, Any], longest: int
) -> None:
    environment = made(f"{server.url}/sums", tasks=10, observation="text", **options)
    [episode] = play(environment, tmp_path, ">1;", ">2;", ">3;", longest=longest)
    assert text(episode, tmp_path) == "Q2+7;>1;=go_on;>2;"
    assert episode.reward == 0.5


def test_no_more_sessions_are_open_than_the_server_has(server: OpenEnvServer, tmp_path: Path) -> None:
    environment = made(f"{server.url}/sums", tasks=10, observation="text", sessions=2)
    episodes = play(environment, tmp_path, *["A9;"] * 5, episodes=5)
    assert [it.reward for it in episodes] == [1.0] * 5
    assert server.peak == 2
    assert server.empties()
    with pytest.raises(EpisodeFailedError, match=r"at capacity: 2/2 \(CAPACITY_REACHED\); set sessions to"):
        play(made(f"{server.url}/sums", tasks=10, observation="text", sessions=9), tmp_path, *["A9;"] * 9, episodes=9)


@pytest.mark.parametrize(
    ("said", "message"),
    [("*;", r"it broke \(EXECUTION_ERROR\)"), ("-;", "step: the environment closed the session")],
)
def test_an_environment_that_fails_is_named_with_its_words(
    server: OpenEnvServer, tmp_path: Path, said: str, message: str
) -> None:
    environment = made(f"{server.url}/sums", tasks=10, observation="text")
    with pytest.raises(EpisodeFailedError, match=f"failed 3 times: .*{message}"):
        play(environment, tmp_path, *[said] * 3)
    assert server.empties()


def test_a_server_that_has_gone_is_named(tmp_path: Path) -> None:
    with OpenEnvServer().running() as server:
        environment = made(f"{server.url}/sums", tasks=10)
    with pytest.raises(EpisodeFailedError, match="failed 3 times: ClientConnectorError: Cannot connect"):
        play(environment, tmp_path)


def test_options_that_cannot_do_are_refused(server: OpenEnvServer) -> None:
    refused = {
        r"url: http://127.0.0.1:1 does not answer \(.*\): start its server": {"url": "http://127.0.0.1:1"},
        r"/other/schema answers 404: give the URL of an OpenEnv server": {"url": f"{server.url}/other"},
        r"action: nothing is given, but the fields are left, right, metadata: name one": {"url": f"{server.url}/two"},
        r"action: middle is given, but the fields are left": {"url": f"{server.url}/two", "action": "middle"},
        r"observation: words is given": {"url": f"{server.url}/sums", "observation": "words"},
    }
    for message, options in refused.items():
        with pytest.raises(ConfigError, match=f"environment.options: .*{message}"):
            made(tasks=10, **options)
    assert made(f"{server.url}/two", tasks=10, action="left").prompts("heldout", 2, 0)
