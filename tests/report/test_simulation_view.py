"""What is said of a simulation follows from its numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from made_simulation import busy, cut_short, open_loop, run, trajectories

from libra.report.simulation_page import headline_tiles
from libra.report.simulation_view import (
    LatencyPart,
    SimulationView,
    Waiting,
    headline,
    notices,
    simulation_view,
)
from libra.report.words import fine_duration, worded
from libra.sim.outcome.definitions import DEFINITIONS
from libra.sim.workload.requests import Requests


def viewed(queueing: float, prefill: float, decode: float, busy_share: float) -> SimulationView:
    """One engine, with these seconds of a mean request."""
    view = simulation_view(run(open_loop(20), watched=False))
    phases = tuple(
        LatencyPart(name, seconds, seconds / (queueing + prefill + decode))
        for name, seconds in (("queueing", queueing), ("prefill", prefill), ("decode", decode))
    )
    return replace(view, phases=phases, tail=0.1, metrics=replace(view.metrics, busy_share=busy_share))


BOUNDS = [
    (
        "a queue",
        viewed(3, 1, 6, 0.9),
        "Queueing is the bottleneck: it takes 30 % of a request's mean 10.0 s, and the engine works 90 % of the time.",
    ),
    (
        "a queue for blocks",
        replace(viewed(3, 1, 6, 0.9), waiting=Waiting(0.2, 0.7)),
        "mean 10.0 s, 70 % of it while KV blocks were taken, and",
    ),
    (
        "a queue for seats",
        replace(viewed(3, 1, 6, 0.9), waiting=Waiting(0.8, 0.7)),
        "80 % of it while seats (max_num_seqs) were taken",
    ),
    ("a queue for neither", replace(viewed(3, 1, 6, 0.9), waiting=Waiting(0.1, 0.2)), "mean 10.0 s, and"),
    ("nothing to do", viewed(0.1, 1, 9, 0.3), "Too few requests: the engine works 30 % of the time"),
    (
        "generation",
        viewed(0, 1, 9, 0.9),
        "Decode is the bottleneck: 90 % of a request's time, and the engine works 90 %",
    ),
    ("prompts", viewed(0, 8, 2, 0.9), "Prefill is the bottleneck: 80 % of a request's time"),
    ("a tail", replace(viewed(0, 8, 2, 0.9), tail=0.4), "The last tenth of the requests takes 40 % of the makespan."),
]


@pytest.mark.parametrize(("view", "words"), [case[1:] for case in BOUNDS], ids=[case[0] for case in BOUNDS])
def test_what_bounds_a_simulation(view: SimulationView, words: str) -> None:
    assert words in headline(view)


def test_preemptions_and_full_blocks_are_told() -> None:
    view = viewed(0, 1, 9, 0.9)
    metrics = view.metrics

    def said(preemptions: int, peak: float | None) -> str:
        return headline(replace(view, metrics=replace(metrics, preemptions=preemptions, kv_peak_share=peak)))

    assert "preempt" not in said(0, 0.5) and "KV" not in said(0, None)
    assert "KV was full at times, but no request was preempted." in said(0, 0.96)
    assert "10 preemptions, 0.5 for each finished request." in said(10, None)
    assert said(10, 1.0).endswith("KV was full at times.")


def test_uneven_engines_are_told() -> None:
    view = simulation_view(busy())
    busiest, *others = view.engines

    def said(shares: tuple[float, ...], **changes: Any) -> str:
        rest = (replace(it, busy_share=share, **changes) for it, share in zip(others, shares, strict=True))
        return headline(replace(view, engines=(replace(busiest, busy_share=0.9), *rest)))

    uneven = "Load is uneven: engine <0> works 90 % of the time, the other 2 engines on average 30 %"
    assert f"{uneven}." in said((0.2, 0.4))
    assert f"{uneven}; 2 of them had no request." in said((0.2, 0.4), requests=0)
    assert "uneven" not in said((0.8, 0.8))
    assert "uneven" not in said((0.2, 0.2), role="decode")


def test_a_lack_of_requests_is_of_the_mean_engine() -> None:
    """One engine may work all the time while the others have nothing to do."""
    view = simulation_view(busy())
    busiest, *others = (replace(it, busy_share=0.1, requests=0) for it in view.engines)
    phases = viewed(0.1, 1, 9, 0.3).phases
    metrics = replace(view.metrics, busy_share=0.4, paused_share=0.0)
    idle = replace(view, engines=(replace(busiest, busy_share=0.99), *others), phases=phases, metrics=metrics)
    assert (
        "Too few requests: the engines work 40 % of the time on average, and requests hardly queue"
        " (1 % of a request's time). Load is uneven: engine <0> works 99 % of the time, the other 2 engines on average"
        " 10 %; 2 of them had no request."
    ) in headline(idle)


def test_phases_add_up_to_the_mean_latency() -> None:
    for result in (busy(), trajectories()):
        view = simulation_view(result)
        assert [phase.name for phase in view.phases] == ["queueing", "prefill", "decode"]
        assert view.metrics.latency is not None
        assert sum(phase.seconds for phase in view.phases) == pytest.approx(view.metrics.latency.mean)
        assert sum(phase.share for phase in view.phases) == pytest.approx(1.0)


def test_a_full_engine_lets_requests_wait_for_its_max_num_seqs_or_blocks() -> None:
    flood = open_loop(80, 10_000.0)
    for_max_num_seqs = simulation_view(run(flood, blocks=60_000)).waiting
    assert for_max_num_seqs is not None and for_max_num_seqs.max_num_seqs > 0.9 and for_max_num_seqs.blocks == 0.0
    for_blocks = simulation_view(run(flood, blocks=256)).waiting
    assert for_blocks is not None and for_blocks.blocks > 0.3 > for_blocks.max_num_seqs
    assert simulation_view(run(flood, watched=False)).waiting is None


def test_a_reader_is_told_what_did_not_end() -> None:
    partial, refused = notices(simulation_view(cut_short()))
    assert partial.startswith("Stopped by the time limit at 3.00 s: ")
    assert refused == "1 request was refused: no engine holds its … tokens and a turn of … more."
    assert notices(simulation_view(busy())) == ()


def test_nothing_to_judge() -> None:
    assert headline(simulation_view(run(Requests(list, {})))).startswith("No request arrived")
    assert headline(simulation_view(run(open_loop(3), time_limit=1))).startswith("None of 3 requests finished")


def test_tiles_name_the_busiest_engine_and_alarm_where_requests_are_lost() -> None:
    tiles = {tile.label: tile for tile in headline_tiles(simulation_view(cut_short()))}
    assert tiles["Finished"].alarming and "1 refused" in tiles["Finished"].detail
    assert "engine <0>" in tiles["Engines busy"].detail
    assert not any(tile.alarming for tile in headline_tiles(simulation_view(busy())))
    assert [tile.label for tile in headline_tiles(simulation_view(trajectories()))][-1] == "Trajectory, P50"


def test_every_unit_has_words() -> None:
    assert {it.unit: worded(1.0, it.unit) for it in DEFINITIONS.values()} == {
        "count": "1",
        "s": "1.00 s",
        "tokens": "1",
        "tokens/s": "1 tokens/s",
        "requests/s": "1 requests/s",
        "share": "100.0 %",
        "ratio": "1",
    }


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.9996e-3, "1 ms"), (0.9994e-3, "999 µs"), (0.99951, "1.00 s"), (0.9994, "999 ms"), (1e-12, "0 s")],
)
def test_durations_change_their_unit_where_rounding_does(seconds: float, words: str) -> None:
    assert fine_duration(seconds) == words
