"""Engines from a file: its keys and defaults. What is refused: tests/cli/test_cli_simulate.py."""

from __future__ import annotations

from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from oracles.measured import CALIBRATION

from libra.config.yaml_file import ConfigError
from libra.cost.engine_memory import kv_tokens
from libra.cost.graphs import capture_sizes
from libra.cost.host import default_host
from libra.cost.sources.files import save_calibration
from libra.cost.sources.roofline import roofline
from libra.hardware.cluster import GPUS
from libra.hardware.model_file import load_model
from libra.sim.clock import ticks
from libra.sim.deployment import DEFAULT_ROUTE, Deployment
from libra.sim.engine.config import EngineConfig, EngineSpec
from libra.sim.engine.group_cost import Graph
from libra.sim.engine.iteration_cost import DecodeBatch
from libra.sim.engines_file import load_engines
from libra.sim.engines_keys import EngineSection
from libra.sim.kv_network import KVNetwork
from libra.sim.simulate import simulate
from libra.sim.workload.request_file import read_requests
from libra.sim.workload.requests import recorded_requests

EXAMPLE = Path(__file__).parents[2] / "examples" / "engines.yaml"
SMALL: dict[str, Any] = {"name": "one", "model": "Qwen/Qwen3-0.6B", "gpu": "H100", "profile": "roofline"}


def load(tmp_path: Path, *engines: dict[str, Any], **keys: object) -> Deployment:
    path = tmp_path / "engines.yaml"
    path.write_text(yaml.safe_dump({"engines": [{**SMALL, **engine} for engine in engines or ({},)], **keys}))
    return load_engines(path)


def test_defaults_are_those_of_an_engine(tmp_path: Path) -> None:
    defaults = {field.name: field.default for field in fields(EngineConfig) if field.default is not MISSING}
    for name in ("num_reserved_decode_tokens", "max_num_seqs"):  # None in a file: by how KV is transferred, by the GPU
        del defaults[name]
    assert {name: EngineSection.model_fields[name].default for name in defaults} == defaults
    found = load(tmp_path)
    assert (found.route, found.sticky, found.limits, found.turn_tokens) == (DEFAULT_ROUTE, True, None, 1)
    assert (found.updates, found.time_limit) == ((), None)


def test_memory_and_length_are_the_gpus_and_the_models(tmp_path: Path) -> None:
    (engine,) = load(tmp_path).engines
    model = load_model(SMALL["model"])
    tokens = kv_tokens(model, GPUS["H100"].usable, 0.9, 1, batched_tokens=8192, seqs=1024)
    assert engine.config.kv_blocks == tokens // 16 - 1
    assert engine.config.max_model_len == model.max_context
    (narrow,) = load(tmp_path, {"quantization": "fp8"}).engines
    assert narrow.config.kv_blocks > engine.config.kv_blocks
    (both,) = load(tmp_path, {"quantization": "fp8", "kv_cache_dtype": "fp8"}).engines
    assert both.config.kv_blocks == pytest.approx(2 * narrow.config.kv_blocks, abs=2)
    assert both.kv_bytes == narrow.kv_bytes / 2
    (staged,) = load(tmp_path, {"pipeline_parallel_size": 2}).engines
    assert staged.config.pipeline_parallel_size == 2
    assert staged.config.kv_blocks > 2 * engine.config.kv_blocks


def test_the_gpu_decides_how_many_requests_are_in_a_batch(tmp_path: Path) -> None:
    gpus = ("H100", "H20", "B200", "A800", "A100", "A100-40GB", "L40S", "RTX 4090")
    found = [load(tmp_path, {"gpu": gpu}).engines[0].config.max_num_seqs for gpu in gpus]
    assert found == [1024, 1024, 1024, 1024, 256, 256, 256, 256]
    (few,) = load(tmp_path, {"max_num_batched_tokens": 512}).engines
    assert few.config.max_num_seqs == 512


def test_the_version_decides_what_the_profiling_run_sets_aside(tmp_path: Path) -> None:
    def bytes_of(version: str, **keys: object) -> float:
        (engine,) = load(tmp_path, {"vllm_version": version, **keys}).engines
        return engine.config.kv_blocks * 16 * engine.kv_bytes

    today, graphs = bytes_of("0.32.0"), 0.2 * 2**30 + 102 * 6 * 2**20
    (unsaid,) = load(tmp_path).engines
    assert today == unsaid.config.kv_blocks * 16 * unsaid.kv_bytes
    page = 16 * unsaid.kv_bytes
    model = load_model(SMALL["model"])
    logits, tokens = 1024 * model.vocab, 8192 * 2 * model.hidden
    layers = 8192 * 2 * 3 * (model.hidden + model.intermediate)
    peaks = {it: max(layers, 2 * tokens + it * logits) for it in (2, 14, 37.7, 44)}
    before = today + peaks[2] + 4.125 * logits  # without a profiling run
    assert bytes_of("0.29") == today
    assert bytes_of("0.28") == bytes_of("0.21") == pytest.approx(before - peaks[14], abs=page)
    assert bytes_of("0.20.1rc1") == pytest.approx(before + graphs - peaks[14], abs=page)
    assert bytes_of("0.20", enforce_eager=True) == bytes_of("0.20.1rc1")
    fewer = 0.12 * 2**30  # libraries
    assert bytes_of("0.17") == pytest.approx(before + graphs + fewer - peaks[14], abs=page)
    assert bytes_of("0.16") == pytest.approx(before + graphs + fewer - peaks[37.7], abs=page)
    assert bytes_of("0.9.2") == pytest.approx(before + graphs + fewer - peaks[44], abs=page)
    assert bytes_of("0.6.6") == pytest.approx(before + graphs - 1.55 * 2**30 - peaks[37.7], abs=page)
    with pytest.raises(ConfigError, match=r"engines\.0\.vllm_version is 'v0\.9': give it as vLLM does"):
        bytes_of("v0.9")


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
    with pytest.raises(ConfigError, match="host is default, but overhead is given, too: leave one of them out"):
        load(tmp_path, {"host": "default", "overhead": {"request": 1e-5}})
    with pytest.raises(ConfigError, match="enforce_eager is true, but capture_sizes are given"):
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


PREFILL: dict[str, Any] = {"name": "p", "role": "prefill", "tensor_parallel_size": 2}
DECODE: dict[str, Any] = {"name": "d", "role": "decode"}
EAGLE = {"method": "eagle", "num_speculative_tokens": 3, "synthetic_acceptance_length": 2.5}


def test_roles_and_the_way_of_kv(tmp_path: Path) -> None:
    found = load(tmp_path, PREFILL, DECODE, kv_transfer={"bandwidth": 1.0e9, "local_below": 64, "route": "round-robin"})
    assert [(engine.role.name, engine.devices) for engine in found.engines] == [("prefill", 2), ("decode", 1)]
    assert [engine.kv_bytes for engine in found.engines] == [2 * 28 * 8 * 128 * 2] * 2  # keys and values, 28 layers
    assert found.kv_transfer == KVNetwork(1.0e9, local_below=64)
    assert found.decode_route == "round-robin"
    assert [engine.config.num_reserved_decode_tokens for engine in found.engines] == [0, 0]
    pushed = load(tmp_path, PREFILL, DECODE, kv_transfer={"bandwidth": 1.0e9, "push": True})
    assert pushed.kv_transfer == KVNetwork(1.0e9, push=True)
    assert [engine.config.num_reserved_decode_tokens for engine in pushed.engines] == [0, 512]
    latent = {"model": "deepseek-ai/DeepSeek-V2-Lite", "kv_blocks": 20000, "max_model_len": 4096}
    one, other = load(
        tmp_path,
        {**PREFILL, **latent},
        {**DECODE, **latent, "tensor_parallel_size": 2},
        kv_transfer={"bandwidth": 1.0e9},
    ).engines
    assert one.kv_bytes == other.kv_bytes == 2 * 27 * (512 + 64) * 2  # a latent vector goes whole to each GPU


@pytest.mark.parametrize(
    ("engines", "keys", "told"),
    [
        (
            [PREFILL],
            {"kv_transfer": {"bandwidth": 1e9}},
            "engines have the role prefill, but none has decode: add an engine",
        ),
        (
            [DECODE],
            {"kv_transfer": {"bandwidth": 1e9}},
            "engines have the role decode, but none has prefill: add an engine",
        ),
        ([PREFILL, DECODE], {}, "kv_transfer is missing: engines with roles transfer KV"),
        (
            [{}],
            {"kv_transfer": {"bandwidth": 1e9}},
            "no engine has the role prefill or decode: give engines these roles",
        ),
        (
            [PREFILL, {**DECODE, "block_size": 32}],
            {"kv_transfer": {"bandwidth": 1e9}},
            "block_size of d is 32, but that of p is 16: KV is read block by block, so make them equal",
        ),
        (
            [PREFILL, {**DECODE, "model": "Qwen/Qwen3-14B"}],
            {"kv_transfer": {"bandwidth": 1e9}},
            "engines.1.model is Qwen/Qwen3-14B, but engines.0.model is Qwen/Qwen3-0.6B, so their KV differs: make",
        ),
        (
            [PREFILL, {**DECODE, "kv_cache_dtype": "fp8"}],
            {"kv_transfer": {"bandwidth": 1e9}},
            "engines.1.kv_cache_dtype is fp8, but engines.0.kv_cache_dtype is auto, so their KV differs: make",
        ),
        (
            [PREFILL, {**DECODE, "speculative": EAGLE}],
            {"kv_transfer": {"bandwidth": 1e9}},
            "engines.1.speculative has eagle in the KV cache, but engines.0.speculative has no drafter: give both",
        ),
        (
            [{**PREFILL, "speculative": EAGLE}, {**DECODE, "speculative": {**EAGLE, "method": "mtp"}}],
            {"kv_transfer": {"bandwidth": 1e9}},
            "engines.1.speculative has mtp in the KV cache, but engines.0.speculative has eagle: give both",
        ),
        (
            [PREFILL, DECODE],
            {
                "kv_transfer": {"bandwidth": 1e9},
                "weight_updates": {"every": 1.0, "times": 1, "pause": 0.1, "refresh": True},
            },
            "weight_updates.refresh with prefill and decode apart is not simulated: set it to false",
        ),
        ([PREFILL, DECODE], {"kv_transfer": {"bandwidth": 0}}, "kv_transfer.bandwidth"),
        (
            [PREFILL, DECODE],
            {"kv_transfer": {"bandwidth": 1e9, "route": "nearest"}},
            "kv_transfer.route: policy is 'nearest'; choose one of",
        ),
        ([PREFILL, DECODE], {"kv_transfer": {"bandwidth": 1e9, "lease": 1e18}}, "kv_transfer.lease: "),
        (
            [PREFILL, {**DECODE, "bucket": 1}],
            {"kv_transfer": {"bandwidth": 1e9}, "limits": [64, 4096]},
            "engines of bucket 0 have the role prefill, but none has decode: add an engine",
        ),
        ([{**PREFILL, "role": "encode"}], {}, "engines.0.role"),
    ],
)
def test_engines_that_cannot_work_together_are_refused(
    tmp_path: Path, engines: list[dict[str, Any]], keys: dict[str, object], told: str
) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, *engines, **keys)
    assert told in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("drafts", [(EAGLE, EAGLE), (None, {**EAGLE, "method": "ngram"})])
def test_roles_may_draft_where_their_kv_is_alike(tmp_path: Path, drafts: tuple[object, object]) -> None:
    engines = [{**role, "speculative": its} for role, its in zip((PREFILL, DECODE), drafts, strict=True)]
    assert len(load(tmp_path, *engines, kv_transfer={"bandwidth": 1e9}).engines) == 2


HOST = {"name": "host", "gib": 8, "bandwidth": 25e9}


def test_a_tier_holds_what_its_memory_does(tmp_path: Path) -> None:
    tiers = [HOST, {**HOST, "name": "store", "gib": 64, "shared": True, "blocks_per_chunk": 1, "latency": 1e-3}]
    (engine,) = load(tmp_path, {"max_model_len": 4096, "kv_tiers": tiers, "tensor_parallel_size": 2}).engines
    host, store = engine.config.kv_tiers
    assert host.block_bytes == 16 * engine.kv_bytes
    assert host.chunks == int(8 * 2**30 // host.block_bytes)
    assert store.chunks == int(64 * 2**30 // host.block_bytes)
    assert (host.load_bandwidth, store.load_bandwidth) == (50e9, 25e9)  # a link for each GPU; one for the node
    assert (host.latency, store.latency, store.shared) == (0.0, 1e-3, True)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"kv_tiers": [{**HOST, "gib": 0.1}]}, "kv_tiers.0.gib is 0.1: host has room for"),
        ({"kv_tiers": [{**HOST, "policy": "fifo"}]}, "kv_tiers.0.policy"),
        ({"kv_tiers": [HOST], "enable_prefix_caching": False}, "set it to true"),
        ({"kv_tiers": [HOST, HOST]}, "kv_tiers.1.name is host, the name of another tier: give each tier its own name"),
    ],
)
def test_tiers_that_are_none_are_refused(tmp_path: Path, keys: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, {"max_model_len": 4096, **keys})
    assert told in str(error.value)
    assert "\n" not in str(error.value)


STORE = {**HOST, "name": "store", "shared": True}


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"model": "Qwen/Qwen3-1.7B"}, "engines.1.model is Qwen/Qwen3-1.7B, but engines.0.model is Qwen/Qwen3-0.6B"),
        ({"kv_cache_dtype": "fp8"}, "engines.1.kv_cache_dtype is fp8, but engines.0.kv_cache_dtype is auto"),
        ({"block_size": 32}, "engines.1.block_size is 32, but engines.0.block_size is 16"),
        ({"tensor_parallel_size": 2}, "engines.1.tensor_parallel_size is 2, but engines.0.tensor_parallel_size is 1"),
        (
            {"kv_tiers": [{**STORE, "gib": 9}]},
            "engines.1.kv_tiers: store is shared, but differs from that",
        ),
    ],
)
def test_who_shares_a_tier_could_use_what_others_keep_there(tmp_path: Path, other: dict[str, Any], told: str) -> None:
    shared = {"max_model_len": 4096, "kv_tiers": [STORE]}
    assert len(load(tmp_path, {**shared, "name": "a"}, {**shared, "name": "b"}).engines) == 2
    with pytest.raises(ConfigError) as error:
        load(tmp_path, {**shared, "name": "a"}, {**shared, "name": "b", **other})
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_drafts_cost_memory_passes_and_rows(tmp_path: Path) -> None:
    def speculative(method: str, **keys: object) -> dict[str, Any]:
        return {"method": method, "num_speculative_tokens": 3, "synthetic_acceptance_length": 2.5, **keys}

    plain, eagle, ngram, model = load(
        tmp_path,
        {"name": "plain", "max_model_len": 4096},
        {"name": "eagle", "max_model_len": 4096, "speculative": speculative("eagle")},
        {"name": "ngram", "max_model_len": 4096, "speculative": speculative("ngram")},
        {"name": "model", "max_model_len": 4096, "speculative": speculative("draft_model", model=SMALL["model"])},
    ).engines
    assert plain.config.kv_blocks == ngram.config.kv_blocks > eagle.config.kv_blocks > model.config.kv_blocks

    def seconds(engine: EngineSpec, each: int) -> float:
        base, slope, _ = engine.cost.line(DecodeBatch(8, each), 8 * 1024)
        return (base + slope * 8 * 1024) / ticks(1.0)

    alone = seconds(plain, 1)
    layers = load_model(SMALL["model"]).layers
    verified = seconds(ngram, 4)
    assert alone <= verified
    assert seconds(eagle, 4) == pytest.approx(verified + 3 * alone / layers, rel=1e-6)
    assert seconds(model, 4) == pytest.approx(verified + 3 * alone, rel=1e-6)


@pytest.mark.parametrize(
    ("speculative", "words"),
    [
        ({"method": "dflash"}, "speculative.method is dflash, which drafts in parallel"),
        ({"method": "draft_model"}, "speculative.model is None with method draft_model: give a model"),
        ({"method": "eagle", "model": "Qwen/Qwen3-0.6B"}, "and only there"),
        ({"method": "eagle", "accepted": [1]}, "give only one of"),
        ({"method": "eagle", "synthetic_acceptance_length": 5.0}, "it is from 1 to 4"),
    ],
)
def test_drafts_that_are_not_simulated_are_refused(tmp_path: Path, speculative: dict[str, Any], words: str) -> None:
    given = {"num_speculative_tokens": 3, "synthetic_acceptance_length": 2.5, **speculative}
    with pytest.raises(ConfigError, match=r"engines\.0\.speculative\.") as refused:
        load(tmp_path, {"speculative": given})
    assert words in str(refused.value)


MOE = "Qwen/Qwen3-30B-A3B"
AFD: dict[str, Any] = {"attention": 4, "ffn": 2, "bandwidth": 50e9}


def apart(tmp_path: Path, *others: dict[str, Any], **keys: object) -> Deployment:
    return load(tmp_path, {"model": MOE, "max_num_batched_tokens": 2048, "afd": AFD, **keys}, *others)


def test_attention_ranks_are_a_group_with_the_memory_that_experts_leave(tmp_path: Path) -> None:
    ranks = apart(tmp_path, max_model_len=4096).engines
    assert [it.name for it in ranks] == ["one-0", "one-1", "one-2", "one-3"]
    assert {it.group.name for it in ranks if it.group is not None} == {"one"} and len({it.group for it in ranks}) == 1
    model = load_model(MOE)
    tokens = kv_tokens(model, GPUS["H100"].usable, 0.9, 1, batched_tokens=2048, routed=False, seqs=1024)
    assert ranks[0].config.kv_blocks == tokens // 16 - 1
    assert ranks[0].devices == 1 and ranks[0].kv_bytes == model.kv_bytes_per_token(2)
    two = apart(tmp_path, count=2).engines
    assert [it.name for it in two] == [f"one-{group}-{rank}" for group in range(2) for rank in range(4)]
    assert len({it.group for it in two}) == 2


def test_what_the_cpu_adds_comes_to_an_iteration_of_the_group(tmp_path: Path) -> None:
    def ticks_of(**keys: object) -> int:
        group = apart(tmp_path, **keys).engines[0].group
        assert group is not None
        together = group.cost.together(Graph("NONE"), 32, 8, group.cost.host.seconds(8), 0)
        return max(factor * 10**7 + more for factor, more in together.lines)

    slow = {"iteration": 1.0, "request": 0.5}
    assert ticks_of(overhead=slow) - ticks_of() == pytest.approx(ticks(1.0 + 0.5 * 8), rel=1e-9)
    assert ticks_of() < ticks_of(host="fast") < ticks_of(host="default")
    assert ticks_of(afd={**AFD, "ffn_gpu": "L40S", "bandwidth": 1e15}) > ticks_of(afd={**AFD, "bandwidth": 1e15})


DRAFTS: dict[str, Any] = {"num_speculative_tokens": 2, "synthetic_acceptance_length": 2.0}
DRAFT_MODEL: dict[str, Any] = {**DRAFTS, "method": "draft_model", "model": "Qwen/Qwen3-0.6B"}
TIER: dict[str, Any] = {"name": "host", "gib": 64, "bandwidth": 25e9}
RANKS: dict[str, Any] = {"model": MOE, "data_parallel_size": 4, "enable_expert_parallel": True}


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (
            {"kv_tiers": [{**TIER, "bandwidth": 25}]},
            "engines.0.kv_tiers.0.bandwidth is 25 bytes/s: a transfer of one request of max_model_len 8,192 to"
            " host would take more than 60 minutes: raise bandwidth",
        ),
        (
            {"kv_tiers": [TIER, {**TIER, "name": "disk", "bandwidth": 1e-300}]},
            "engines.0.kv_tiers.1.bandwidth is 1e-300",
        ),
        ({"kv_tiers": [{**TIER, "gib": 1e300}]}, "engines.0.kv_tiers.0.gib: Input should be less than or equal to"),
        (
            {"speculative": {**DRAFT_MODEL, "model": "Qwen/Qwen3-0.5B"}},
            "engines.0.speculative.model: 'Qwen/Qwen3-0.5B': no such file or known model; known are Qwen/",
        ),
        (
            {"speculative": DRAFT_MODEL, "model": "meta-llama/Llama-3.1-8B", "max_model_len": 100_000},
            "engines.0.speculative.model: Qwen/Qwen3-0.6B is made for 40960 tokens, fewer than max_model_len",
        ),
        (
            {"speculative": {**DRAFTS, "method": "eagle", "num_speculative_tokens": 10**9}},
            "engines.0.speculative.num_speculative_tokens: Input should be less than or equal to 4096",
        ),
        ({"block_size": 10**30}, "engines.0.block_size: Input should be less than or equal to 1048576"),
        ({"host": "absent.json"}, "engines.0.host: {}/absent.json: No such file or directory; fit the engine again"),
        ({"profile": "absent.json"}, "engines.0.profile: {}/absent.json: No such file or directory; calibrate again"),
        (
            {**RANKS, "enable_eplb": True, "eplb_config": {"num_redundant_experts": 4000}},
            "engines.0.eplb_config.num_redundant_experts is 4000: Qwen/Qwen3-30B-A3B leaves KV memory for 0 tokens",
        ),
        (
            {**RANKS, "dp_sync_interval": 10**9},
            "engines.0.dp_sync_interval: Input should be less than or equal to 1000000 (got 1000000000)",
        ),
        (
            {"model": MOE, "afd": {**AFD, "bandwidth": 1.5}},
            "engines.0.afd.bandwidth: Input should be greater than or equal to 1000000 (got 1.5)",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_its_key(tmp_path: Path, keys: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, {"max_model_len": 8192, **keys})
    assert says.format(tmp_path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"time_limit": 1e308}, "time_limit: Input should be less than 9223372"),
        ({"limits": []}, "limits: give 1 or more (got 0)"),
        ({"limits": 5}, "limits: expected a list (got 5)"),
    ],
)
def test_what_a_file_cannot_say_of_all_its_engines_is_refused(tmp_path: Path, keys: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, **keys)
    assert says in str(error.value)


def test_buckets_that_cannot_be_are_refused_from_python_too(tmp_path: Path) -> None:
    engines, asked = load(tmp_path).engines, recorded_requests(read_requests(EXAMPLE.with_name("requests.jsonl")))
    with pytest.raises(ValueError, match=r"limits is \[5, 5\]; list rising numbers of tokens"):
        simulate(engines, asked, "least-loaded", limits=(5, 5))
    with pytest.raises(ValueError, match="turn_tokens is 0; a turn generates 1 token or more"):
        simulate(engines, asked, "least-loaded", turn_tokens=0)


def test_a_link_that_is_no_network_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_transfer\.bandwidth: Input should be greater than or equal to 1000000"):
        load(tmp_path, PREFILL, DECODE, kv_transfer={"bandwidth": 25})


@pytest.mark.parametrize("more", [{}, RANKS, {"afd": AFD}], ids=["whole", "ranks", "apart"])
def test_what_was_measured_on_another_gpu_is_refused(tmp_path: Path, more: dict[str, Any]) -> None:
    save_calibration(tmp_path / "a100.json", replace(CALIBRATION, device="NVIDIA A100"))
    engine = {"model": MOE, "max_model_len": 8192, "profile": "a100.json", **more}
    assert load(tmp_path, {**engine, "gpu": "A100"}).engines
    with pytest.raises(ConfigError, match=r"engines\.0\.profile: .*a100\.json: it was measured on NVIDIA A100, and"):
        load(tmp_path, engine)


OWN = {
    "name": "mine",
    "memory": "80 GB",
    "bandwidth": "2 TB/s",
    "flops": "300 TFLOP/s",
    "link": "200 GB/s",
    "source": "me",
}
NODE = {"gpus": 4, "inter_bandwidth": "100 Gb/s"}


def test_a_gpu_and_its_node_may_be_described_as_in_a_cluster_file(tmp_path: Path) -> None:
    def decode_seconds(**keys: object) -> int:
        cost = load(tmp_path, {"tensor_parallel_size": 2, **keys}).engines[0].cost
        base, _, _ = cost.line(DecodeBatch(8), 8000)
        return base

    (engine,) = load(tmp_path, {"gpu": OWN}).engines
    tokens = kv_tokens(load_model(SMALL["model"]), 80e9 - 0.55 * 2**30, 0.9, 1, batched_tokens=8192, seqs=1024)
    assert engine.config.kv_blocks == tokens // 16 - 1
    assert decode_seconds(node={**NODE, "intra_bandwidth": "450 GB/s"}) == decode_seconds(node=NODE) == decode_seconds()
    assert decode_seconds(node={**NODE, "intra_bandwidth": "25 GB/s"}) > decode_seconds()


def test_ranks_beyond_a_node_talk_over_its_network(tmp_path: Path) -> None:
    ranks = {"model": MOE, "data_parallel_size": 8, "enable_expert_parallel": True, "max_model_len": 8192}

    def together(**keys: object) -> int:
        group = load(tmp_path, {**ranks, **keys}).engines[0].group
        assert group is not None
        return max(more for _, more in group.cost.together(Graph("NONE"), 4096, 8, 0.0, 0).lines)

    near, far = {**NODE, "gpus": 8}, {**NODE, "gpus": 2}
    assert together(node=near) == together(node={**near, "inter_bandwidth": "1 GB/s"}) == together()
    assert together(node=far) > together(node={**far, "inter_bandwidth": "400 GB/s"}) > together()
    assert together(node={**NODE, "gpus": 4, "inter_bandwidth": "200 GB/s"}) > together()


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"gpu": 5}, "engines.0.gpu: expected a name, such as A800, or a mapping (got 5)"),
        ({"gpu": {**OWN, "name": "a100"}}, "engines.0.gpu.link: A100 has 3e+11, but this has 2e+11: "),
        ({"gpu": {**OWN, "memory": 80e9}}, "engines.0.gpu.memory is 80000000000.0 without a unit; add one of GB"),
        ({"gpu": {**OWN, "memory": "80 MiB"}}, "engines.0.gpu.memory is 8.38861e+07; a GPU has"),
        ({"gpu": {"name": "mine"}}, "engines.0.gpu.memory: this key is required; add it"),
        ({"gpu": {**OWN, "link": "1 GB/s"}}, "engines.0.gpu: intra_bandwidth is 1 GB/s (8 Gb/s); the link of a GPU"),
        ({"node": {"gpus": 4}}, "engines.0.node.inter_bandwidth: this key is required"),
        ({"node": {**NODE, "gpus": 0}}, "engines.0.node.gpus: Input should be greater than or equal to 1"),
        ({"node": {**NODE, "gpus": 2000}}, "engines.0.node.gpus is 2,000; at most 1,024 are allowed"),
        ({"node": {**NODE, "inter_bandwidth": 5e10}}, "engines.0.node.inter_bandwidth is 50000000000.0 without a unit"),
        ({"node": {**NODE, "intra_bandwidth": "900 GB/s"}}, "engines.0.node.intra_bandwidth is 900 GB/s"),
        (
            {"node": NODE, "tensor_parallel_size": 8},
            "engines.0.node.gpus is 4, fewer than tensor_parallel_size, 8: lower tensor_parallel_size",
        ),
        (
            {"node": NODE, "network_bandwidth": 1e10},
            "engines.0.network_bandwidth is given, but node has inter_bandwidth: leave one of them out",
        ),
        ({"network_bandwidth": 1.0}, "engines.0.network_bandwidth: inter_bandwidth is 8e-09 GB/s"),
    ],
)
def test_a_gpu_or_node_that_cannot_be_is_refused_with_its_key(tmp_path: Path, keys: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, keys)
    assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("role", ["colocated", "decode"])
def test_a_file_with_attention_and_ffn_apart_runs_and_visiting_changes_nothing(
    tmp_path: Path, role: str, ahead: bool
) -> None:
    others, keys = [], {}
    if role == "decode":
        others = [{"name": "prefill", "role": "prefill", "model": MOE, "tensor_parallel_size": 2}]
        keys = {"kv_transfer": {"bandwidth": 1e9}}
    engine = {"model": MOE, "afd": {**AFD, "micro_batches": 3}, "role": role, "max_num_seqs": 4, "max_model_len": 4096}
    engine["async_scheduling"] = ahead
    found = load(tmp_path, engine, *[{**it, "max_model_len": 4096} for it in others], **keys)
    asked = read_requests(EXAMPLE.with_name("requests.jsonl"))
    results = [
        simulate(
            found.engines,
            recorded_requests([it for it in asked if it.prompt_tokens < 3000], rate_scale=8),
            "round-robin",
            kv_transfer=found.kv_transfer,
            decode_route=found.decode_policy(),
            exact=exact,
        )
        for exact in (False, True)
    ]
    assert results[0].groups == results[1].groups and results[0].groups[0].bounded_ticks
    for column in ("finish", "first_token", "prefill_end", "engine", "status"):
        assert getattr(results[0].requests, column).tolist() == getattr(results[1].requests, column).tolist()
    assert (results[0].requests.status == 0).sum() >= 8


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"model": "Qwen/Qwen3-0.6B"}, "engines.0.afd: Qwen/Qwen3-0.6B has no experts"),
        ({"afd": {**AFD, "attention": 5}}, "engines.0.afd.attention is 5, not a multiple of ffn 2"),
        ({"afd": {**AFD, "attention": 3, "ffn": 3}}, "engines.0.afd.ffn is 3; it must divide the 128 experts"),
        ({"afd": {**AFD, "ffn": 1}, "gpu": "L40S"}, "engines.0.afd.ffn is 1: an FFN rank needs"),
        ({"afd": {**AFD, "ffn_gpu": "H1000"}}, "engines.0.afd.ffn_gpu: unknown GPU 'H1000'"),
        ({"pipeline_parallel_size": 2}, "engines.0.afd with pipeline_parallel_size is not simulated"),
        (
            {"speculative": {"method": "mtp", "num_speculative_tokens": 1, "accepted": [1]}},
            "engines.0.afd with speculative is not simulated",
        ),
        ({"afd": {"attention": 4, "ffn": 2}}, "engines.0.afd.bandwidth"),
        ({"afd": {**AFD, "micro_batches": 0}}, "engines.0.afd.micro_batches"),
        ({"afd": {**AFD, "micro_batches": 4096}}, "engines.0.afd.micro_batches is 4096, more than"),
        ({"afd": {**AFD, "micro_batches": 1000}}, "no times for micro_batches 1000: there is no time for 1024 x"),
        ({"afd": {**AFD, "dbo_decode_token_threshold": 32}}, "engines.0.afd.dbo_decode_token_threshold or"),
        (
            {"afd": {**AFD, "dbo_decode_token_threshold": 1, "dbo_prefill_token_threshold": 512}},
            "engines.0.afd.dbo_decode_token_threshold is 1; set it to 2 (one per micro-batch) or more",
        ),
    ],
)
def test_what_cannot_be_apart_is_refused_with_its_key(tmp_path: Path, keys: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        apart(tmp_path, **keys)
    assert says in str(error.value) and "\n" not in str(error.value)
