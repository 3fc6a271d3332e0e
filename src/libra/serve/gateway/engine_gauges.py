"""Gauges from an engine's Prometheus metrics: requests in its batch and queue, and the share of its KV memory in use.

Invariant: a gauge that the engine does not report is None, never a guess.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from aiohttp import ClientError, ClientTimeout

from libra.serve.gateway.engine_client import EngineClient
from libra.serve.gateway.upstreams import Upstream, untraced, whole_of

_SECONDS = 1.5  # in which an engine must answer
_LARGEST = 4 * 2**20  # bytes of an answer
_LINE = re.compile(
    rb"^(?:vllm|sglang):(num_requests_running|num_running_reqs|num_requests_waiting|num_queue_reqs"
    rb"|kv_cache_usage_perc|token_usage)(?:\{([^}]*)\})? ([0-9.eE+-]+)",
    re.MULTILINE,
)
_MEANINGS = {
    b"num_requests_running": "running",
    b"num_running_reqs": "running",
    b"num_requests_waiting": "waiting",
    b"num_queue_reqs": "waiting",
    b"kv_cache_usage_perc": "kv_share",
    b"token_usage": "kv_share",
}


@dataclass(frozen=True, slots=True)
class EngineGauges:
    running: int | None = None
    waiting: int | None = None
    kv_share: float | None = None


def read_gauges(text: bytes) -> EngineGauges:
    """Parse an answer of vLLM's or SGLang's /metrics. With several ranks, the numbers of requests add up, and the
    highest share of KV memory counts."""
    found: dict[str, list[float]] = {}
    for name, _, value in _LINE.findall(text):
        try:
            found.setdefault(_MEANINGS[name], []).append(float(value))
        except ValueError:
            continue
    running, waiting, kv = (found.get(each) for each in ("running", "waiting", "kv_share"))
    return EngineGauges(
        None if running is None else int(sum(running)),
        None if waiting is None else int(sum(waiting)),
        None if kv is None else max(kv),
    )


async def gauges_of(engine: Upstream, client: EngineClient) -> EngineGauges:
    """Query an engine's /metrics. Gauges are None if the engine does not answer."""
    try:
        async with client.session.get(
            f"{engine.section.root}/metrics",
            timeout=ClientTimeout(total=_SECONDS),
            headers={"Accept-Encoding": "identity", **engine.authorization(None)},
            allow_redirects=False,
        ) as answer:
            return read_gauges(await whole_of(answer, _LARGEST)) if answer.status == 200 else EngineGauges()
    except (ClientError, OSError, ValueError, TimeoutError) as error:
        untraced(error)
        return EngineGauges()
