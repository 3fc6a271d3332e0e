"""An environment behind openenv-core's own server: the example, whose sums are played on engines of a run."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

pytest.importorskip("openenv", reason="openenv-core is not here: make test-integrations")

from fakes.played import play, text

from libra.config.run import EnvironmentConfig
from libra.environments.openenv import OpenEnvEnvironment
from libra.environments.registry import load_environment

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenEnvEnvironment]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    log = tmp_path_factory.mktemp("openenv") / "log"
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + 120
    with log.open("w") as out:
        command = [sys.executable, str(EXAMPLES / "calculator_openenv.py"), str(port)]
        process = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        while True:
            try:
                urllib.request.urlopen(f"{url}/health").close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < until, log.read_text()
                time.sleep(0.2)
        options = yaml.safe_load((EXAMPLES / "calculator_openenv.yaml").read_text())["environment"]["options"]
        made = load_environment(EnvironmentConfig(kind="openenv", options={**options, "url": url}), EXAMPLES)
        assert isinstance(made, OpenEnvEnvironment)
        yield made
    finally:
        process.kill()
        process.wait()


def test_an_episode_is_a_session_with_its_reward(environment: OpenEnvEnvironment, tmp_path: Path) -> None:
    [wrong] = play(environment, tmp_path, ">12+7;", ">x;", "A0;")
    question, *rest = text(wrong, tmp_path).split(";")
    assert rest == [">12+7", "=19", ">x", "=<unk>", "A0", ""]
    assert wrong.reward == 0.0
    right = sum(int(term) for term in question.removeprefix("Q").split("+"))
    episodes = play(environment, tmp_path, *[f"A{right};"] * 3, episodes=3)
    assert [it.reward for it in episodes] == [1.0] * 3
    assert {text(it, tmp_path) for it in episodes} == {f"{question};A{right};"}  # the seed is that of the task


def test_an_action_that_the_server_refuses_is_read_by_the_model(
    environment: OpenEnvEnvironment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "_action", "metadata")  # no text: the server says so
    [episode] = play(environment, tmp_path, "A0;", episodes=1, longest=25)
    assert episode.reward == 0.0
    assert text(episode, tmp_path).endswith(";A0;")
