"""The hardware a planner is told of: data sheets, units, and every way to write a cluster file that means nothing."""

from __future__ import annotations

import doctest
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tables import by_name

import libra.config.units
from libra.config.run import ConfigError
from libra.config.units import RATES, SIZES, SPEEDS, quantity, rate
from libra.hardware.cluster import GPUS, Cluster, NodeClass, ServingPool, override, with_gpus
from libra.hardware.cluster_file import gpu_of, load_cluster

EXAMPLES = Path(__file__).parents[2] / "examples"
A800 = NodeClass("a800", 6, 8, GPUS["A800"], 200e9, 25e9)
L40S = NodeClass("l40s", 2, 4, GPUS["L40S"], 32e9, 12.5e9)


def test_the_48_gpu_example() -> None:
    assert load_cluster(EXAMPLES / "cluster_48_a800.yaml") == Cluster((A800,))


def test_the_mixed_example() -> None:
    cluster = load_cluster(EXAMPLES / "cluster_mixed.yaml")
    assert [(node.name, node.devices, node.gpu.name) for node in cluster.nodes] == [
        ("h100", 64, "H100"),
        ("a800", 128, "A800"),
        ("l40s", 32, "L40S"),
    ]
    assert [node.intra_bandwidth for node in cluster.nodes] == [450e9, 200e9, 25e9]
    assert [node.inter_bandwidth for node in cluster.nodes] == [50e9, 25e9, 12.5e9]
    assert cluster.devices == 224  # without the 16 that serve
    assert [(pool.name, pool.nodes.devices) for pool in cluster.serving] == [("chat", 16)]


# name -> memory GiB, bandwidth TB/s, bf16 TFLOP/s, link GB/s in one direction
DATA_SHEETS = {
    "A100": (80, 2.039, 312, 300),
    "A800": (80, 2.039, 312, 200),
    "H100": (80, 3.35, 989, 450),
    "H800": (80, 3.35, 989, 200),
    "H200": (141, 4.8, 989, 450),
    "B200": (180, 7.7, 2250, 900),
    "A100-40GB": (40, 1.555, 312, 300),
    "L4": (24, 0.3, 121, 32),
    "L40S": (48, 0.864, 362, 32),
    "H20": (96, 4.0, 148, 450),
    "H20-3e": (141, 4.8, 148, 450),
    "B300": (288, 7.75, 2250, 900),
    "GB200": (186, 8.0, 2500, 900),
    "GB300": (288, 8.0, 2500, 900),
    "RTX 3090": (24, 0.936, 71, 32),
    "RTX 4090": (24, 1.008, 165, 32),
    "RTX PRO 6000": (96, 1.792, 504, 64),
    "MI300X": (192, 5.3, 1307, 448),
    "MI355X": (288, 8.0, 2517, 537.6),
}


@pytest.mark.parametrize("name", DATA_SHEETS)
def test_a_known_gpu_has_the_numbers_of_its_data_sheet(name: str) -> None:
    gpu = GPUS[name]
    memory, bandwidth, flops, link = DATA_SHEETS[name]
    assert gpu.name == name
    assert 0.93 * memory <= gpu.memory / 2**30 <= memory  # the driver keeps some, error correction of GDDR6 a sixteenth
    assert gpu.bandwidth == pytest.approx(bandwidth * 1e12, rel=1e-9)
    assert gpu.flops == pytest.approx(flops * 1e12, rel=2e-3)
    assert 0.3 < (gpu.memory - gpu.usable) / 2**30 < 1.0
    assert gpu.link == link * 1e9
    assert "data sheet" in gpu.source or "white paper" in gpu.source


def test_no_other_gpu_is_known() -> None:
    assert set(GPUS) == set(DATA_SHEETS)


@pytest.mark.parametrize(
    "name", ["A10", "A30", "A100 PCIe", "A100-20GB", "B100", "V100", "L20", "L4S", "H100 NVL", "GH200"]
)
def test_no_gpu_is_taken_for_another_one(name: str) -> None:
    with pytest.raises(ValueError, match=r"unknown GPU .*; known are A100, .*; describe another one by a mapping"):
        gpu_of(name, "gpu")


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("A100-80GB", "A100"),
        ("A100 40GB", "A100-40GB"),
        ("nvidia-l4", "L4"),
        ("H200 141GB", "H200"),
        ("GeForce RTX 4090", "RTX 4090"),
    ],
)
def test_another_spelling_of_a_gpu_is_recognised(name: str, known: str) -> None:
    with pytest.raises(ValueError, match=f"unknown GPU .*; did you mean {known}?"):
        gpu_of(name, "gpu")


QUANTITIES: list[tuple[str, Any, float]] = [
    ("200 Gb/s", RATES, 25e9),
    ("200Gbit/s", RATES, 25e9),
    ("200 Gbps", RATES, 25e9),
    (" 25 GB/s ", RATES, 25e9),
    ("1.6 Tb/s", RATES, 200e9),
    ("100 Mb/s", RATES, 12.5e6),
    ("80 GiB", SIZES, 80 * 2**30),
    ("80 GB", SIZES, 80e9),
    ("312 TFLOP/s", SPEEDS, 312e12),
    ("2.25 PFLOPS", SPEEDS, 2.25e15),
]


@pytest.mark.parametrize(("text", "units", "value"), QUANTITIES)
def test_a_quantity_is_read_in_its_unit(text: str, units: Any, value: float) -> None:
    assert quantity("x", text, units) == pytest.approx(value, rel=1e-12)


NO_QUANTITIES: list[tuple[object, str]] = [
    (200, "x is 200 without a unit; add one of GB/s, "),
    (True, "x is True without a unit"),
    (math.nan, "x is nan without a unit"),
    ("200", "x is '200'; write a number and one of GB/s, TB/s, MB/s, Gb/s, "),
    ("200 GB", "x is '200 GB'; write"),
    ("200 gb/s", "x is '200 gb/s'; write a number"),  # bits or bytes?
    ("-200 Gb/s", "x is '-200 Gb/s'; write"),
    ("1,600 Gb/s", "x is '1,600 Gb/s'; write"),
    ("nan Gb/s", "x is 'nan Gb/s'; write"),
    ("", "x is ''; write"),
    (None, "x is None; write"),
    (["25 GB/s"], "x is ['25 GB/s']; write"),
]


@pytest.mark.parametrize(("given", "message"), NO_QUANTITIES)
def test_what_is_no_quantity_is_refused_with_the_units_understood(given: object, message: str) -> None:
    with pytest.raises(ValueError) as refusal:
        quantity("x", given, RATES)
    assert str(refusal.value).startswith(message)


@given(st.floats(min_value=1, max_value=1e4), st.sampled_from(["M", "G", "T"]))
def test_a_byte_is_eight_bits(number: float, prefix: str) -> None:
    text = f"{number:.3f}"
    as_bytes = quantity("x", f"{text} {prefix}B/s", RATES)
    for bits in ("b/s", "bit/s", "bps"):
        assert quantity("x", f"{text} {prefix}{bits}", RATES) * 8 == pytest.approx(as_bytes, rel=1e-12)


def test_a_rate_is_shown_in_bytes_and_in_bits() -> None:
    assert rate(25e9) == "25 GB/s (200 Gb/s)"


def test_the_examples_in_the_units_work() -> None:
    assert doctest.testmod(libra.config.units).failed == 0


REFUSED_VALUES: list[tuple[str, Callable[[], object], str]] = [
    ("no node", lambda: Cluster(()), "nodes is empty"),
    ("zero nodes", lambda: replace(A800, count=0), "count is 0; set it to 1 or more"),
    ("negative GPUs", lambda: replace(A800, gpus=-8), "gpus is -8; set it to 1 or more"),
    ("no name", lambda: replace(A800, name=" "), "name is empty"),
    ("same name", lambda: Cluster((A800, A800)), "name 'a800' is given to two classes"),
    ("serving has it", lambda: Cluster((A800,), (ServingPool(A800),)), "name 'a800' is given to two classes"),
    ("bytes for bits", lambda: replace(A800, inter_bandwidth=3.2e12), r"; was 400 GB/s \(3200 Gb/s\) meant\?"),
    ("bits for bytes", lambda: replace(A800, inter_bandwidth=0.1e9), r"; was 0.8 GB/s \(6.4 Gb/s\) meant\?"),
    ("no link at all", lambda: replace(A800, inter_bandwidth=0.0), "inter_bandwidth is 0 GB/s .* check the unit"),
    ("not a number", lambda: replace(A800, inter_bandwidth=math.nan), "inter_bandwidth is nan"),
    ("slow inside", lambda: replace(A800, intra_bandwidth=1e9), "intra_bandwidth is 1 GB/s"),
    ("both directions", lambda: replace(A800, intra_bandwidth=400e9), "A800 reaches 200 GB/s .* in one direction"),
    ("memory in GB", lambda: replace(GPUS["A100"], memory=80.0), "memory is 80; a GPU has 1e.09 to"),
    ("speed in TFLOP/s", lambda: replace(GPUS["A100"], flops=312.0), "flops is 312; a GPU has"),
    ("endless bandwidth", lambda: replace(GPUS["A100"], bandwidth=math.inf), "bandwidth is inf; a GPU has"),
    ("nameless GPU", lambda: replace(GPUS["A100"], name=""), "name is empty"),
]


@by_name("make, message", REFUSED_VALUES)
def test_an_impossible_value_is_refused_where_it_is_made(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_class_is_found_by_name() -> None:
    cluster = Cluster((A800, L40S))
    assert cluster.node_class("l40s") is L40S
    with pytest.raises(ValueError, match="unknown class of nodes 'l40'; did you mean l40s"):
        cluster.node_class("l40")


def test_what_if_there_were_more_nodes() -> None:
    cluster = Cluster((A800, L40S))
    assert [n.count for n in override(cluster, {"a800": 7}).nodes] == [7, 2]
    assert override(cluster, {"a800": 0}) == Cluster((L40S,))
    assert override(cluster, {}) == cluster
    assert with_gpus(Cluster((A800,)), 64).devices == 64


WHAT_IF: list[tuple[str, Callable[[], object], str]] = [
    ("unknown class", lambda: override(Cluster((A800,)), {"a80": 1}),
     "unknown class of nodes 'a80'; did you mean a800"),
    ("negative", lambda: override(Cluster((A800,)), {"a800": -1}), "a800 is -1 nodes"),
    ("nothing left", lambda: override(Cluster((A800,)), {"a800": 0}), "nodes is empty"),
    ("part of a node", lambda: with_gpus(Cluster((A800,)), 60), "nodes of 'a800' have 8: give a positive multiple"),
    ("no GPU", lambda: with_gpus(Cluster((A800,)), 0), "gpus is 0"),
    ("which class", lambda: with_gpus(Cluster((A800, L40S)), 64), "give nodes by class, as in a800=6, l40s=2"),
]  # fmt: skip


@by_name("make, message", WHAT_IF)
def test_what_if_is_refused_where_it_is_no_cluster(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


CUSTOM = {
    "name": "X1",
    "memory": "64 GiB",
    "bandwidth": "1.6 TB/s",
    "flops": "300 TFLOP/s",
    "link": "100 GB/s",
    "source": "its data sheet",
}


def node(**changes: object) -> dict[str, Any]:
    given = {"name": "a", "count": 6, "gpus": 8, "gpu": "A800", "inter_bandwidth": "200 Gb/s", **changes}
    return {key: value for key, value in given.items() if value != "left out"}


def load(directory: Path, data: object) -> Cluster:
    path = directory / "cluster.yaml"
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data))
    return load_cluster(path)


def test_a_gpu_may_be_described(tmp_path: Path) -> None:
    gpu = load(tmp_path, {"nodes": [node(gpu=CUSTOM)]}).nodes[0].gpu
    assert (gpu.name, gpu.memory, gpu.bandwidth, gpu.flops, gpu.link) == ("X1", 64 * 2**30, 1.6e12, 300e12, 100e9)


def test_the_case_of_a_gpu_name_does_not_matter(tmp_path: Path) -> None:
    assert load(tmp_path, {"nodes": [node(gpu="h100")]}).nodes[0].gpu is GPUS["H100"]


REFUSED_FILES: list[tuple[str, object, str]] = [
    ("no nodes", {"nodes": []}, "nodes is empty; a cluster has at least one node: give 1 or more"),
    ("nodes left out", {"serving": []}, "nodes: this key is required; add it"),
    ("typo", {"nodes": [node(inter_bandwith="1 Gb/s")]},
     "nodes.0.inter_bandwith: unknown key 'inter_bandwith'; did you"),
    ("typo at the top", {"node": []}, "node: unknown key 'node'; did you mean nodes?"),
    ("zero nodes", {"nodes": [node(count=0)]}, "nodes.0.count is 0; set it to 1 or more"),
    ("negative nodes", {"nodes": [node(), node(name="b", count=-1)]}, "nodes.1.count is -1; set it to 1 or more"),
    ("zero GPUs", {"nodes": [node(gpus=0)]}, "nodes.0.gpus is 0; set it to 1 or more"),
    ("part of a node", {"nodes": [node(count=1.5)]}, "nodes.0.count: Input should be a valid integer (got 1.5)"),
    ("true nodes", {"nodes": [node(count=True)]}, "nodes.0.count: Input should be a valid integer (got True)"),
    ("unknown GPU", {"nodes": [node(gpu="A10")]},
     "nodes.0.gpu: unknown GPU 'A10'; known are A100, "),
    ("unlike any", {"nodes": [node(gpu="TPU")]}, "describe another one by a mapping of name, memory, bandwidth, flops"),
    ("no GPU", {"nodes": [node(gpu=None)]}, "nodes.0.gpu: expected a name, such as A800, or a mapping (got None)"),
    ("GPU without a link", {"nodes": [node(gpu={"name": "X"})]}, "nodes.0.gpu.memory: this key is required; add it"),
    ("GPU in numbers", {"nodes": [node(gpu={**CUSTOM, "memory": 80})]}, "nodes.0.gpu.memory is 80 without a unit; add"),
    ("GPU too small", {"nodes": [node(gpu={**CUSTOM, "memory": "64 MiB"})]},
     "nodes.0.gpu.memory is 6.71089e+07; a GPU"),
    ("bare number", {"nodes": [node(inter_bandwidth=200)]},
     "nodes.0.inter_bandwidth is 200 without a unit; add one of"),
    ("wrong unit", {"nodes": [node(inter_bandwidth="200 TB/s")]},
     "nodes.0.inter_bandwidth is 200000 GB/s (1.6e+06 Gb/s)"),
    ("off by eight", {"nodes": [node(inter_bandwidth="3200 GB/s")]}, "was 400 GB/s (3200 Gb/s) meant?"),
    ("too fast inside", {"nodes": [node(intra_bandwidth="400 GB/s")]},
     "nodes.0.intra_bandwidth is 400 GB/s (3200 Gb/s)"),
    ("no network", {"nodes": [node(inter_bandwidth="left out")]}, "nodes.0.inter_bandwidth: this key is required"),
    ("same name", {"nodes": [node(), node()]}, "name 'a' is given to two classes of nodes; name each once"),
    ("bad serving", {"nodes": [node()], "serving": [node(name="s", count=0)]}, "serving.0.count is 0"),
    ("given twice", "nodes: []\nnodes: []\n", "the key 'nodes' is given twice"),
    ("a list", "- nodes", "expected a mapping of keys, as in examples/cluster_48_a800.yaml"),
]  # fmt: skip


@by_name("data, message", REFUSED_FILES)
def test_a_file_that_is_no_cluster_is_refused_by_key(tmp_path: Path, data: object, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load(tmp_path, data)
    text = str(refusal.value)
    assert text.startswith(f"{tmp_path / 'cluster.yaml'}: ")
    assert message in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        ({}, None),
        ({"bandwidth": "2000 GB/s", "flops": "300 TFLOP/s"}, None),  # rounded
        ({"memory": "40 GiB"}, "gpu.memory: A100 has "),
        ({"link": "32 GB/s"}, "gpu.link: A100 has "),
    ],
)
def test_a_described_gpu_of_a_known_name_is_the_known_one_or_told_apart(
    change: dict[str, str], refused: str | None
) -> None:
    sheet = {"memory": "80 GiB", "bandwidth": "2039 GB/s", "flops": "312 TFLOP/s", "link": "300 GB/s"}
    given = {"name": "a100", "source": "data sheet", **sheet, **change}
    if refused is None:
        assert gpu_of(given, "gpu") is GPUS["A100"]
        return
    with pytest.raises(ValueError, match=f"^{refused}") as told:
        gpu_of(given, "gpu")
    assert str(told.value).endswith("leave the mapping out, or choose another name")
