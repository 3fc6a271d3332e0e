"""A run as one HTML page: a function of the run directory alone, so that the same files give the same page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from libra.records.run_log import RunLog, outcomes, read_run
from libra.report.page import flatten, render
from libra.report.run_figures import device_figures, learning_figures, named_decisions, role_figures, speed_figures
from libra.report.run_verdict import edges, headline, notices, tiles, why_nothing_was_decided
from libra.report.words import count, duration, percent, plain


def render_report(run_directory: Path) -> str:
    """The page for a run directory, finished or not. Raises what `read_run` raises."""
    log = read_run(run_directory)
    return render(
        "run.html",
        log.name,
        log=log,
        headline=headline(log),
        notices=notices(log),
        tiles=tiles(log),
        learning=learning_figures(log) if log.steps else (),
        speed=speed_figures(log) if log.steps else (),
        devices=device_figures(log) if log.steps else (),
        roles=role_figures(log) if log.steps else (),
        taken=[(name, outcome) for (name, _), outcome in zip(named_decisions(log), outcomes(log), strict=True)],
        why_not="" if log.taken else why_nothing_was_decided(log),
        health=_health(log) if log.steps else (),
        averaged=max(1, len(log.steps) // 10),
        evaluations=_evaluations(log),
        losses=[(duration(event.time), event.worker or "–", event.text) for event in log.losses],
        events=[
            (duration(event.time), event.kind.replace("_", " "), event.worker or "–", event.text)
            for event in log.events
            if event.kind != "weights"  # there is one a step and engine
        ],
        run_with=_run_with(log),
        settings=list(flatten(log.config)),
    )


def _evaluations(log: RunLog) -> list[tuple[str, ...]]:
    return [
        (
            evaluation.name,
            count(evaluation.step),
            count(evaluation.questions),
            percent(evaluation.sampled_accuracy),
            percent(evaluation.greedy_accuracy),
            plain(evaluation.turns_mean),
        )
        for evaluation in (log.summary.evaluations if log.summary else ())
    ]


def _run_with(log: RunLog) -> list[tuple[str, str]]:
    if log.summary is None:
        return []
    summary = log.summary
    known = {"seed": str(summary.seed), "allocation mode": summary.allocation_mode, **summary.versions}
    if summary.arithmetic is not None:
        known = {"arithmetic": summary.arithmetic, **known}
    return list(known.items())


def _health(log: RunLog) -> list[tuple[str, str, str, str]]:
    """Training quantities at both ends of the run; what moved is what to look at."""
    steps = log.steps
    numbers: list[tuple[str, list[float], Callable[[float], str], str]] = [
        ("Reward", [s.reward_mean for s in steps], plain, "of a trajectory"),
        ("Turns", [s.turns_mean for s in steps], plain, "of a trajectory"),
        (
            "Groups without signal",
            [s.groups_without_signal / max(1, s.groups) for s in steps],
            percent,
            "all samples of a prompt earned the same",
        ),
        ("Staleness", [s.staleness_mean for s in steps], plain, "versions between generation and training"),
        ("Largest staleness", [float(s.staleness_max) for s in steps], plain, "versions"),
        (
            "Behaviour weight",
            [s.behaviour_weight_mean for s in steps],
            plain,
            "min(π_prox/μ, 2); 1 where data are fresh",
        ),
        ("Moved since generation", [s.prox_gap_mean for s in steps], plain, "mean |log π_prox − log μ| of a token"),
        ("Clipped", [s.clip_share for s in steps], percent, "tokens whose probability ratio left the trust region"),
        ("Gradient norm", [s.grad_norm for s in steps], plain, "before clipping"),
        ("Trained tokens", [float(s.trained_tokens) for s in steps], count, "in one step"),
        ("Weight load", [s.load_seconds for s in steps], duration, "of one engine"),
    ]
    rows = []
    for name, values, write, hint in numbers:
        first, last = edges(values)
        rows.append((name, write(first), write(last), hint))
    return rows
