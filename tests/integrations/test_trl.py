"""TRL's own trainer over vLLM servers behind the gateway, one of which joins in between: all get all weights, and all
rollouts are known."""

from __future__ import annotations

import json
import sys
import urllib.request
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="trl is not here: make test-integrations")

from integrations.trl_stage import fleet, train_on_cpu, write_model

from libra.integrations import trl as adapter
from libra.trajectory import read_trajectories

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 20
JOINS_AT = 8  # version after which the third engine joins


def ask(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def log_probs(engine: str, model: str) -> list[float]:
    """Log-probabilities of a fixed text by this engine."""
    body = {"model": model, "prompt": "Q12+34;>12+34;=46;A46;", "max_tokens": 1, "prompt_logprobs": 0}
    shown = ask(engine + "/v1/completions", body)["choices"][0]["prompt_logprobs"]
    return [next(iter(each.values()))["logprob"] for each in shown if each]


def answered(engine: str) -> float:
    """Requests that this engine has answered."""
    with urllib.request.urlopen(engine + "/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("vllm:request_success_total{"))


def test_every_engine_has_each_version_and_every_scored_rollout_is_a_trajectory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, sys.path)))
    model = str(tmp_path / "tiny")
    write_model(tmp_path / "tiny")
    import trl_async_grpo

    train_on_cpu()
    versions: list[list[list[float]]] = []
    with fleet(tmp_path / "tiny", tmp_path, engines=3, behind=2) as (gateway, engines):

        class Watched(adapter.FleetWeights):
            def resume(self) -> None:
                super().resume()
                in_service = engines if len(versions) >= JOINS_AT else engines[:2]
                versions.append([log_probs(engine, model) for engine in in_service])
                if len(versions) == JOINS_AT:
                    ask(gateway + "/workers", {"url": engines[2]})

        monkeypatch.setattr(trl_async_grpo, "FleetWeights", Watched)
        trl_async_grpo.main(model, gateway, STEPS)
        assert answered(engines[2]) > len(versions)  # more than ours for log-probabilities
    assert len(versions) >= STEPS
    assert [len(each) for each in versions] == [2] * JOINS_AT + [3] * (len(versions) - JOINS_AT)
    for first, *others in versions:
        assert all(other == first for other in others)
    assert sum(before[0] != after[0] for before, after in pairwise(versions)) >= 2  # equal rewards change no weights
    finished = [each for each in read_trajectories(tmp_path / "log.jsonl") if each.finished]
    assert len(finished) >= STEPS * 16
    assert {0.0, 0.1} <= {each.reward for each in finished} <= {0.0, 0.1, 1.0}
    called = [turn for each in finished for turn in each.turns if turn.tool is not None]
    assert {turn.tool for turn in called} == {"calculator"} and {turn.status for turn in called} >= {"error"}
    assert max(each.policy_version for each in finished) >= STEPS - 2
    groups = Counter(each.prompt_id for each in finished)
    assert max(groups.values()) == 4
