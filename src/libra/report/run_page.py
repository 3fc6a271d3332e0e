"""A run as one HTML page, which depends only on the run directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from libra.config.rooms import offered
from libra.records.run_log import RunLog, outcomes, read_run
from libra.records.schema import StepRecord
from libra.report.page import flatten, render
from libra.report.run_figures import named_decisions, run_figures
from libra.report.run_promises import promise_rows
from libra.report.run_verdict import edges, headline, notices, tiles, why_nothing_was_decided
from libra.report.words import count, duration, percent, plain

_HEALTH: tuple[tuple[str, Callable[[StepRecord], float], Callable[[float], str], str], ...] = (
    ("Reward", lambda s: s.reward_mean, plain, "of a trajectory"),
    ("Turns", lambda s: s.turns_mean, plain, "of a trajectory"),
    (
        "Groups without signal",
        lambda s: s.groups_without_signal / max(1, s.groups),
        percent,
        "all samples of a prompt earned the same",
    ),
    ("Staleness", lambda s: s.staleness_mean, plain, "versions between generation and training"),
    ("Largest staleness", lambda s: s.staleness_max, plain, "versions"),
    ("Behaviour weight", lambda s: s.behaviour_weight_mean, plain, "min(π_prox/μ, 2); 1 where data are fresh"),
    ("Moved since generation", lambda s: s.prox_gap_mean, plain, "mean |log π_prox − log μ| of a token"),
    ("Clipped", lambda s: s.clip_share, percent, "tokens whose probability ratio left the trust region"),
    ("Gradient norm", lambda s: s.grad_norm, plain, "before clipping"),
    ("Trained tokens", lambda s: s.trained_tokens, count, "in one step"),
    ("Weight load", lambda s: s.load_seconds, duration, "of one engine"),
)


def render_report(run_directory: Path) -> str:
    """The page for a run directory, finished or not. Raises the errors of `read_run`."""
    log = read_run(run_directory)
    nothing = {"learning": (), "speed": (), "devices": (), "roles": ()}
    return render(
        "run.html",
        log.name,
        log=log,
        headline=headline(log),
        notices=notices(log),
        tiles=tiles(log),
        **(run_figures(log) if log.steps else nothing),
        taken=[(name, outcome) for (name, _), outcome in zip(named_decisions(log), outcomes(log), strict=True)],
        why_not="" if log.taken else why_nothing_was_decided(log),
        promises=promise_rows(log.periods) if any(period.learned for period in log.periods) else [],
        health=_health(log) if log.steps else (),
        averaged=max(1, len(log.steps) // 10),
        evaluations=_evaluations(log),
        chapters=[made(log, run_directory) for made in offered("run page")],
        losses=[(duration(event.time), event.worker or "–", event.text) for event in log.losses],
        events=[
            (duration(event.time), event.kind.replace("_", " "), event.worker or "–", event.text)
            for event in log.events
        ],
        run_with=_run_with(log),
        settings=list(flatten(log.config)),
    )


def _evaluations(log: RunLog) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for it in log.summary.evaluations if log.summary else ():
        accuracies = percent(it.sampled_accuracy), percent(it.greedy_accuracy)
        rows.append((it.name, count(it.step), count(it.questions), *accuracies, plain(it.turns_mean)))
    return rows


def _run_with(log: RunLog) -> list[tuple[str, str]]:
    if log.summary is None:
        return []
    summary = log.summary
    known = {"arithmetic": summary.arithmetic, "seed": str(summary.seed), "allocation mode": summary.allocation_mode}
    return [(name, value) for name, value in {**known, **summary.versions}.items() if value is not None]


def _health(log: RunLog) -> list[tuple[str, str, str, str]]:
    """Training quantities at the start and the end of the run; a large change deserves a check."""
    rows = []
    for name, value, write, hint in _HEALTH:
        first, last = edges([value(step) for step in log.steps])
        rows.append((name, write(first), write(last), hint))
    return rows
