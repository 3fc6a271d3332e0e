"""Worth of KV offloaded from the GPUs for agents, whose next turn comes when their KV may have left the GPU.

Invariant: each case is the same engines and the same trajectories, replayed; only the host's memory differs.

    python -m benchmarks.kv_tiers [--json FILE]

The engines are those of `examples/kv_tiers.yaml`, the trajectories those of `examples/search_agent.jsonl`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from benchmarks.command import command_line
from benchmarks.rows import Row, report
from libra.sim.clock import seconds
from libra.sim.engines_file import load_engines
from libra.sim.outcome.metrics import metrics_of
from libra.sim.simulate import simulate
from libra.sim.workload.replay import Replay
from libra.trajectory import read_trajectories

EXAMPLES = Path(__file__).parents[1] / "examples"


SIZES = (16, 64, 256)  # GiB of the host, for each engine


def rows_of(case: str, gib: int) -> list[Row]:
    """Rows of a host tier of `gib` GiB; without a tier where that is 0."""
    deployment = load_engines(EXAMPLES / "kv_tiers.yaml")
    [host] = deployment.engines[0].config.kv_tiers
    tiers = (replace(host, chunks=host.chunks * gib // SIZES[0]),) if gib else ()
    engines = [replace(it, config=replace(it.config, kv_tiers=tiers)) for it in deployment.engines]
    workload = Replay(list(read_trajectories(EXAMPLES / "search_agent.jsonl")))
    result = simulate(engines, workload, deployment.policy(), turn_tokens=deployment.turn_tokens)
    metrics = metrics_of(result)
    assert metrics.latency is not None
    return [
        Row(case, "makespan", seconds(result.makespan), "s"),
        Row(case, "mean latency", metrics.latency.mean, "s"),
        Row(case, "prompt tokens not computed", 100 * (metrics.cache_hit_rate or 0.0), "%"),
        *(Row(case, f"loaded from {tier.name}", tier.loaded_bytes / 2**30, "GiB") for tier in result.tiers),
        *(Row(case, f"stored in {tier.name}", tier.stored_bytes / 2**30, "GiB") for tier in result.tiers),
    ]


def main() -> None:
    options = command_line("kv_tiers", __doc__).parse_args()
    rows = rows_of("GPU alone", 0)
    for gib in SIZES:
        rows += rows_of(f"host, {gib} GiB", gib)
    report(rows, options.json)


if __name__ == "__main__":
    main()
