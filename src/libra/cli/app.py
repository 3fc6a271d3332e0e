"""The `libra` command and its verbs.

Modules of this package only parse arguments, call the library and print. Exit status: 0 done, 1 the run failed, 2 bad
input, 3 no plan exists, 130 interrupted.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from importlib.util import find_spec
from inspect import cleandoc
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from libra.cli import (
    calibrate,
    compare,
    emulation,
    examples,
    explain,
    export,
    plan,
    rehearsal,
    report,
    routing,
    run,
    simulation,
    trace,
)
from libra.cli.allocator import use_system_allocator
from libra.cli.entry import end_interrupted
from libra.config.rooms import offered
from libra.report.words import printable

# Base class of all errors of arguments, which Typer does not export by a name.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


class _Commands(TyperGroup):
    """A group whose commands end with one line after an interruption or wrong arguments. Typer prints none, or five."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)
        for command in self.commands.values():
            _tidy(command)

    def main(self, *args: Any, **keywords: Any) -> Any:
        alone = keywords.get("standalone_mode", True)
        try:
            status = super().main(*args, **{**keywords, "prog_name": "libra", "standalone_mode": False})
        except _UsageError as error:
            if not alone:
                raise
            status = _tell_usage(error)
        if alone:
            sys.exit(status)
        return status

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            end_interrupted()


def _tidy(command: Any) -> None:
    """Remove what misleads in Typer's help of a command: a type of options without a value, and a docstring's line
    breaks, which Typer keeps after the first paragraph."""
    for option in command.params:
        if getattr(option, "is_bool_flag", False):
            option.metavar = ""
    paragraphs = cleandoc(command.help or "").split("\n\n")
    command.help = "\n\n".join(" ".join(text.split()) for text in paragraphs)
    for each in getattr(command, "commands", {}).values():
        _tidy(each)


def _tell_usage(error: Any) -> int:
    """Print the error of wrong arguments in one line; returns the exit status."""
    if type(error).__name__ != "NoArgsIsHelpError":  # the command has shown its help
        text = " ".join(error.format_message().split()).rstrip(".")
        where = "libra" if error.ctx is None else error.ctx.command_path
        typer.echo(f"libra: {printable(text[0].lower() + text[1:])}; see {where} --help", err=True)
    return int(error.exit_code)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
for command in (
    run.run,
    report.report,
    plan.plan,
    explain.explain,
    export.export,
    calibrate.calibrate,
    simulation.simulate,
    rehearsal.rehearse,
    compare.compare,
    *offered("search command"),
    routing.route,
    emulation.emulate,
    examples.examples,
):
    app.command()(command)
for name, group in offered("command group"):
    app.add_typer(group, name=name)
app.add_typer(trace.app, name="trace")


def _tell_version(wanted: bool) -> None:
    if wanted:
        core = find_spec("libra.sim.engine.engine")
        compiled = core is not None and not str(core.origin).endswith(".py")
        typer.echo(f"libra {version('libra-rl')} (simulator {'compiled' if compiled else 'interpreted'})")
        raise typer.Exit


@app.callback()
def libra(
    _: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Libra decides which GPUs train, which generate, and which engine gets each request.

    `libra examples` writes example files. The help of each command describes its inputs.
    """


def main() -> None:
    use_system_allocator(next((word for word in sys.argv[1:] if not word.startswith("-")), None))
    try:
        app()
    except OSError as error:  # such as a full disk behind standard output
        sys.stderr.write(f"libra: {error}\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
