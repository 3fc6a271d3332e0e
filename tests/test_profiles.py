"""Where engine times come from, and that a cache changes nothing but the time it takes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from oracles.measured import CALIBRATION
from oracles.reshaped import reshaped
from oracles.small_cluster import A800, CLUSTER, QWEN_06B, QWEN_14B, RECIPE

from libra.config.cache import cache_directory
from libra.config.recipe import Recipe
from libra.config.yaml_file import ConfigError
from libra.cost.grid import EngineProfile
from libra.cost.quantization import Quantization
from libra.cost.sources.files import load_grid, save_calibration
from libra.cost.sources.profiles import engine_profiles
from libra.cost.sources.rates import Measured
from libra.cost.sources.roofline import roofline
from libra.hardware.cluster import GPU, GPUS, Cluster, NodeClass
from libra.hardware.model import ModelSpec
from libra.plan.planner import rooflines

UNKNOWN = Cluster((replace(A800, name="new", gpu=replace(GPUS["A800"], name="X1")),))
TWO_GPUS = Cluster((replace(A800, gpus=2),))  # two degrees, not four


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "libra" / "grids"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The degrees that were read, from tables that are a roofline: it is the cache that is looked at here."""
    asked: list[int] = []

    def tables(
        gpu: GPU,
        model: ModelSpec,
        tps: Iterable[int],
        *,
        quantization: Quantization,
        intra_bandwidth: float | None = None,
    ) -> EngineProfile:
        degrees = list(tps)
        asked.extend(degrees)
        found = roofline(gpu, model, degrees, quantization=quantization, intra_bandwidth=intra_bandwidth)
        return replace(found, source="tables: made up")

    monkeypatch.setattr("libra.cost.sources.profiles.tables", tables)
    return asked


def test_real_tables_are_the_same_from_the_cache() -> None:
    pytest.importorskip("aiconfigurator_core", reason="the extra `aic` is not installed")
    fresh = engine_profiles(TWO_GPUS, QWEN_06B, RECIPE, "tables")
    assert engine_profiles(TWO_GPUS, QWEN_06B, RECIPE, "tables") == fresh
    assert fresh[0].source.startswith("tables: aiconfigurator-core")
    assert [grid.tp for grid in fresh[0].engines] == [1, 2]


def test_the_cache_is_where_caches_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_directory() == tmp_path / "cache" / "libra"
    for unset in ("", None):
        monkeypatch.delenv("XDG_CACHE_HOME") if unset is None else monkeypatch.setenv("XDG_CACHE_HOME", unset)
        monkeypatch.setenv("HOME", "/home/someone")
        assert cache_directory() == Path("/home/someone/.cache/libra")


def test_what_was_read_once_is_not_read_again_and_is_the_same(reads: list[int], cache: Path) -> None:
    notes: list[str] = []
    fresh = engine_profiles(TWO_GPUS, QWEN_06B, RECIPE, note=notes.append)
    assert sorted(reads) == [1, 2]
    assert [load_grid(path) for path in cache.iterdir()] == list(fresh)
    again = engine_profiles(TWO_GPUS, QWEN_06B, RECIPE, note=notes.append)
    assert again == fresh
    assert [profile.digest for profile in again] == [profile.digest for profile in fresh]
    assert sorted(reads) == [1, 2]
    assert notes == []


def spoil_digest(text: str) -> str:
    content = json.loads(text)
    content["profile"]["engines"][0]["decode"][0][0] *= 2
    return json.dumps(content)


SPOILED: list[tuple[str, Callable[[str], str]]] = [
    ("empty", lambda text: ""),
    ("cut off", lambda text: text[: len(text) // 2]),
    ("something else", lambda text: "[1, 2, 3]"),
    ("other numbers", spoil_digest),
]


@pytest.mark.parametrize("spoil", [row[1] for row in SPOILED], ids=[row[0] for row in SPOILED])
def test_a_broken_cache_is_made_anew(reads: list[int], cache: Path, spoil: Callable[[str], str]) -> None:
    fresh = engine_profiles(TWO_GPUS, QWEN_06B, RECIPE)
    (file,) = cache.iterdir()
    whole = file.read_text()
    file.write_text(spoil(whole))
    reads.clear()
    assert engine_profiles(TWO_GPUS, QWEN_06B, RECIPE) == fresh
    assert reads
    assert file.read_text() == whole


def test_a_cache_that_cannot_be_written_costs_time_only(
    reads: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = engine_profiles(TWO_GPUS, QWEN_06B, RECIPE)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    reads.clear()
    assert engine_profiles(TWO_GPUS, QWEN_06B, RECIPE) == fresh
    assert reads


OTHERS: list[tuple[str, Cluster, ModelSpec]] = [
    ("another model", TWO_GPUS, reshaped(QWEN_06B, layers=27)),
    ("another link", Cluster((replace(TWO_GPUS.nodes[0], intra_bandwidth=100e9),)), QWEN_06B),
    ("another degree", Cluster((replace(A800, gpus=1),)), QWEN_06B),
    ("another GPU", Cluster((replace(TWO_GPUS.nodes[0], gpu=GPUS["H100"]),)), QWEN_06B),
]


@pytest.mark.parametrize(("cluster", "model"), [row[1:] for row in OTHERS], ids=[row[0] for row in OTHERS])
def test_what_differs_is_kept_apart(reads: list[int], cache: Path, cluster: Cluster, model: ModelSpec) -> None:
    (first,) = engine_profiles(TWO_GPUS, QWEN_06B, RECIPE)
    reads.clear()
    (other,) = engine_profiles(cluster, model, RECIPE)
    assert reads
    assert other != first
    assert len(list(cache.iterdir())) == 2
    # More nodes of the same kind have the same engines.
    reads.clear()
    assert engine_profiles(Cluster((replace(TWO_GPUS.nodes[0], count=9, name="b"),)), QWEN_06B, RECIPE) == (first,)
    assert not reads


def test_what_other_code_made_is_not_read(reads: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = engine_profiles(TWO_GPUS, QWEN_06B, RECIPE)
    reads.clear()
    monkeypatch.setattr("libra.cost.sources.profiles._code", lambda: "other")
    assert engine_profiles(TWO_GPUS, QWEN_06B, RECIPE) == fresh
    assert sorted(reads) == [1, 2]


def test_a_model_that_no_node_holds_has_the_roofline_times_of_engines_over_nodes(cache: Path) -> None:
    single, notes = Cluster((replace(A800, count=4, gpus=1),)), list[str]()
    recipe = RECIPE.model_copy(update={"gpu_memory_utilization": 0.36})  # 30.6 GB a GPU, and 29.5 GB of weights
    (found,) = engine_profiles(single, QWEN_14B, recipe, note=notes.append)
    assert [grid.tp for grid in found.engines] == [1, 2, 4]
    assert "no node can hold Qwen/Qwen3-14B, and kernel tables cover single nodes only" in notes[0]


def test_where_there_are_no_tables_the_roofline_takes_their_place_and_says_so(cache: Path) -> None:
    notes: list[str] = []
    found = engine_profiles(UNKNOWN, QWEN_06B, RECIPE, note=notes.append)
    assert found == rooflines(UNKNOWN, QWEN_06B, RECIPE)
    (note,) = notes
    assert note.startswith("new: engine times are the roofline's: ")
    assert "no tables for" in note and "--profile" not in note
    assert not cache.exists()


def test_tables_that_were_asked_for_and_are_not_there_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"^--profile tables: nodes new: .*: give --profile roofline$"):
        engine_profiles(UNKNOWN, QWEN_06B, RECIPE, "tables")


def test_tables_have_quantised_kernels_of_gpus_that_have_such_tensor_cores() -> None:
    pytest.importorskip("aiconfigurator_core", reason="the extra `aic` is not installed")
    nodes = NodeClass("one", 1, 1, GPUS["H100"], intra_bandwidth=450e9, inter_bandwidth=50e9)
    asked = ({}, {"rollout_dtype": "fp8"}, {"kv_cache_dtype": "fp8"})
    recipes = [RECIPE.model_copy(update=it) for it in asked]
    plain, weights, kv = (engine_profiles(Cluster((nodes,)), QWEN_14B, it, "tables")[0] for it in recipes)
    assert [it.dtype for it in (plain, weights, kv)] == ["bf16", "fp8", "bf16, KV fp8"]
    assert weights.grid(1).prefill_seconds(8192, 0) < plain.grid(1).prefill_seconds(8192, 0)
    assert kv.grid(1).decode_seconds(256, 32768) < 0.7 * plain.grid(1).decode_seconds(256, 32768)


def test_quantisations_without_tables_have_a_roofline() -> None:
    pytest.importorskip("aiconfigurator_core", reason="the extra `aic` is not installed")
    eight = Recipe(batch=64, samples_per_prompt=8, max_length=8192, rollout_dtype="fp8")
    notes: list[str] = []
    assert engine_profiles(CLUSTER, QWEN_06B, eight, note=notes.append) == rooflines(CLUSTER, QWEN_06B, eight)
    assert "A800 has no tensor cores for fp8" in notes[0]
    with pytest.raises(ConfigError, match="A800 has no tensor cores for fp8: give --profile roofline"):
        engine_profiles(CLUSTER, QWEN_06B, eight, "tables")


def test_the_roofline_that_was_asked_for_is_no_surprise() -> None:
    notes: list[str] = []
    found = engine_profiles(CLUSTER, QWEN_06B, RECIPE, "roofline", notes.append)
    assert found == rooflines(CLUSTER, QWEN_06B, RECIPE)
    assert notes == []


def test_a_calibration_file_takes_the_place_of_constants(tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    save_calibration(file, CALIBRATION)
    (found,) = engine_profiles(CLUSTER, QWEN_06B, RECIPE, str(file))
    assert found == roofline(A800.gpu, QWEN_06B, (1, 2, 4, 8), intra_bandwidth=200e9, calibration=CALIBRATION)
    assert found.source.startswith("calibration: A800, 2026-01-31")
    (constants,) = rooflines(CLUSTER, QWEN_06B, RECIPE)
    assert found.grid(1).decode_seconds(8, 4096) > constants.grid(1).decode_seconds(8, 4096)


OWN = replace(A800.gpu, name="mine")
DEVICES = [
    ("another GPU", "NVIDIA H100 80GB HBM3", A800.gpu, False),
    ("a processor", "x86_64", A800.gpu, False),
    ("the GPU", "NVIDIA A800-SXM4-80GB", A800.gpu, True),
    ("a known GPU for one's own", "NVIDIA H100 80GB HBM3", OWN, False),
    ("the same chip with half the memory", "NVIDIA A100-SXM4-40GB", GPUS["A100"], False),
    ("the same chip with twice the memory", "NVIDIA A100-SXM4-80GB", GPUS["A100-40GB"], False),
    ("the smaller one", "NVIDIA A100-SXM4-40GB", GPUS["A100-40GB"], True),
    ("one's own", "Mine 3000", OWN, True),
    ("one's own by its maker's name", "MI250X", OWN, True),
]


@pytest.mark.parametrize(("device", "gpu", "known"), [row[1:] for row in DEVICES], ids=[row[0] for row in DEVICES])
def test_a_calibration_prices_the_device_that_it_measured(tmp_path: Path, device: str, gpu: GPU, known: bool) -> None:
    file = tmp_path / "calibration.json"
    save_calibration(file, replace(CALIBRATION, device=device))
    cluster = Cluster((replace(A800, gpu=gpu),))
    if known:
        assert device in engine_profiles(cluster, QWEN_06B, RECIPE, str(file))[0].source
    else:
        with pytest.raises(ConfigError, match=f"measured on {device}, and nodes a800 have {gpu.name}"):
            engine_profiles(cluster, QWEN_06B, RECIPE, str(file))


REFUSED = [
    (
        "none",
        None,
        "No such file or directory; calibrate again, or give auto, tables or roofline, or give another file",
    ),
    ("no JSON", "{", "not JSON"),
    ("too deep", "[" * 100_000, "not JSON"),
    ("no calibration", "{}", "device: Field required; calibrate again"),
]


@pytest.mark.parametrize(("text", "message"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_a_file_that_is_no_calibration_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "calibration.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=message) as refusal:
        engine_profiles(CLUSTER, QWEN_06B, RECIPE, str(file))
    assert str(refusal.value).startswith(f"--profile {file}: ")


@pytest.mark.parametrize("device", ["AMD EPYC 7B13", "NVIDIA A100-SXM4-80GB", "NVIDIA A8000"])
def test_a_calibration_of_another_device_is_refused_with_both_names(tmp_path: Path, device: str) -> None:
    file = tmp_path / "calibration.json"
    save_calibration(file, replace(CALIBRATION, device=device))
    with pytest.raises(ConfigError, match=f"measured on {device}, and nodes a800 have A800: calibrate on A800"):
        engine_profiles(CLUSTER, QWEN_06B, RECIPE, str(file))


@pytest.mark.parametrize(("share", "same"), [(0.001, False), (0.5, True), (2.0, False)])
def test_a_gpu_that_is_not_known_by_name_is_told_from_a_cpu_by_its_rate(
    tmp_path: Path, share: float, same: bool
) -> None:
    gpu = replace(A800.gpu, name="ours")
    cluster = Cluster((replace(A800, gpu=gpu),))
    file = tmp_path / "calibration.json"
    save_calibration(file, replace(CALIBRATION, device="board 7", linear_flops=Measured(share * gpu.flops, 0.01)))
    if same:
        assert engine_profiles(cluster, QWEN_06B, RECIPE, str(file))[0].gpu == "ours"
    else:
        with pytest.raises(ConfigError, match="measured on board 7, and nodes a800 have ours"):
            engine_profiles(cluster, QWEN_06B, RECIPE, str(file))
