"""Data-parallel ranks of an engines file: what they become, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from libra.config.yaml_file import ConfigError
from libra.cost.engine_memory import expert_workspace
from libra.cost.experts import Balancing
from libra.cost.sources.expert_grids import expert_grid
from libra.cost.transfer import fabric
from libra.hardware.cluster import GPUS, NodeClass
from libra.hardware.model_file import load_model
from libra.sim.deployment import Deployment
from libra.sim.engine.expert_cost import ExpertCost
from libra.sim.engine.group_cost import Graph
from libra.sim.engine.iteration_cost import DecodeBatch
from libra.sim.engines_file import load_engines
from libra.sim.simulate import simulate
from libra.sim.workload.requests import RecordedRequest, recorded_requests

MODEL = "Qwen/Qwen3-30B-A3B"
RANKS: dict[str, Any] = {
    "name": "q",
    "model": MODEL,
    "gpu": "H200",
    "profile": "roofline",
    "max_model_len": 8192,
    "data_parallel_size": 8,
    "enable_expert_parallel": True,
}


def load(tmp_path: Path, **keys: object) -> Deployment:
    path = tmp_path / "engines.yaml"
    path.write_text(yaml.safe_dump({"engines": [{**RANKS, **keys}], "route": "least-loaded"}))
    return load_engines(path)


def test_ranks_have_one_clock_and_their_share_of_the_experts(tmp_path: Path) -> None:
    found = load(tmp_path, count=2, dp_sync_interval=4)
    assert [it.name for it in found.engines][:9:8] == ["q-0-dp0", "q-1-dp0"]
    assert len({it.group.name for it in found.engines if it.group is not None}) == 2
    assert all(it.group is not None and it.group.sync_interval == 4 for it in found.engines)
    eight, two = found.engines[0], load(tmp_path, data_parallel_size=2).engines[0]
    model = load_model(MODEL)
    # Weights are fewer, tokens that are gathered more; the workspace has 32,768 tokens instead of 16,384.
    freed = 2 * model.routed_parameters * (1 / 2 - 1 / 8) - 2 * model.hidden * 6 * 8192
    freed -= expert_workspace(model, 8 * 8192) - expert_workspace(model, 2 * 8192)
    assert eight.config.kv_blocks - two.config.kv_blocks == pytest.approx(
        freed / model.kv_bytes_per_token(2) / 16, rel=0.01
    )


def test_prices_are_those_of_the_grid(tmp_path: Path) -> None:
    (rank, *_) = load(tmp_path, all2all_backend="deepep_low_latency").engines
    assert rank.group is not None
    gpu = GPUS["H200"]
    nodes = NodeClass("n", 1, 8, gpu, intra_bandwidth=gpu.link, inter_bandwidth=4e11)
    grid = expert_grid(gpu, load_model(MODEL), 1, 8, "deepep_low_latency", fabric(nodes), source="roofline")
    base, slope, _ = rank.group.cost.rank(Graph("NONE")).line(DecodeBatch(8), 8 * 1024)
    assert (base + slope * 8192) / 1e12 == pytest.approx(grid.own.decode_seconds(8, 1024), rel=1e-6)
    ((_, ticks),) = rank.group.cost.together(Graph("NONE"), 64 * 8, 8, 0.0, 0).lines
    place = grid.tokens.index(64)
    assert ticks / 1e12 == pytest.approx(grid.layers * (grid.experts[place] + grid.exchange[place]), rel=1e-6)
    assert grid.source.endswith("deepep_low_latency: modelled at 369 GB/s in a node")


def test_the_host_of_asynchronous_ranks_works_beside_their_gpus(tmp_path: Path) -> None:
    overhead = {"iteration": 0.002}
    taken = []
    for ahead in (False, True):
        (rank, *_) = load(tmp_path, async_scheduling=ahead, overhead={**overhead, "overlapped": ahead}).engines
        assert rank.config.async_scheduling is ahead and rank.group is not None
        cost = rank.group.cost
        taken.append(cost.together(Graph("NONE"), 64 * 8, 8, cost.host.seconds(8), 0).lines)
    ((_, after), _), ((_, beside), (factor, least)) = taken
    assert after - beside == least == 2 * 10**9 and factor == 0


@pytest.mark.parametrize("ahead", [False, True])
def test_ranks_with_drafts_run_and_visiting_changes_nothing(tmp_path: Path, ahead: bool) -> None:
    drafts = {"method": "mtp", "num_speculative_tokens": 2, "synthetic_acceptance_rates": [0.8, 0.5]}
    plain, found = (
        load(tmp_path, async_scheduling=ahead, max_num_seqs=8, host="default", **more)
        for more in ({}, {"speculative": drafts})
    )
    before, after = plain.engines[0], found.engines[0]
    assert after.config.capture_sizes and not any(size % 3 for size in after.config.capture_sizes)
    kept = before.config.kv_blocks - after.config.kv_blocks
    assert 0.02 < kept / before.config.kv_blocks < 0.03  # KV of a 49th layer, and its weights
    results = [
        simulate(
            found.engines,
            recorded_requests([RecordedRequest(it * 10**9, 50 + 37 * it % 900, 1 + 53 * it % 300) for it in range(90)]),
            "round-robin",
            exact=exact,
        )
        for exact in (False, True)
    ]
    for column in ("finish", "first_token", "engine", "status"):
        assert getattr(results[0].requests, column).tolist() == getattr(results[1].requests, column).tolist()
    assert (results[0].requests.status == 0).all()


def test_measured_frequencies_are_read_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "counts.json").write_text(json.dumps([[8] * 16 + [1] * 112]))  # the first GPU has the popular ones
    given = {"expert_load": {"frequencies": "counts.json"}}
    eplb = {"enable_eplb": True, "eplb_config": {"num_redundant_experts": 8, "step_interval": 100}}
    cost = load(tmp_path, **given, **eplb).engines[0].group
    assert cost is not None and isinstance(cost.cost, ExpertCost)
    first = Balancing(8, step_interval=100).moved_at(1)
    assert cost.cost.fullest(first - 1) > 3
    assert cost.cost.fullest(first) < 1.1


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (
            {"model": "Qwen/Qwen3-8B"},
            "data_parallel_size is 8, but Qwen/Qwen3-8B has no experts, and ranks without experts are separate",
        ),
        ({"enable_expert_parallel": False}, "enable_expert_parallel is false with data_parallel_size 8:"),
        (
            {"data_parallel_size": 1},
            "enable_expert_parallel is given, but data_parallel_size is 1: set data_parallel_size to 2 or more",
        ),
        (
            {"data_parallel_size": 12},
            "data_parallel_size is 12: 128 experts of Qwen/Qwen3-30B-A3B cannot be divided by 12 GPUs; give a divisor",
        ),
        (
            {"data_parallel_size": 12, "enable_eplb": True, "eplb_config": {"num_redundant_experts": 2}},
            "eplb_config.num_redundant_experts is 2: 130 experts of",
        ),
        (
            {"eplb_config": {"window_size": 9}},
            "eplb_config is given, but enable_eplb is false: set enable_eplb to true",
        ),
        ({"expert_load": {"frequencies": "no.json"}}, "expert_load.frequencies: "),
        ({"expert_load": {"frequencies": "no.json", "power_law": 1.0}}, "leave one of them out"),
        ({"expert_load": {"drift_interval": 9}}, "drift_interval is given, but power_law is 0: raise power_law"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size with data_parallel_size is not simulated"),
        ({"profile": "tables", "model": "deepseek-ai/DeepSeek-V2-Lite"}, "profile: deepseek-ai/DeepSeek-V2-Lite has"),
        ({"profile": "tables", "quantization": "awq"}, "profile: there are no tables of awq weights, only of fp8,"),
        ({"all2all_backend": "pplx"}, "all2all_backend"),
        ({"overhead": {"iteration": 1.0}, "host": "default"}, "host is default, but overhead is given"),
    ],
)
def test_ranks_that_cannot_be_simulated_are_refused(tmp_path: Path, keys: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, **keys)
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)
