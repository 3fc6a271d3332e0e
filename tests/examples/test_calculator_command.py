"""The example of a command as an environment, against a model that calls the calculator."""

from __future__ import annotations

import sys
from pathlib import Path

from fakes.played import play, text

from libra.environments.command import CommandEnvironment

EXAMPLE = Path(__file__).parents[2] / "examples/calculator_command.py"


def test_it_calls_the_calculator_and_scores_the_answer(tmp_path: Path) -> None:
    tasks = tmp_path / "sums.jsonl"
    tasks.write_text('{"question": "Q12+7", "answer": 19}\n' * 5)
    environment = CommandEnvironment([sys.executable, str(EXAMPLE)], str(tasks))
    [right] = play(environment, tmp_path, ">12+7;", "A19;")
    assert right.reward == 1.0
    assert text(right, tmp_path) == "Q12+7;>12+7;=19;A19;"
    [wrong] = play(environment, tmp_path, ">12+;", "A2;")
    assert wrong.reward == 0.0
