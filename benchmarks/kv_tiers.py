"""What KV kept beside the GPUs is worth for agents, whose next turn comes when their KV may have left the GPU.

Invariant: each case is the same engines and the same trajectories, replayed; only the tiers differ.

    python -m benchmarks.kv_tiers [--json FILE]

The engines are those of `examples/kv_tiers.yaml`, the trajectories those of `examples/search_agent.jsonl`.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from benchmarks.rows import Row, report
from libra.sim.clock import seconds
from libra.sim.engine.kv_tier import KVTier
from libra.sim.engines_file import load_engines
from libra.sim.outcome.metrics import metrics_of
from libra.sim.simulate import simulate
from libra.sim.workload.replay import Replay
from libra.trajectory import read_trajectories

EXAMPLES = Path(__file__).parents[1] / "examples"


def rows_of(case: str, names: tuple[str, ...]) -> list[Row]:
    """The engines with these of their tiers alone."""
    deployment = load_engines(EXAMPLES / "kv_tiers.yaml")

    def kept(tiers: tuple[KVTier, ...]) -> tuple[KVTier, ...]:
        return tuple(tier for tier in tiers if tier.name in names)

    engines = [replace(it, config=replace(it.config, kv_tiers=kept(it.config.kv_tiers))) for it in deployment.engines]
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    rows = rows_of("GPU alone", ())
    rows += rows_of("host", ("host",))
    rows += rows_of("store", ("store",))
    rows += rows_of("host and store", ("host", "store"))
    report(rows, options.json)


if __name__ == "__main__":
    main()
