"""The page of a router: engines, sessions, throughput, buckets, decisions and lengths, at one moment."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from statistics import quantiles

from libra.report.charts import Figure, Series, line_figure, time_unit
from libra.report.page import Bar, Tile, render
from libra.report.router_view import EndedLength, EngineView, RouterView, SessionView
from libra.report.vega import Axis, ends
from libra.report.words import count, duration, fine_duration, percent, plain, plural

_AT_A_TIME = 64  # trajectories behind each point of the lengths
_TURNS = 6  # of a session, the latest
_SHOWN = 12  # sessions, and decisions, that are visible before a reader opens the rest

Row = tuple[str | Bar, ...]


def router_page(view: RouterView) -> str:
    """The page as HTML."""
    return render(
        "router.html",
        "Router",
        headline=_headline(view),
        notices=[f"Engine {it.id} is out of service: {it.problem or 'it failed a turn'}." for it in _out(view)],
        tiles=_tiles(view),
        traffic=(_throughput(view), _in_flight(view)),
        lengths=_lengths(view),
        engines=_engines(view.engines),
        buckets=_buckets(view),
        sessions=[(it, it.turns[-_TURNS:], max(0, len(it.turns) - _TURNS)) for it in view.sessions],
        shown=_SHOWN,
        longest=_longest_turn(view.sessions),
        others=len(view.contexts) - len(view.sessions),
        decisions=[
            (it.time, it.session, count(it.context_tokens), it.engine + (" (moves)" if it.migrated else ""), it.reason)
            for it in view.decisions
        ],
    )


def _out(view: RouterView) -> list[EngineView]:
    return [it for it in view.engines if not it.in_service]


def _headline(view: RouterView) -> str:
    serving = len(view.engines) - len(_out(view))
    return (
        f"{view.policy} routes to {serving} of {plural(len(view.engines), 'engine')}, for {duration(view.seconds)}:"
        f" {plural(view.turns, 'turn')} answered."
    )


def _tiles(view: RouterView) -> tuple[Tile, ...]:
    out, last = len(_out(view)), view.samples[-1] if view.samples else None
    at_engines = sum(it.in_flight for it in view.engines)
    finished = sum(it.finished for it in view.ended)
    return (
        Tile("Engines", f"{len(view.engines) - out} of {len(view.engines)}", "in service", alarming=out > 0),
        Tile("Sessions", count(len(view.contexts)), f"in progress, {count(finished)} finished lately"),
        Tile("Turns in flight", count(at_engines), f"{count(view.waiting)} wait for an engine"),
        Tile(
            "Generated",
            "-" if last is None else f"{plain(last.generated_rate)} tokens/s",
            f"{count(view.generated_tokens)} since the start",
        ),
        Tile(
            "Prompts",
            "-" if last is None else f"{plain(last.prompt_rate)} tokens/s",
            f"{count(view.prompt_tokens)} since the start",
        ),
        Tile("Turns", count(view.turns), "answered since the start"),
        Tile("Moves", count(view.migrations), "turns sent to another engine than the one before"),
        Tile("Retries", count(view.retries), "turns sent again after their engine failed, or was full"),
    )


def _throughput(view: RouterView) -> Figure:
    title, note = "Throughput", "Tokens count when their turn has ended; means over ten seconds."
    if len(view.samples) < 2:
        return Figure(title, "There is no throughput yet.")
    scale, x = _time_axis([it.seconds for it in view.samples])
    series = [
        Series("generated", "var(--blue)", [(it.seconds / scale, it.generated_rate) for it in view.samples]),
        Series("prompts", "var(--green)", [(it.seconds / scale, it.prompt_rate) for it in view.samples]),
    ]
    return line_figure(title, note, series, x, Axis("tokens per second"))


def _in_flight(view: RouterView) -> Figure:
    title = "Turns in flight"
    if len(view.samples) < 2:
        return Figure(title, "There is no traffic yet.")
    scale, x = _time_axis([it.seconds for it in view.samples])
    series = [
        Series("at engines", "var(--blue)", [(it.seconds / scale, it.in_flight) for it in view.samples]),
        Series("waiting for an engine", "var(--alarm)", [(it.seconds / scale, it.waiting) for it in view.samples]),
    ]
    return line_figure(title, "Waiting: no engine in service has room.", series, x, Axis("turns"))


def _lengths(view: RouterView) -> Figure:
    title, ended = "Lengths", view.ended
    if len(ended) < 2:
        return Figure(title, "No two trajectories have ended yet.", wide=True)
    scale, x = _time_axis([it.seconds for it in ended])
    points = [(at / scale, low, high) for at, low, high in _drift(ended)]
    series = [
        Series("nine of ten are shorter", "var(--deep)", [(at, high) for at, _, high in points]),
        Series("half are shorter", "var(--blue)", [(at, low) for at, low, _ in points]),
    ]
    bounds = sum(not it.finished for it in ended)
    lower = f" {plural(bounds, 'length')} of sessions without an end are lower bounds." if bounds else ""
    note = f"Final contexts of the {_AT_A_TIME} trajectories that ended last, at each moment.{lower}"
    return line_figure(title, note, series, x, Axis("tokens"), wide=True)


def _drift(ended: Sequence[EndedLength]) -> list[tuple[float, float, float]]:
    """For each end of a trajectory: its time, and the median and the ninth decile of the lengths up to then."""
    points = []
    for last in range(1, len(ended)):
        lengths = [it.peak_context for it in ended[max(0, last + 1 - _AT_A_TIME) : last + 1]]
        deciles = quantiles(lengths, n=10, method="inclusive")
        points.append((ended[last].seconds, deciles[4], deciles[8]))
    return points


def _time_axis(seconds: Sequence[float]) -> tuple[float, Axis]:
    scale, unit = time_unit(seconds[-1])
    return scale, Axis(f"{unit} since the start", ends(seconds[0] / scale, seconds[-1] / scale))


def _engines(engines: Sequence[EngineView]) -> list[Row]:
    most = max((it.in_flight for it in engines), default=0)
    return [
        (
            it.id,
            "in service" if it.in_service else "out of service",
            f"{it.bucket}",
            Bar(count(it.in_flight), it.in_flight / most if most else 0.0),
            count(it.load_tokens),
            "-" if it.running is None else count(it.running),
            "-" if it.waiting is None else count(it.waiting),
            "-" if it.kv_share is None else Bar(percent(it.kv_share, 0), min(1.0, it.kv_share)),
            count(it.turns),
            count(it.generated_tokens),
            "-" if it.token_seconds is None else fine_duration(it.token_seconds),
        )
        for it in engines
    ]


def _buckets(view: RouterView) -> list[Row]:
    live = Counter(_bucket(it, view.limits) for it in view.contexts)
    ended = Counter(_bucket(it.peak_context, view.limits) for it in view.ended)
    every = max(1, len(view.ended))
    rows: list[Row] = []
    for bucket, limit in enumerate(view.limits):
        engines = [it for it in view.engines if it.bucket == bucket]
        rows.append(
            (
                f"up to {count(limit)}",
                f"{sum(it.in_service for it in engines)} of {len(engines)}",
                count(sum(it.in_flight for it in engines)),
                count(live[bucket]),
                Bar(percent(ended[bucket] / every, 0), ended[bucket] / every) if view.ended else "-",
            )
        )
    return rows


def _bucket(tokens: int, limits: Sequence[int]) -> int:
    return min(bisect_left(limits, tokens), len(limits) - 1)


def _longest_turn(sessions: Sequence[SessionView]) -> int:
    return max((turn.generated_tokens for it in sessions for turn in it.turns[-_TURNS:]), default=1) or 1
