"""Offered clusters: which are meant, and how a text that names none is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from oracles.small_cluster import A800

from libra.hardware.cluster import Cluster, ServingPool
from libra.hardware.offers import MOST_SIZES, parse_offers

FILE = Cluster((A800,))


def devices(text: str, file: Cluster | None = None) -> list[int]:
    return [it.devices for it in parse_offers(text, file, {})[0]]


def test_ranges_are_whole_nodes() -> None:
    assert devices("h100:8..32") == [8, 16, 24, 32]
    assert devices("h100:16, b200:8..16") == [16, 8, 16]
    assert devices("L40S:4") == [4]


def test_long_ranges_keep_their_ends_and_are_told() -> None:
    clusters, notes = parse_offers("h200:8..512", None, {})
    sizes = [it.devices for it in clusters]
    assert (sizes[0], sizes[-1]) == (8, 512) and len(sizes) <= MOST_SIZES
    assert sizes == sorted(set(sizes)) and not any(size % 8 for size in sizes)
    assert any("of 8 to 512 GPUs are compared" in note for note in notes)


def test_a_class_of_the_file_comes_before_a_gpu_of_its_name() -> None:
    [(cluster)], notes = parse_offers("A800:16", FILE, {})
    assert cluster.nodes[0].inter_bandwidth == A800.inter_bandwidth
    assert not notes


def test_pools_that_serve_are_no_part_of_an_offer_and_are_told() -> None:
    serving = Cluster((A800,), (ServingPool(replace(A800, name="chat")),))
    [cluster], notes = parse_offers("a800:16", serving, {})
    assert not cluster.serving and notes == ["chat serves users: no offer contains this pool, or its loans"]


def test_a_known_gpu_has_nodes_that_the_notes_describe() -> None:
    [cluster], [note] = parse_offers("h100:8", None, {})
    assert cluster.nodes[0].gpu.name == "H100"
    assert cluster.nodes[0].inter_bandwidth == 8 * 400e9 / 8
    assert note.startswith("h100: nodes of 8 H100 with 400 GB/s (3200 Gb/s) to other nodes are assumed")


def test_costs_are_of_one_gpu_and_hour() -> None:
    clusters, _ = parse_offers("h100:8..16,b200:8", None, {"H100": 2.5})
    assert [it.cost_per_hour for it in clusters] == [20, 40, None]
    clusters, _ = parse_offers("h100:8,H100:16", None, {"h100": 2.5})
    assert [it.cost_per_hour for it in clusters] == [20, 40]


@pytest.mark.parametrize(
    ("text", "costs", "words"),
    [
        ("h100", {}, "'h100' is not an offer; give NAME:GPUS or NAME:FIRST..LAST"),
        ("h100:8,", {}, "'' is not an offer"),
        ("h100:12", {}, "h100: 12 GPUs are not whole nodes of 8; give a multiple of 8"),
        ("h100:0", {}, "h100:0: give at least 1 GPU, and the smaller number first"),
        ("h100:16..8", {}, "h100:16..8: give at least 1 GPU, and the smaller number first"),
        ("h100:8..16,h100:16", {}, "16 GPUs of h100 are offered twice"),
        ("h999:8", {}, "offer: unknown GPU 'h999'"),
        ("h100:8", {"b200": 5.0}, "a cost is given for b200, which is not offered"),
        (
            "h100:8",
            {"h100": 5_000.0},
            "cost_per_hour is 40000; a node costs more than $0 and at most $1000 an hour for",
        ),
    ],
)
def test_what_is_no_offer_is_refused(text: str, costs: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError) as refused:
        parse_offers(text, None, costs)
    assert words in str(refused.value)
