"""Engines from a file: its keys and defaults. What is refused: tests/cli/test_cli_simulate.py."""

from __future__ import annotations

from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from libra.config.yaml_file import ConfigError
from libra.cost.engine_memory import kv_tokens
from libra.cost.graphs import capture_sizes
from libra.cost.host import default_host
from libra.cost.sources.roofline import roofline
from libra.hardware.cluster import GPUS
from libra.hardware.model_file import load_model
from libra.sim.clock import ticks
from libra.sim.deployment import DEFAULT_ROUTE, Deployment
from libra.sim.engine.config import EngineConfig
from libra.sim.engine.iteration_cost import DecodeBatch
from libra.sim.engines_file import EngineSection, load_engines

EXAMPLE = Path(__file__).parents[2] / "examples" / "engines.yaml"
SMALL: dict[str, Any] = {"name": "one", "model": "Qwen/Qwen3-0.6B", "gpu": "H100", "profile": "roofline"}


def load(tmp_path: Path, *engines: dict[str, Any], **keys: object) -> Deployment:
    path = tmp_path / "engines.yaml"
    path.write_text(yaml.safe_dump({"engines": [{**SMALL, **engine} for engine in engines or ({},)], **keys}))
    return load_engines(path)


def test_defaults_are_those_of_an_engine(tmp_path: Path) -> None:
    defaults = {field.name: field.default for field in fields(EngineConfig) if field.default is not MISSING}
    assert {name: EngineSection.model_fields[name].default for name in defaults} == defaults
    found = load(tmp_path)
    assert (found.route, found.sticky, found.limits, found.turn_tokens) == (DEFAULT_ROUTE, True, None, 1)
    assert (found.updates, found.time_limit) == ((), None)


def test_memory_and_length_are_the_gpus_and_the_models(tmp_path: Path) -> None:
    (engine,) = load(tmp_path).engines
    model = load_model(SMALL["model"])
    tokens = kv_tokens(model, GPUS["H100"].memory, 0.9, 1, weight_bytes=2, kv_bytes=2, batched_tokens=8192)
    assert engine.config.kv_blocks == tokens // 16 - 1
    assert engine.config.max_model_len == model.max_context
    (narrow,) = load(tmp_path, {"quantization": "fp8"}).engines
    assert narrow.config.kv_blocks > engine.config.kv_blocks
    (staged,) = load(tmp_path, {"pipeline_parallel_size": 2}).engines
    assert staged.config.pipeline_parallel_size == 2
    assert staged.config.kv_blocks > 2 * engine.config.kv_blocks


def test_times_are_those_of_the_profile(tmp_path: Path) -> None:
    (engine,) = load(tmp_path, {"tensor_parallel_size": 2}).engines
    (grid,) = roofline(GPUS["H100"], load_model(SMALL["model"]), [2]).engines
    base, slope, _ = engine.cost.line(DecodeBatch(4), 4 * 1024)
    assert base + slope * 4 * 1024 == pytest.approx(ticks(grid.decode_seconds(4, 1024)), rel=1e-6)
    slow = {"overhead": {"iteration": 1.0, "request": 0.5}}
    (late,) = load(tmp_path, {"tensor_parallel_size": 2, **slow}).engines
    base_late, slope_late, _ = late.cost.line(DecodeBatch(4), 4 * 1024)
    assert base_late + slope_late * 4096 - base - slope * 4096 == pytest.approx(ticks(3.0), rel=1e-6)


def test_a_host_comes_with_vllms_graphs(tmp_path: Path) -> None:
    found = load(
        tmp_path,
        {"name": "graphs", "host": "default"},
        {"name": "eager", "host": "default", "enforce_eager": True},
        {"name": "kernels"},
    ).engines
    graphs, eager, kernels = found
    assert graphs.config.capture_sizes == capture_sizes(256, 8192)
    assert eager.config.capture_sizes == kernels.config.capture_sizes == ()
    decodes = [engine.cost.line(DecodeBatch(8), 8 * 1024) for engine in found]
    seconds = [(base + slope * 8 * 1024) / ticks(1.0) for base, slope, _ in decodes]
    host = default_host(28)
    assert seconds[0] == pytest.approx(seconds[2] + host.seconds(8), rel=1e-3)
    assert seconds[1] == pytest.approx(host.eager + host.seconds(8), rel=1e-3)
    with pytest.raises(ConfigError, match="host is default, and overhead is given: leave one of them out"):
        load(tmp_path, {"host": "default", "overhead": {"request": 1e-5}})
    with pytest.raises(ConfigError, match="enforce_eager is true, and capture_sizes are given"):
        load(tmp_path, {"enforce_eager": True, "capture_sizes": [1, 2]})
    with pytest.raises(ConfigError, match=r"absent.*fit the engine again"):
        load(tmp_path, {"host": "absent"})


def test_groups_have_names_buckets_and_settings_of_their_own(tmp_path: Path) -> None:
    short = {"name": "short", "count": 2, "max_model_len": 4096, "max_num_seqs": 64, "kv_blocks": 1000}
    long = {"name": "long", "bucket": 1, "policy": "priority", "capture_sizes": [1, 8]}
    found = load(tmp_path, short, long, limits=[4096, 40960], route="round-robin")
    assert [(engine.name, engine.bucket) for engine in found.engines] == [("short-0", 0), ("short-1", 0), ("long", 1)]
    first, _, last = (engine.config for engine in found.engines)
    assert (first.max_model_len, first.max_num_seqs, first.kv_blocks) == (4096, 64, 1000)
    assert (last.policy, last.capture_sizes) == ("priority", (1, 8))
    assert found.longest_context == 40960
    assert found.policy().snapshot()["policy"] == "round-robin"


def test_updates_come_every_so_often(tmp_path: Path) -> None:
    found = load(tmp_path, weight_updates={"every": 10, "times": 3, "pause": 0.5})
    assert [(update.at, update.pause, update.refresh) for update in found.updates] == [
        (ticks(seconds), ticks(0.5), False) for seconds in (10, 20, 30)
    ]


def test_the_example_is_two_engines_with_one_configuration() -> None:
    found = load_engines(EXAMPLE)
    assert [engine.name for engine in found.engines] == ["a100-0", "a100-1"]
    assert len({engine.config for engine in found.engines}) == 1
    assert len({id(engine.cost) for engine in found.engines}) == 1
