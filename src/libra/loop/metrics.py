"""A run's numbers, for Prometheus.

Invariant: every number is one that the run writes into its records too, or the same before its step is over; asking
changes nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Self

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from libra.config.run import ConfigError, MetricsConfig
from libra.loop.recorder import Recorder
from libra.loop.tally import Spell, Tally

CONTENT_TYPE = CONTENT_TYPE_LATEST


def exposition(recorder: Recorder | None) -> bytes:
    """All metrics of the run; none before it records anything."""
    registry = CollectorRegistry(auto_describe=False)
    if recorder is not None:
        registry.register(_Figures(recorder))
    return generate_latest(registry)


@dataclass(slots=True, eq=False)
class _Figures(Collector):
    recorder: Recorder

    def collect(self) -> Iterator[Metric]:
        yield from _workers(self.recorder)
        yield from _steps(self.recorder.tally)
        yield from _changes(self.recorder.tally)


def _workers(recorder: Recorder) -> Iterator[Metric]:
    seconds = CounterMetricFamily(
        "libra_device_seconds",
        "What the time of each worker went to; a step's is told when it is over.",
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
    turns = GaugeMetricFamily("libra_turns", "Turns that the engine has.", labels=["worker"])
    tools = GaugeMetricFamily(
        "libra_tool_calls", "Tools that are called for episodes that the engine served last.", labels=["worker"]
    )
    for worker, (running, waiting) in recorder.under_way().items():
        turns.add_metric([worker], running)
        tools.add_metric([worker], waiting)
    yield turns
    yield tools


def _steps(tally: Tally) -> Iterator[Metric]:
    yield _summary("libra_step_seconds", "Optimiser steps of this session.", tally.steps)
    last = tally.last
    if last is not None:
        yield GaugeMetricFamily("libra_step", "The last step, counted over all sessions of the run.", value=last.step)
        yield GaugeMetricFamily("libra_version", "Of the weights that it produced.", value=last.version)
        yield GaugeMetricFamily("libra_reward_mean", "Of the trajectories of the last step.", value=last.reward_mean)
        if last.predicted_seconds is not None:
            yield GaugeMetricFamily(
                "libra_step_predicted_seconds", "Of the last step, by the plan in force.", value=last.predicted_seconds
            )
    yield CounterMetricFamily(
        "libra_trajectories_started", "Trajectories that were begun.", value=tally.trajectories_started
    )
    yield CounterMetricFamily(
        "libra_trajectories_trained", "Trajectories that were trained on.", value=tally.trajectories_trained
    )
    yield CounterMetricFamily(
        "libra_generated_tokens", "By engines, until the last step.", value=tally.generated_tokens
    )
    yield CounterMetricFamily("libra_trained_tokens", "Through the trainers.", value=tally.trained_tokens)
    yield _staleness(tally)


def _staleness(tally: Tally) -> HistogramMetricFamily:
    buckets, below = list[tuple[str, float]](), 0
    for versions in range(max(tally.staleness, default=0) + 1):
        below += tally.staleness[versions]
        buckets.append((f"{float(versions)}", below))
    versions_in_all = sum(versions * trajectories for versions, trajectories in tally.staleness.items())
    return HistogramMetricFamily(
        "libra_staleness_versions",
        "Of trajectories trained on: versions between the oldest token and the policy.",
        buckets=[*buckets, ("+Inf", below)],
        sum_value=versions_in_all,
    )


def _changes(tally: Tally) -> Iterator[Metric]:
    moves = CounterMetricFamily("libra_moves", "Changes of role, by what became of them.", labels=["outcome"])
    seconds = SummaryMetricFamily("libra_move_seconds", "How long they took.", labels=["outcome"])
    for outcome, spell in tally.moves.items():
        moves.add_metric([outcome], spell.count)
        seconds.add_metric([outcome], spell.count, spell.seconds)
    yield moves
    yield seconds
    yield CounterMetricFamily("libra_joins", "Replicas that came into training.", value=tally.joins.count)
    yield _summary("libra_join_seconds", "From the start of a replica to its part in training.", tally.joins)
    yield _summary("libra_join_held_seconds", "That a step waited for its entry; 0 where none was due.", tally.held)
    losses = CounterMetricFamily("libra_lost_workers", "Workers that went away.", labels=["worker"])
    for worker, times in tally.losses.items():
        losses.add_metric([worker], times)
    yield losses


def _summary(name: str, words: str, spell: Spell) -> SummaryMetricFamily:
    return SummaryMetricFamily(name, words, count_value=spell.count, sum_value=spell.seconds)


class MetricsEndpoint:
    """It tells what `recorder` knows, as soon as there is one."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self.address: str | None = None

    @classmethod
    @asynccontextmanager
    async def open(cls, config: MetricsConfig) -> AsyncIterator[Self]:
        """Answers while this is entered, if anybody asked for it. Raises `ConfigError` where the port is taken."""
        endpoint = cls()
        if config.port is None:
            yield endpoint
            return
        # Imported here: a run that is not asked for metrics does not need them.
        from aiohttp import web

        from libra.loop.metrics import CONTENT_TYPE, exposition
        from libra.serve.http import serving

        async def metrics(_: web.Request) -> web.Response:
            return web.Response(body=exposition(endpoint.recorder), headers={"Content-Type": CONTENT_TYPE})

        application = web.Application()
        application.router.add_get("/metrics", metrics)
        try:
            async with serving(application, config.host, config.port) as base:
                endpoint.address = f"{base}/metrics"
                yield endpoint
        except OSError as error:
            if endpoint.address is not None:
                raise
            why = f"{config.port} cannot be used on {config.host} ({error.strerror})"
            raise ConfigError(f"metrics.port: {why}; give a free port, or leave it out") from None
