"""`libra emulate`. Engines that cannot be emulated are refused before a port is opened."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from libra.cli.errors import bad_input, require
from libra.cli.options import TokenFile
from libra.cli.output import tell_notes
from libra.report.words import printable

if TYPE_CHECKING:
    from libra.sim.engine.config import EngineSpec

_MOST_SPEED = 1000.0
_SHOWN = 16  # addresses printed


def emulate(
    engines: Annotated[
        Path, typer.Argument(metavar="ENGINES", help="YAML file with the engines, as for `libra simulate`.")
    ],
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free port.")] = 8000,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Any address except 127.0.0.1 needs --token-file.")
    ] = ("127.0.0.1"),
    token_file: TokenFile = None,
    speed: Annotated[float, typer.Option(help="Simulated seconds per real second.")] = 1.0,
    default_tokens: Annotated[
        int, typer.Option(help="Tokens to generate for a request without max_tokens; its finish reason is `stop`.")
    ] = 256,
    seed: Annotated[int, typer.Option(help="Seed of the generated tokens.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print addresses as one line of JSON.")] = False,
) -> None:
    """Emulate OpenAI-compatible vLLM servers with the simulator's timing, without GPUs and without a model.

    For tests of clients, routers and load. Each engine of the file has a base URL, /engines/NAME/v1; a single engine
    also has /v1. As in vLLM, requests queue, are batched and preempted, and hit the prefix cache. The answer to a
    request is max_tokens random tokens. Also: /engines, /metrics (Prometheus, vLLM's names), /health.

    Runs until it is interrupted. Exit status: 0 ended by Ctrl-C or SIGTERM, 2 bad input.
    """
    from libra.sim.engine.config import COLOCATED  # imported here, so that `--help` need not load the simulator
    from libra.sim.engines_file import load_engines

    notes: list[str] = []
    try:
        _check(port, speed, default_tokens, seed)
        specs = load_engines(engines, notes.append).engines
        if any(spec.group is not None for spec in specs):
            raise ValueError(
                f"{engines}: data_parallel_size is not emulated, since its ranks wait for each other: leave it out"
            )
        apart = next((spec for spec in specs if spec.role != COLOCATED), None)
        if apart is not None:
            raise ValueError(
                f"{engines}: the role of {apart.name} is {apart.role.name}, but KV transfers between engines are "
                f"not emulated: leave the role out"
            )
        tell_notes(notes, err=True)
        require("http")
        from libra.serve.guard import read_token

        token = None if token_file is None else read_token(token_file)
        asyncio.run(_serve(specs, host, port, token, speed, default_tokens, seed, as_json))
    except (ValueError, OSError) as error:
        bad_input(error)


def _check(port: int, speed: float, default_tokens: int, seed: int) -> None:
    if not 0 <= port <= 65535:
        raise ValueError(f"--port is {port}; give 0 to 65535")
    if not 0 < speed <= _MOST_SPEED:
        raise ValueError(f"--speed is {speed:g}; give more than 0, and {_MOST_SPEED:g} at most")
    if default_tokens < 1:
        raise ValueError(f"--default-tokens is {default_tokens}; give 1 or more")
    if seed < 0:
        raise ValueError(f"--seed is {seed}; give 0 or more")


async def _serve(
    specs: tuple[EngineSpec, ...],
    host: str,
    port: int,
    token: str | None,
    speed: float,
    default_tokens: int,
    seed: int,
    as_json: bool,
) -> None:
    from libra.config.listeners import EMULATOR
    from libra.serve.emulate.server import Emulator
    from libra.serve.http import serve

    def announce(base: str) -> None:
        addresses = {spec.name: f"{base}/engines/{spec.name}/v1" for spec in specs}
        if as_json:
            typer.echo(json.dumps({"base": base, "engines": addresses}))
            return
        typer.echo(f"{len(specs)} emulated engine{'s' if len(specs) > 1 else ''} at {base} (Ctrl-C ends):")
        for name, address in list(addresses.items())[:_SHOWN]:
            typer.echo(printable(f"  {name}: {address}"))
        if len(addresses) > _SHOWN:
            typer.echo(f"  and {len(addresses) - _SHOWN} more: GET {base}/engines")

    await serve(Emulator(specs, speed, default_tokens, seed).application(), host, port, announce, EMULATOR, token)
