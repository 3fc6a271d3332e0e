"""`libra explain`: explains a plan."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from libra.cli.errors import bad_input, infeasible, require
from libra.cli.output import check_writable, write_text
from libra.config.input_file import read_input
from libra.config.rooms import offered

if TYPE_CHECKING:
    from libra.plan.plan import Plan


def explain(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="plan.json of `libra plan`.")],
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            "--what-if",
            help="Explain the plan after a change: gpus=64, gpu=H200, NODES=12 (nodes of a class), or a key of the "
            "request, such as batch=1024. May be repeated.",
        ),
    ] = None,
    own_split: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="SPLIT",
            help="Compare the plan with your own split of the GPUs, such as train=64,generate=192.",
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write the explanation as an HTML page to this file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the explanation as JSON.")] = False,
) -> None:
    """Explain a plan: its bottleneck, the next best plans, binding constraints, and the gain of one more node.

    The solver runs again on the request that the plan embeds. No other file is read.

    Exit status: 0 done, 2 bad input, 3 no plan exists under --what-if or --against.
    """
    from libra.config.yaml_file import ConfigError
    from libra.plan.explain.against import against, parse_split
    from libra.plan.explain.explained import explain_plan
    from libra.plan.explain.what_if import held_fixed
    from libra.plan.plan import parse_plan
    from libra.plan.problem import InfeasiblePlanError
    from libra.report.explain_table import (
        against_sentences,
        alternation,
        explain_tables,
        headline,
        routing_sentence,
    )
    from libra.report.framework_words import framework_sentence
    from libra.report.plan_headline import disagreement, finalist_rows, little_evidence
    from libra.report.plan_headline import headline as plan_headline

    change = fixed = ""
    if html is not None:
        require("report")
    try:
        check_writable(html, reads=(plan,))
        found = parse_plan(read_input(plan), where=str(plan))
        if what_if:
            planned, found = found, _assumed(found, what_if)
            before, fixed = planned.predicted.step, held_fixed(planned.of_cluster.recipe, found.of_cluster.recipe)
            change = f"{' '.join(what_if)}: {before:,.2f} s -> {found.predicted.step:,.2f} s a step, both predicted"
        beside = None if own_split is None else against(found, parse_split(own_split))
        explanation = explain_plan(found)
        answer = (*plan_headline(found), *framework_sentence(explanation.framework))
        if html is not None:
            from libra.report.explain_page import explain_page

            page = explain_page(
                explanation,
                found.request.title,
                [(cls.peak_context, cls.share) for cls in found.request.classes],
                answer,
                (*disagreement(found), *little_evidence(found)),
                finalist_rows(found),
            )
            write_text(html, page)
    except InfeasiblePlanError as error:
        infeasible(error)
    except (ConfigError, ValueError, OSError) as error:
        bad_input(error)
    if as_json:
        typer.echo(json.dumps(asdict(explanation) | ({} if beside is None else {"against": asdict(beside)})))
        return
    console = Console()
    alternate = alternation(explanation.plan.predicted)
    for line in (*answer, *disagreement(found), *little_evidence(found)):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    lines = (change, fixed, headline(explanation), f"{alternate}." if alternate else "", routing_sentence(explanation))
    own = () if beside is None else against_sentences(beside)
    loans = (it for said in offered("explanation") for it in said(explanation))
    for line in (*own, *lines, *loans):
        if line:
            console.print(line, highlight=False, soft_wrap=True)
    for table in explain_tables(explanation):
        console.print(table)


def _assumed(plan: Plan, what_if: list[str]) -> Plan:
    from libra.config.yaml_file import ConfigError
    from libra.plan.explain.what_if import assume, assume_otherwise

    try:
        request = plan.of_cluster
    except ValueError:
        raise ConfigError(
            "--what-if changes a cluster, but this plan is for a run on one machine: change the run's configuration"
        ) from None
    return assume_otherwise(plan, *assume(request.cluster, request.recipe, what_if))
