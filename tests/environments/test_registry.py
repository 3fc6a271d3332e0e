"""From a name to an environment, and what is said when there is none."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from libra.config.run import ConfigError, EnvironmentConfig
from libra.environments.calculator import Calculator
from libra.environments.registry import load_environment

PLUG_IN = """
from libra.environments.calculator import Calculator


class Doubled(Calculator):
    name = "doubled"


class Half:
    name, stop, tools = "half", ".", {}
    prompts = parse = reward = demonstration = lambda self: None


NOT_A_CLASS = 3
"""


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a module in it, and an import path that is put back afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "plugged_in_task.py").write_text(PLUG_IN)
    return tmp_path


def environment(
    kind: str = "calculator", tools: tuple[str, ...] = ("calculator",), **options: Any
) -> EnvironmentConfig:
    return EnvironmentConfig(kind=kind, tools=tools, options=options)


def test_a_built_in_name_with_options(tmp_path: Path) -> None:
    assert load_environment(environment(max_turns=3), tmp_path) == Calculator(max_turns=3)
    assert str(tmp_path) not in sys.path  # nothing there is asked for


def test_nothing_is_called_before_it_is_known_to_be_a_task(tmp_path: Path) -> None:
    mark = tmp_path / "called"
    with pytest.raises(ConfigError, match="is not a class"):
        load_environment(environment("os:system", command=f"touch {mark}"), tmp_path)
    assert not mark.exists()


def test_a_class_of_a_module_beside_the_configuration(beside: Path) -> None:
    loaded = load_environment(environment("plugged_in_task:Doubled", skill=0.9), beside)
    assert type(loaded).__name__ == "Doubled"
    assert (loaded.deadline, loaded.max_turns) == (Calculator().deadline, Calculator().max_turns)


REFUSED = [
    (
        "unknown tool",
        environment(tools=("calculatr",)),
        "environment.tools: unknown tool 'calculatr'; calculator has calculator",
    ),
    (
        "tool unlike any",
        environment(tools=("web",)),
        "environment.tools: unknown tool 'web'; calculator has calculator",
    ),
    ("no tool", environment(tools=()), "environment.tools: empty; name at least one of calculator"),
    (
        "unknown kind",
        environment("chess"),
        "environment.kind: unknown environment 'chess'; use calculator, command, openenv, verifiers or your own"
        " module:Class",
    ),
    ("unknown option", environment(skil=0.5), "environment.options: "),
    (
        "unknown module",
        environment("no_such_module:Task"),
        "environment.kind: 'no_such_module:Task' cannot be imported",
    ),
    (
        "unknown class",
        environment("plugged_in_task:Task"),
        "environment.kind: 'plugged_in_task:Task' cannot be imported",
    ),
    ("not a class", environment("plugged_in_task:NOT_A_CLASS"), "'plugged_in_task:NOT_A_CLASS' is not a class; give"),
    ("a function", environment("os:system", command="exit 1"), "'os:system' is not a class; give a class with"),
    ("another class", environment("pathlib:Path"), "'pathlib:Path' has no prompts, parse, reward, demonstration; give"),
    ("half a class", environment("plugged_in_task:Half"), "'plugged_in_task:Half' has no alphabet, "),
]


@pytest.mark.parametrize(("config", "message"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_what_cannot_be_loaded_is_refused_with_key_and_remedy(
    beside: Path, config: EnvironmentConfig, message: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_environment(config, beside)
    assert message in str(refusal.value)


def test_an_unknown_option_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'skil'"):
        load_environment(environment(skil=0.5), tmp_path)


def test_options_that_a_built_in_kind_lacks_are_named(tmp_path: Path) -> None:
    config = EnvironmentConfig(kind="openenv", options={"url": "http://127.0.0.1:1"})
    with pytest.raises(ConfigError, match=r"^environment\.options: openenv needs url and tasks; add them$"):
        load_environment(EnvironmentConfig(kind="openenv", options={}), tmp_path)
    with pytest.raises(ConfigError, match=r"^environment\.options: openenv needs tasks; add it$"):
        load_environment(config, tmp_path)


def test_the_place_to_put_a_module_is_named(beside: Path) -> None:
    with pytest.raises(ConfigError, match=f"give module:Class with the module in {beside}"):
        load_environment(environment("no_such_module:Task"), beside)
