"""Figures of live engines for Prometheus, under the names that vLLM gives them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from libra.serve.emulate.live_engine import LiveEngine

CONTENT_TYPE = CONTENT_TYPE_LATEST


class _Figures(Collector):
    def __init__(self, engines: Mapping[str, LiveEngine]) -> None:
        self._engines = engines

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        labels = ["engine"]
        running = GaugeMetricFamily("vllm:num_requests_running", "Requests in the batch.", labels=labels)
        waiting = GaugeMetricFamily("vllm:num_requests_waiting", "Requests in the queue.", labels=labels)
        usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "Share of KV blocks held, 0 to 1.", labels=labels)
        prompts = CounterMetricFamily("vllm:prompt_tokens", "Prompt tokens of requests that ended.", labels=labels)
        made = CounterMetricFamily("vllm:generation_tokens", "Generated tokens of those.", labels=labels)
        for name, engine in self._engines.items():
            running.add_metric([name], engine.running)
            waiting.add_metric([name], engine.waiting)
            usage.add_metric([name], engine.kv_usage)
            prompts.add_metric([name], engine.prompt_tokens)
            made.add_metric([name], engine.generated_tokens)
        yield from (running, waiting, usage, prompts, made)


def exposition(engines: Mapping[str, LiveEngine]) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Figures(engines))
    return generate_latest(registry)
