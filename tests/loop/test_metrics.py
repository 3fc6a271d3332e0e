"""What Prometheus is told of a run is what the run's records say."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import re
import resource
import socket
from collections import defaultdict
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fakes.dashboards import asked_by_dashboard
from fakes.small_run import rows
from prometheus_client.parser import text_string_to_metric_families
from test_run import PER_STEP, SIZE, Runs, until

from libra.config.run import MetricsConfig
from libra.config.yaml_file import ConfigError
from libra.loop import session
from libra.loop.metrics import OUTCOMES, MetricsEndpoint
from libra.records.causes import Cause

STEPS = 24
Labels = tuple[tuple[str, str], ...]
Samples = dict[str, dict[Labels, float]]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(tmp_path, monkeypatch)


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        found: int = probe.getsockname()[1]
    return found


async def scrape(port: int) -> tuple[Samples, dict[str, str]]:
    """Samples by name and labels, and the type of each family."""
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/metrics") as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        families = list(text_string_to_metric_families(await answer.text()))
    samples: Samples = defaultdict(dict)
    for family in families:
        for sample in family.samples:
            samples[sample.name][tuple(sorted(sample.labels.items()))] = sample.value
    return samples, {family.name: family.type for family in families}


def one(samples: Samples, name: str, **labels: str) -> float:
    return samples[name][tuple(sorted(labels.items()))]


def by_worker(samples: Samples) -> dict[str, dict[str, float]]:
    seconds: dict[str, dict[str, float]] = defaultdict(dict)
    for labels, value in samples["libra_device_seconds_total"].items():
        seconds[dict(labels)["worker"]][dict(labels)["cause"]] = value
    return seconds


def documented_metrics() -> set[str]:
    page = (Path(__file__).parents[2] / "docs" / "running.md").read_text(encoding="utf-8")
    section = page.partition("\n## Metrics for Prometheus\n")[2].partition("\n## ")[0]
    cells = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `libra_")]
    return {name for cell in cells for name in re.findall(r"`(\w+)", cell)}


def require_equal_to_records(samples: Samples, directory: Path) -> None:
    """The steps so far, as far as they are told."""
    steps = rows(directory, "metrics")[: int(one(samples, "libra_step"))]
    assert [row["step"] for row in steps] == list(range(1, len(steps) + 1))
    assert one(samples, "libra_version") == steps[-1]["version"]
    assert one(samples, "libra_reward_mean") == steps[-1]["reward_mean"]
    assert one(samples, "libra_step_seconds_count") == len(steps)
    assert one(samples, "libra_step_seconds_sum") == pytest.approx(sum(row["step_seconds"] for row in steps))
    assert one(samples, "libra_trajectories_trained_total") == len(steps) * PER_STEP * SIZE
    assert one(samples, "libra_generated_tokens_total") == sum(row["generated_tokens"] for row in steps)
    assert one(samples, "libra_trained_tokens_total") == sum(row["trained_tokens"] for row in steps)
    stale = [count for row in steps for count in enumerate(row["staleness"])]
    assert one(samples, "libra_staleness_versions_count") == len(steps) * PER_STEP * SIZE
    assert one(samples, "libra_staleness_versions_sum") == sum(versions * count for versions, count in stale)
    assert one(samples, "libra_staleness_versions_bucket", le="0.0") == sum(row["staleness"][0] for row in steps)
    spent = by_worker(samples)
    for row in steps:
        for causes in row["device_seconds"].values():
            assert sum(causes.values()) == pytest.approx(row["step_seconds"])
    for worker, causes in spent.items():
        for cause, seconds in causes.items():
            assert seconds >= sum(row["device_seconds"][worker].get(cause, 0.0) for row in steps) - 1e-6


async def test_a_run_that_is_asked_while_it_goes_on(runs: Runs, monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    config = runs.config("asked", steps=STEPS).model_copy(update={"metrics": MetricsConfig(port=port)})
    directory, last, real = config.run_directory, list[tuple[Samples, dict[str, str]]](), session.evaluate

    async def asked_first(*arguments: Any) -> Any:
        last.append(await scrape(port))  # once as the run begins, and once when all its steps are made
        return await real(*arguments)

    monkeypatch.setattr(session, "evaluate", asked_first)
    task = runs.start(config)
    await until(lambda: len(rows(directory, "metrics")) >= 2, task)
    during = [(await scrape(port))[0]]
    runs.launcher.workers["rollout-1"].die()
    lost = len(rows(directory, "metrics")) + 4
    await until(lambda: len(rows(directory, "metrics")) >= lost, task)
    during.append((await scrape(port))[0])
    summary = await task
    with pytest.raises(aiohttp.ClientConnectorError):
        await scrape(port)
    during, summary = during, summary
    begun, (ended, types) = last[0][0], last[-1]
    assert "libra_step" not in begun
    for samples in (*during, ended):
        require_equal_to_records(samples, directory)
    for earlier, later in zip((begun, *during), (*during, ended), strict=True):
        for name in (name for name in earlier if name.endswith(("_total", "_sum", "_count", "_bucket"))):
            for labels, value in earlier[name].items():
                assert later[name][labels] >= value, (name, labels)
    assert one(ended, "libra_step") == STEPS
    assert one(ended, "libra_trajectories_started_total") == STEPS * PER_STEP * SIZE
    assert one(ended, "libra_lost_workers_total", worker="rollout-1") == 1
    events = rows(directory, "events")
    moves = {kind: [row["seconds"] for row in events if row["kind"] == kind] for kind in ("role_change", "move_failed")}
    assert one(ended, "libra_moves_total", outcome="done") == len(moves["role_change"]) >= 5
    assert one(ended, "libra_move_seconds_sum", outcome="done") == pytest.approx(sum(moves["role_change"]))
    assert sum(one(ended, "libra_moves_total", outcome=outcome) for outcome in OUTCOMES[1:]) == len(
        moves["move_failed"]
    )
    joins = [row for row in events if row["kind"] == "joined"]
    assert one(ended, "libra_joins_total") == len(joins) >= 1
    assert one(ended, "libra_join_seconds_sum") == pytest.approx(sum(row["seconds"] for row in joins))
    assert one(ended, "libra_join_held_seconds_sum") == pytest.approx(sum(row["held_seconds"] for row in joins))
    assert one(ended, "libra_role", worker="core-0", role="train") == 1
    assert len(ended["libra_role"]) == len(by_worker(ended)) == config.cluster.slots
    assert set(ended["libra_turns"].values()) == set(ended["libra_tool_calls"].values()) == {0.0}
    # Every worker's seconds add up to the same: to those since the workers were first heard of.
    wholes = [sum(causes.values()) for causes in by_worker(ended).values()]
    assert max(wholes) == pytest.approx(min(wholes))
    assert wholes[0] > sum(row["step_seconds"] for row in rows(directory, "metrics"))
    assert by_worker(ended)["rollout-1"]["failed"] > 0
    assert {cause for causes in by_worker(ended).values() for cause in causes} <= set(Cause)
    assert sum(summary.device_seconds.values()) >= sum(wholes)
    assert documented_metrics() == {name + "_total" * (kind == "counter") for name, kind in types.items()}
    assert asked_by_dashboard("run") <= ended.keys()
    assert (types["libra_device_seconds"], types["libra_staleness_versions"]) == ("counter", "histogram")


async def test_a_run_outlives_visitors_that_it_cannot_let_in(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    """They hold all files that the process may open: nothing of the run has failed, and asyncio lets them in later."""
    config = runs.config("visited", steps=1).model_copy(update={"metrics": MetricsConfig(port=port)})
    real, accept = session.evaluate, socket.socket.accept

    def full(listening: socket.socket) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    async def visited_first(*arguments: Any) -> Any:
        monkeypatch.setattr(socket.socket, "accept", full)
        with socket.create_connection(("127.0.0.1", port)):
            await asyncio.sleep(0.1)
        monkeypatch.setattr(socket.socket, "accept", accept)
        return await real(*arguments)

    monkeypatch.setattr(session, "evaluate", visited_first)
    summary = await runs.start(config)
    assert summary.steps == 1


async def test_a_run_that_nobody_asks_opens_no_port() -> None:
    async with MetricsEndpoint.open(MetricsConfig()) as endpoint:
        summary = endpoint.address
    assert summary is None


def test_a_port_that_was_taken_after_the_check(port: int) -> None:
    async def twice() -> None:
        async with MetricsEndpoint.open(MetricsConfig(port=port)), MetricsEndpoint.open(MetricsConfig(port=port)):
            pass

    with pytest.raises(ConfigError, match=rf"metrics\.port: {port} cannot be used on 127\.0\.0\.1"):
        asyncio.run(twice())


async def test_connections_to_it_take_no_file_descriptors_from_the_run(port: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    strangers = [socket.socket() for _ in range(200)]
    try:
        async with MetricsEndpoint.open(MetricsConfig(port=port)):
            resource.setrlimit(resource.RLIMIT_NOFILE, (strangers[-1].fileno() + 40, hard))  # too few for all of them
            for stranger in strangers:
                stranger.connect(("127.0.0.1", port))
                await asyncio.sleep(0.001)
            await scrape(port)
            with contextlib.ExitStack() as files:
                for _ in range(10):  # of the run
                    files.enter_context(open(__file__, encoding="utf-8"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for stranger in strangers:
            stranger.close()


@pytest.mark.parametrize(("shown", "status"), [(None, 401), ("Bearer word", 200)])
async def test_a_token_is_asked_for(tmp_path: Path, port: int, shown: str | None, status: int) -> None:
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_text("word", encoding="utf-8")
    headers = {} if shown is None else {"Authorization": shown}
    async with (
        MetricsEndpoint.open(MetricsConfig(port=port, token_file=file)),
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{port}/metrics", headers=headers) as answer,
    ):
        assert answer.status == status


def test_other_machines_need_a_token(port: int) -> None:
    with pytest.raises(ValueError, match="give token_file"):
        MetricsConfig(port=port, host="0.0.0.0")
