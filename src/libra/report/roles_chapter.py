"""The chapter of a simulation's page about separate prefill and decode: stages of requests, links, blocks kept for
transfers, and the parts of TTFT.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from libra.report.charts import Figure, Series, column_figure, line_figure
from libra.report.page import Bar, CardTable, Chapter
from libra.report.roles_view import NAMES, Bottleneck, RolesView
from libra.report.simulation_figures import COLOURS, Rows, TimeAxis, fine_unit, time_axis
from libra.report.simulation_view import SimulationView
from libra.report.vega import Axis
from libra.report.words import MISSING, count, fine_duration, percent, plural, size
from libra.sim.clock import TICKS
from libra.sim.outcome.over_time import mean_present
from libra.sim.outcome.result import SimulationResult
from libra.sim.outcome.transfer_metrics import finished_transfers, kept_blocks, ttft_parts
from libra.sim.outcome.transfers import Transfers, link_use

# Waiting is pale, and work has a full colour.
_COLOURS = {
    "queueing": "#bcdaf0",
    "waiting for prefill": "#bcdaf0",
    "prefill": "#0072b2",
    "waiting to pull": "#f6dda0",
    "waiting for decode": "#f6dda0",
    "KV transfer": "#e69f00",
    "first decode": "#009e73",
    "decode": "#009e73",
}
_PULLED = ("waiting for prefill", "prefill", "waiting to pull", "KV transfer", "decode")
_PUSHED = ("waiting for decode", "waiting for prefill", "prefill", "KV transfer", "decode")
_ARRIVALS = 60  # intervals of arrival, each with a column


def roles_chapter(view: SimulationView) -> Chapter | None:
    """The chapter; None if engines have no roles."""
    roles, transfers = view.roles, view.result.transfers
    if roles is None or transfers is None:
        return None
    push = transfers.network.push
    tables = (_bounds_table(roles, push), *([_parts_table(roles, push)] if roles.metrics.ttft else ()))
    return Chapter("Separate prefill and decode", _figures(view, transfers), tables)


def _figures(view: SimulationView, transfers: Transfers) -> tuple[Figure, ...]:
    time = time_axis(view)
    if time is None or not len(transfers):
        return (Figure("Over time", "No prompt was transferred."),)
    sends, receives = link_use(transfers, time.edges)
    names = [engine.name for engine in view.result.engines]
    kept = kept_blocks(transfers, view.result.end)
    prefill = [index for index, engine in enumerate(view.result.engines) if engine.role == "prefill"]
    blocks = np.array([[view.result.engines[index].config.kv_blocks] for index in prefill])
    return (
        _stages_figure(view.result, transfers, time),
        _links_figure(
            "Use of links",
            Axis("share of the bandwidth (%)", (0.0, 100.0)),
            view,
            time,
            100 * sends.used,
            100 * receives.used,
        ),
        _links_figure("Transfers that share a link", Axis("transfers"), view, time, sends.sharing, receives.sharing),
        _ttft_figure(view.result, transfers, time),
        time.lines(
            f"KV kept for {'pushes' if transfers.network.push else 'pulls'}",
            "KV blocks of a prefill engine (%)",
            [names[index] for index in prefill],
            100 * np.array([kept.over(time.edges, index) for index in prefill]) / blocks,
            "prefill engines",
            " Blocks are kept from the end of a prompt until its KV is transferred or not needed; blocks that prompts"
            " share count twice.",
        ),
    )


def _stages_figure(result: SimulationResult, transfers: Transfers, time: TimeAxis) -> Figure:
    """Stages of all requests; requests of colocated engines have no transfer."""
    requests, rows = result.requests, transfers.row
    end = np.where(requests.finish < 0, result.end, requests.finish)
    pushed = transfers.network.push
    transferred = requests.prefill_end.copy()
    transferred[rows] = np.where(transfers.came < 0, transfers.sent, transfers.came)
    waited = (requests.arrival if pushed else requests.prefill_end).copy()
    waited[rows] = transfers.reserved if pushed else transfers.begun
    moments = [requests.arrival, requests.scheduled, requests.prefill_end, transferred]
    moments.insert(1 if pushed else 3, waited)
    reached = [np.where(its < 0, end, np.minimum(its, end)) for its in moments]
    edges = [*np.maximum.accumulate(np.array(reached), axis=0), np.maximum(end, requests.arrival)]
    came = requests.arrival < result.end
    parts = [
        Series(name, _COLOURS[name], time.points(mean_present(since[came], until[came], time.edges)))
        for name, since, until in zip(_PUSHED if pushed else _PULLED, edges[:-1], edges[1:], strict=True)
    ]
    note = "Requests in each stage, stacked. Decode includes the wait for its first iteration."
    return column_figure("Where requests are", note, parts, time.axis, Axis("requests"), time.markers, wide=True)


def _links_figure(
    title: str, y_axis: Axis, view: SimulationView, time: TimeAxis, sends: Rows, receives: Rows
) -> Figure:
    """A line for each engine's network in the direction of its role; for many engines the largest and the mean."""
    engines = view.result.engines
    lines: dict[str, NDArray[np.float64]] = {}
    for role, way, values in (("prefill", "out of", sends), ("decode", "into", receives)):
        its = [index for index, engine in enumerate(engines) if engine.role == role]
        if len(engines) <= len(COLOURS):
            lines |= {f"{way} {engines[index].name}": values[index] for index in its}
        elif its:
            lines |= {
                f"{way} {role}, busiest": values[its].max(axis=0),
                f"{way} {role}, mean": values[its].mean(axis=0),
            }
    note = "Each engine's network in one direction"
    note += "." if len(engines) <= len(COLOURS) else f": the busiest and the mean of {count(len(engines))} engines."
    series = [
        Series(name, colour, time.points(line)) for (name, line), colour in zip(lines.items(), COLOURS, strict=False)
    ]
    return line_figure(title, note, series, time.axis, y_axis, time.markers)


def _ttft_figure(result: SimulationResult, transfers: Transfers, time: TimeAxis) -> Figure:
    """Means of the requests that arrive in the same interval."""
    handed = finished_transfers(result.requests, transfers)
    title = "TTFT of requests by their arrival"
    if not len(handed):
        return Figure(title, "No transferred request finished.")
    edges = np.linspace(result.start, result.start + result.makespan, _ARRIVALS + 1)
    of = np.clip(np.searchsorted(edges, result.requests.arrival[transfers.row[handed]], "right") - 1, 0, _ARRIVALS - 1)
    counts = np.maximum(np.bincount(of, minlength=_ARRIVALS), 1)
    middles = (edges[:-1] + edges[1:]) / 2 - result.start
    places = (middles * (time.since[-1] / result.makespan)).tolist()
    parts = {
        name: np.bincount(of, ticks.astype(np.float64), _ARRIVALS) / (counts * TICKS)
        for name, ticks in ttft_parts(result.requests, transfers, handed).items()
    }
    scale, unit = fine_unit(max(float(np.sum(list(parts.values()), axis=0).max()), 1e-9))
    series = [
        Series(name, _COLOURS[name], list(zip(places, (values / scale).tolist(), strict=True)))
        for name, values in parts.items()
    ]
    note = "Means over the finished requests that were transferred, by interval of their arrival."
    return column_figure(title, note, series, time.axis, Axis(f"TTFT ({unit})"), time.markers)


def _bounds_table(roles: RolesView, push: bool) -> CardTable:
    """The possible bottlenecks of the run; the actual bottleneck is marked."""
    found = roles.metrics
    engines = {role: f"{count(number)} of them" for role, number in roles.engines.items()}
    pulls = f"{plural(found.begun, 'push', 'pushes') if push else plural(found.begun, 'pull')}, {size(found.bytes)}"
    if found.broken:
        pulls += f"; {count(found.broken)} aborted"
    if roles.waited_seats is not None:
        engines["decode"] += f"; {percent(roles.waited_seats, 0)} of the wait while batches were full"
    lines: tuple[tuple[Bottleneck | None, Bar, str], ...] = (
        ("prefill", Bar(f"{percent(roles.busy['prefill'])} busy", roles.busy["prefill"]), engines["prefill"]),
        (
            None,
            Bar(f"{percent(found.kept_share)} of the blocks", found.kept_share),
            f"computed, not {'pushed' if push else 'pulled'} yet",
        ),
        ("link", Bar(f"{percent(roles.links)} of the bandwidth", roles.links), pulls),
        ("decode", Bar(f"{percent(roles.busy['decode'])} busy", roles.busy["decode"]), engines["decode"]),
    )
    bound: Bottleneck = "decode" if roles.bottleneck == "decode blocks" else roles.bottleneck
    rows = [
        (
            f"Blocks of prefill engines, kept for {'pushes' if push else 'pulls'}"
            if name is None
            else _named(roles, name, bound),
            used,
            fine_duration(roles.waits[name]) if name is not None and name in roles.waits else MISSING,
            detail,
        )
        for name, used, detail in lines
    ]
    return CardTable("Bottleneck", roles.why, ("Part", "Mean use", "Mean wait", "Details"), rows)


def _named(roles: RolesView, name: Bottleneck, bound: Bottleneck) -> str:
    if name != bound:
        return NAMES[name].capitalize()
    return f"{NAMES[roles.bottleneck].capitalize()}: the bottleneck"


def _parts_table(roles: RolesView, push: bool) -> CardTable:
    parts = roles.metrics.ttft
    whole = sum(part.mean for part in parts.values()) or 1.0
    alone = roles.metrics.transfer_alone
    note = (
        f"Of the {count(next(iter(parts.values())).count)} finished requests that were transferred."
        f" A {'push' if push else 'pull'} needs room in the batch and free blocks on the decode engine."
    )
    if push:
        note += (
            " Both are reserved before the prompt is computed; the first decode is the wait until its engine sees the"
            " KV."
        )
    else:
        note += " The first decode is the iteration that gives the first token, and the wait for it."
    if alone is not None:
        note += f" Alone on its links, a transfer takes {fine_duration(alone.mean)} on average."
    rows: list[tuple[str | Bar, ...]] = [
        (
            name,
            Bar(fine_duration(part.mean), part.mean / whole),
            percent(part.mean / whole),
            *(fine_duration(value) for value in (part.p50, part.p90, part.p99)),
        )
        for name, part in parts.items()
    ]
    return CardTable("TTFT in its parts", note, ("Part", "Mean", "Share", "P50", "P90", "P99"), rows, "numbers")
