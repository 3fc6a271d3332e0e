"""`libra export`: writes a plan for another framework."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from libra.cli.errors import bad_input
from libra.cli.output import STDOUT, check_writable, write_text
from libra.config.input_file import read_input

_ENGINES = (".yaml", ".yml")


def export(
    plan: Annotated[
        Path,
        typer.Argument(metavar="PLAN", help="plan.json of `libra plan`; with --for vllm also a YAML file of engines."),
    ],
    framework: Annotated[
        str,
        typer.Option(
            "--for",
            metavar="NAME",
            help="slime, miles, vime, verl, prime-rl, skyrl, trl, nemo-rl, areal or vllm.",
        ),
    ],
    launch: Annotated[
        str | None,
        typer.Option(
            "--launch",
            metavar="HOW",
            help="With --for vllm: write files for slurm or k8s that start the engines and libra route.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write to this file; - for standard output.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print framework, format, GPUs and text as JSON on standard output.")
    ] = False,
) -> None:
    """Write a plan as the arguments, overrides or configuration file of a training framework.

    Make the plan with `libra plan --for NAME`, so that the framework can carry it out. Hosts are placeholders. You add
    model, data, reward and optimiser. With --for vllm, the output is a `vllm serve` command per engine; with --launch,
    a Slurm batch script or Kubernetes objects for all engines.

    Exit status: 0 done, 2 bad input, or a plan that the framework cannot express (the message names the part).
    """
    from libra.config.frameworks import framework_named
    from libra.config.yaml_file import ConfigError
    from libra.export.serve_line import script
    from libra.export.table import export as exported
    from libra.export.table import launch_file, launch_format, launched
    from libra.export.vllm import file_lines
    from libra.plan.plan import parse_plan

    if output == STDOUT:
        output = None
    try:
        framework_named(framework)
        check_writable(output, reads=(plan,))
        if launch is not None and framework != "vllm":
            raise ValueError(f"--launch is for --for vllm only, since {framework} starts its own engines")
        answer: dict[str, object] = {"framework": framework}
        if plan.suffix in _ENGINES:
            if framework != "vllm":
                raise ConfigError(f"{plan}: a file of engines needs --for vllm; give a plan.json of libra plan")
            comment, lines, router = file_lines(plan)
            if launch is None:
                answer |= {"format": "sh", "text": comment + script(lines)}
            else:
                answer |= {"format": launch_format(launch), "text": launched(lines, router, launch)}
        else:
            found = parse_plan(read_input(plan), where=str(plan))
            made = exported(found, framework) if launch is None else launch_file(found, launch)
            split = made.split
            gpus = {"train": split.train_gpus, "rollout": split.rollout_gpus, "idle": split.idle_gpus}
            answer |= {"format": made.format, "gpus": gpus, "text": made.text}
        text = json.dumps(answer) + "\n" if as_json else str(answer["text"])
        if output is not None:
            write_text(output, str(answer["text"]))
    except (ConfigError, ValueError, OSError) as error:
        bad_input(error)
    if output is None or as_json:
        typer.echo(text, nl=False)
