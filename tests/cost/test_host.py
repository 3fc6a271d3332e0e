"""The host's part of a price, and the graphs that it launches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from libra.cost.graphs import CudagraphMode, capture_sizes, graph_of, padded
from libra.cost.grid import EngineGrid, EngineProfile
from libra.cost.host import NAMED_HOSTS, NO_HOST, HostCost, default_host, named_host
from libra.cost.kernels import NO_TERMS, KernelTerms, default_terms
from libra.cost.sources.profiles import host_part
from libra.hardware.model_file import load_model

GRID = EngineGrid(1, (1, 2), (1, 2), ((1.0, 1.0), (1.0, 1.0)), (1, 2), (0, 1), ((1.0, 1.0), (2.0, 2.0)))
PROFILE = EngineProfile("H100", "model", "bf16", "roofline", (GRID,))


@pytest.mark.parametrize(
    ("seats", "budget", "most", "wanted"),
    [
        (1, 2048, 512, (1, 2)),
        (3, 2048, 512, (1, 2, 3, 4)),
        (20, 2048, 512, (1, 2, 4, 8, 16, 20, 24, 32, 40)),
        (20, 30, 512, (1, 2, 4, 8, 16, 20, 24, 30)),
        (256, 2048, 512, (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))),
        (1024, 8192, 512, (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))),
        (1024, 8192, 1024, (1, 2, 4, *range(8, 256, 8), *range(256, 1025, 16))),
    ],
)
def test_graphs_are_captured_for_vllms_sizes(seats: int, budget: int, most: int, wanted: tuple[int, ...]) -> None:
    assert capture_sizes(seats, budget, most=most) == wanted


@pytest.mark.parametrize(("tokens", "wanted"), [(1, 1), (3, 4), (4, 4), (5, 8), (9, 9)])
def test_a_batch_runs_at_the_next_size(tokens: int, wanted: int) -> None:
    assert padded(tokens, (1, 2, 4, 8)) == wanted


@pytest.mark.parametrize(
    ("tokens", "mode", "decodes", "mixed"),
    [
        (3, "FULL_AND_PIECEWISE", ("FULL", 4), ("PIECEWISE", 4)),
        (5, "FULL_AND_PIECEWISE", ("PIECEWISE", 8), ("PIECEWISE", 8)),  # a graph of more than 6 requests has no decodes
        (9, "FULL_AND_PIECEWISE", ("NONE", 9), ("NONE", 9)),
        (3, "FULL_DECODE_ONLY", ("FULL", 4), ("NONE", 3)),
        (3, "FULL", ("FULL", 4), ("FULL", 4)),
        (3, "PIECEWISE", ("PIECEWISE", 4), ("PIECEWISE", 4)),
        (3, "NONE", ("NONE", 3), ("NONE", 3)),
    ],
)
def test_a_graph_is_chosen_by_size_and_kind_of_batch(
    tokens: int, mode: CudagraphMode, decodes: tuple[str, int], mixed: tuple[str, int]
) -> None:
    assert graph_of(tokens, (1, 2, 4, 8), 6, mode, uniform=True) == decodes
    assert graph_of(tokens, (1, 2, 4, 8), 6, mode, uniform=False) == mixed
    assert graph_of(tokens, (), 6, mode, uniform=True) == ("NONE", tokens)


def test_what_is_launched_takes_at_least_that() -> None:
    host = HostCost(piecewise=1.0, eager=3.0)
    assert [host.launching(kind) for kind in ("FULL", "PIECEWISE", "NONE")] == [0.0, 1.0, 3.0]


def test_launching_grows_with_the_layers_and_nothing_else_does() -> None:
    small, large = default_host(10), default_host(20)
    assert large.piecewise == pytest.approx(2 * small.piecewise)
    assert large.eager == pytest.approx(2 * small.eager)
    assert replace(large, piecewise=small.piecewise, eager=small.eager) == small
    assert default_terms(20).longest == pytest.approx(2 * default_terms(10).longest)


def test_layers_without_norms_of_queries_and_keys_launch_two_of_twelve_operations_less() -> None:
    normed, half, plain = default_host(12), default_host(12, plain=6), named_host("default", 12, plain=12)
    assert [half.eager, plain.eager] == pytest.approx([11 / 12 * normed.eager, 10 / 12 * normed.eager])
    assert replace(plain, eager=normed.eager) == normed
    found = {
        name: host_part("default", load_model(name), print) for name in ("Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B")
    }
    assert [it[0] for it in found.values() if it is not None] == [default_host(36), default_host(32, plain=32)]


@pytest.mark.parametrize("field", ["iteration", "request", "admission", "cached_token", "piecewise", "eager"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_seconds_of_a_host_are_finite_and_not_negative(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value}"):
        HostCost(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"), [("spread", -0.5), ("linear", -1.0), ("longest", float("nan")), ("shared", 1.0)]
)
def test_terms_that_no_kernel_has_are_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"KernelTerms.{field} is {value}"):
        KernelTerms(**{field: value})  # type: ignore[arg-type]


def test_a_profile_says_where_both_of_its_parts_are_from() -> None:
    priced = PROFILE.beside(default_host(2), default_terms(2))
    assert (PROFILE.host, PROFILE.terms) == (NO_HOST, NO_TERMS)
    assert (priced.source, priced.host.source, priced.terms.source) == (
        "roofline",
        default_host(2).source,
        default_terms(2).source,
    )
    assert priced.digest != PROFILE.digest
    assert priced.beside(NO_HOST, NO_TERMS).digest == PROFILE.digest
    with pytest.raises(ValueError, match="differ in terms or host"):
        replace(PROFILE, engines=(GRID, replace(GRID, tp=2, host=default_host(2))))


def test_a_named_host_is_the_default_one_with_other_seconds() -> None:
    assert named_host("default", 36) == default_host(36)
    assert set(NAMED_HOSTS) == {"default", "fast"}
    fast, usual = named_host("fast", 36), default_host(36)
    assert fast == replace(usual.slowed(0.8), source="fast: 0.8 of the default host's seconds")
    assert fast.eager == pytest.approx(0.8 * usual.eager) and fast.overlapped == usual.overlapped
