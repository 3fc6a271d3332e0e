"""A run's numbers, counted during the run and exported to Prometheus.

Invariant: every number is also in the run's records, some only at the end of a step. A scrape changes no state. Numbers
never decrease, except those that describe the last step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from aiohttp import web
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric

from libra.config.listeners import METRICS
from libra.config.run import ConfigError, MetricsConfig
from libra.exec.protocols import MoveOutcome
from libra.records.causes import Cause, total
from libra.records.schema import StepRecord
from libra.serve.answers import metrics_response
from libra.serve.guard import read_token
from libra.serve.http import serving

if TYPE_CHECKING:
    from libra.loop.recorder import Recorder

OUTCOMES = ("done", "undone", "failed")  # of moves


@dataclass(slots=True)
class Spell:
    """Count of an event, and its total seconds."""

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.seconds += seconds


@dataclass(slots=True)
class Tally:
    """Counts of this session of the run: sums over its records."""

    last: StepRecord | None = None
    steps: Spell = field(default_factory=Spell)
    trajectories_started: int = 0
    trajectories_trained: int = 0
    generated_tokens: int = 0
    trained_tokens: int = 0
    staleness: Counter[int] = field(default_factory=Counter)  # of trajectories trained on
    moves: dict[str, Spell] = field(default_factory=lambda: {outcome: Spell() for outcome in OUTCOMES})
    joins: Spell = field(default_factory=Spell)
    held: Spell = field(default_factory=Spell)  # steps that waited for joins
    device_seconds: dict[Cause, float] = field(default_factory=dict)  # of all workers, in the steps
    losses: Counter[str] = field(default_factory=Counter)  # by worker

    def step(self, record: StepRecord) -> None:
        self.last = record
        self.steps.add(record.step_seconds)
        self.trajectories_trained += record.trajectories
        self.generated_tokens += record.generated_tokens
        self.trained_tokens += record.trained_tokens
        self.device_seconds = total((self.device_seconds, *record.device_seconds.values()))
        for versions, trajectories in enumerate(record.staleness):
            self.staleness[versions] += trajectories

    def started(self, trajectories: int) -> None:
        self.trajectories_started += trajectories

    def moved(self, moved: MoveOutcome) -> None:
        self.moves[moved.outcome].add(moved.seconds)

    def joined(self, seconds: float, held_seconds: float) -> None:
        self.joins.add(seconds)
        self.held.add(held_seconds)

    def lost(self, worker: str) -> None:
        self.losses[worker] += 1


def _figures(recorder: Recorder | None) -> Iterator[Metric]:
    """The metrics of the run; empty before the first record."""
    if recorder is not None:
        yield from _workers(recorder)
        yield from _steps(recorder.tally)
        yield from _changes(recorder.tally)


def _workers(recorder: Recorder) -> Iterator[Metric]:
    seconds = CounterMetricFamily(
        "libra_device_seconds",
        "Time of each worker, by cause; the time of a step is added when the step ends.",
        labels=["worker", "cause"],
    )
    for worker, causes in recorder.device_seconds().items():
        for cause, spent in causes.items():
            seconds.add_metric([worker, cause], spent)
    yield seconds
    roles = GaugeMetricFamily("libra_role", "1: what the worker does now.", labels=["worker", "role"])
    for worker, role in recorder.roles.items():
        roles.add_metric([worker, role], 1)
    yield roles
    turns = GaugeMetricFamily("libra_turns", "Turns that run or wait in the engine.", labels=["worker"])
    tools = GaugeMetricFamily(
        "libra_tool_calls",
        "Tool calls in progress, of the episodes whose last turn the engine served.",
        labels=["worker"],
    )
    for worker, (running, waiting) in recorder.under_way().items():
        turns.add_metric([worker], running)
        tools.add_metric([worker], waiting)
    yield turns
    yield tools


def _steps(tally: Tally) -> Iterator[Metric]:
    yield _summary("libra_step_seconds", "Duration of the optimiser steps of this session.", tally.steps)
    last = tally.last
    if last is not None:
        yield GaugeMetricFamily("libra_step", "The last step, counted over all sessions of the run.", value=last.step)
        yield GaugeMetricFamily("libra_version", "Version of the newest weights.", value=last.version)
        yield GaugeMetricFamily("libra_reward_mean", "Mean reward of the last step.", value=last.reward_mean)
        if last.predicted_seconds is not None:
            yield GaugeMetricFamily(
                "libra_step_predicted_seconds",
                "Duration of the last step that the plan in force predicted.",
                value=last.predicted_seconds,
            )
    yield CounterMetricFamily("libra_trajectories_started", "Trajectories started.", value=tally.trajectories_started)
    yield CounterMetricFamily(
        "libra_trajectories_trained", "Trajectories trained on.", value=tally.trajectories_trained
    )
    yield CounterMetricFamily(
        "libra_generated_tokens", "Tokens generated by engines, until the last step.", value=tally.generated_tokens
    )
    yield CounterMetricFamily("libra_trained_tokens", "Tokens processed by the trainers.", value=tally.trained_tokens)
    yield _staleness(tally)


def _staleness(tally: Tally) -> HistogramMetricFamily:
    buckets, below = list[tuple[str, float]](), 0
    for versions in range(max(tally.staleness, default=0) + 1):
        below += tally.staleness[versions]
        buckets.append((f"{float(versions)}", below))
    versions_in_all = sum(versions * trajectories for versions, trajectories in tally.staleness.items())
    return HistogramMetricFamily(
        "libra_staleness_versions",
        "Versions between the oldest token of a trained trajectory and the policy.",
        buckets=[*buckets, ("+Inf", below)],
        sum_value=versions_in_all,
    )


def _changes(tally: Tally) -> Iterator[Metric]:
    moves = CounterMetricFamily("libra_moves", "Changes of role, by outcome.", labels=["outcome"])
    seconds = SummaryMetricFamily("libra_move_seconds", "Duration of changes of role.", labels=["outcome"])
    for outcome, spell in tally.moves.items():
        moves.add_metric([outcome], spell.count)
        seconds.add_metric([outcome], spell.count, spell.seconds)
    yield moves
    yield seconds
    yield CounterMetricFamily("libra_joins", "Replicas that joined training.", value=tally.joins.count)
    yield _summary("libra_join_seconds", "Time from a replica's start until it takes part in training.", tally.joins)
    yield _summary("libra_join_held_seconds", "Time that a step waited for a replica to join; 0: no wait.", tally.held)
    losses = CounterMetricFamily("libra_lost_workers", "Lost workers.", labels=["worker"])
    for worker, times in tally.losses.items():
        losses.add_metric([worker], times)
    yield losses


def _summary(name: str, words: str, spell: Spell) -> SummaryMetricFamily:
    return SummaryMetricFamily(name, words, count_value=spell.count, sum_value=spell.seconds)


class MetricsEndpoint:
    """Serves the metrics of `recorder`; without a recorder, an empty list."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self.address: str | None = None

    @classmethod
    @asynccontextmanager
    async def open(cls, config: MetricsConfig) -> AsyncIterator[Self]:
        """Context in which the endpoint answers, if a port is configured. Raises `ConfigError` if the port is in
        use.
        """
        endpoint = cls()
        if config.port is None:
            yield endpoint
            return

        async def metrics(_: web.Request) -> web.Response:
            return metrics_response(_figures(endpoint.recorder))

        application = web.Application()
        application.router.add_get("/metrics", metrics)
        try:
            token = None if config.token_file is None else read_token(config.token_file)
        except ValueError as error:
            raise ConfigError(f"metrics.token_file: {error}") from None
        try:
            async with serving(application, config.host, config.port, METRICS, token) as base:
                endpoint.address = f"{base}/metrics"
                yield endpoint
        except OSError as error:
            if endpoint.address is not None:
                raise
            why = f"{config.port} cannot be used on {config.host} ({error.strerror})"
            raise ConfigError(f"metrics.port: {why}; give a free port, or leave it out") from None
