"""`libra route`. Bad input is refused before a port is taken."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from libra.cli.errors import bad_input, require
from libra.cli.output import check_writable, tell_note

if TYPE_CHECKING:
    from libra.route.policy import Policy
    from libra.serve.gateway.config import GatewayConfig
    from libra.trajectory import Trajectory


def route(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML file with the engines and their addresses.")],
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free one.")] = 9000,
    host: Annotated[str, typer.Option(help="Address to listen on. Others than 127.0.0.1 need --token-file.")] = (
        "127.0.0.1"
    ),
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="File with the bearer token that clients must show.")
    ] = None,
    learn_from: Annotated[
        Path | None, typer.Option("--learn-from", help="Log of trajectories that the policy learns from first.")
    ] = None,
    log: Annotated[Path | None, typer.Option("--log", help="JSONL file to append finished trajectories to.")] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            "--state", help="File of what the policy has learned: read at the start if it exists, written at the end."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the address as one line of JSON.")] = False,
) -> None:
    """One OpenAI-compatible endpoint for many engines: a policy chooses the engine for each turn of an agent.

    Serves /v1/completions and /v1/chat/completions. The field `libra` of a body names the trajectory of a turn and the
    tool return before it; POST /trajectories/ID/finish ends a trajectory, and the policy learns from it. Turns of an
    engine that fails or hangs are retried elsewhere. Also: /engines, /metrics (Prometheus), /health.

    Runs until it is interrupted. Exit status: 0 ended by Ctrl-C or SIGTERM, 2 bad input.
    """
    # Imported here: `--help` must not wait for what routing needs.
    from libra.records.files import DiskError, write_whole
    from libra.serve.gateway.config import load_gateway
    from libra.trajectory import read_trajectories

    try:
        if not 0 <= port <= 65535:
            raise ValueError(f"--port is {port}; give 0 to 65535")
        check_writable(log, state, reads=(file, learn_from))
        asked = load_gateway(file)
        policy = _policy(asked, state)
        for trajectory in () if learn_from is None else read_trajectories(learn_from, tell_note):
            policy.finished(trajectory)
        require("http")
        from libra.serve.guard import read_token

        token = None if token_file is None else read_token(token_file)
        asyncio.run(_serve(asked, policy, host, port, token, log, as_json))
        if state is not None:
            write_whole(state, json.dumps(policy.snapshot()))
    except (ValueError, OSError, DiskError) as error:
        bad_input(error)


def _policy(file: GatewayConfig, state: Path | None) -> Policy:
    from libra.config.input_file import read_input
    from libra.route.catalogue import policy_named

    policy = policy_named(file.route, sticky=file.sticky)
    if state is None or not state.exists():
        return policy
    try:
        known = json.loads(read_input(state))
        if not isinstance(known, dict):
            raise ValueError(f"it holds {type(known).__name__}, not an object")
        return type(policy).restore(known)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"--state {state}: no state of the policy {file.route} ({error}); give another file") from None


async def _serve(
    file: GatewayConfig, policy: Policy, host: str, port: int, token: str | None, log: Path | None, as_json: bool
) -> None:
    from libra.config.listeners import GATEWAY
    from libra.config.sealed_line import sealed
    from libra.records.files import LineFile
    from libra.serve.gateway.server import Gateway
    from libra.serve.http import serve
    from libra.trajectory import dump_trajectory

    written = None if log is None else LineFile(log)

    def record(finished: Trajectory) -> None:
        if written is not None:
            written.append(sealed(dump_trajectory(finished).encode()))

    gateway = Gateway(file, policy, record, token is not None)

    def announce(base: str) -> None:
        healthy, count = len(gateway.upstreams.instances), len(file.engines)
        if as_json:
            typer.echo(json.dumps({"base": base, "v1": f"{base}/v1", "healthy": healthy, "engines": count}))
        else:
            typer.echo(f"{file.route} routes at {base}/v1 to {healthy} of {count} engines (Ctrl-C ends)")

    try:
        await serve(gateway.application(), host, port, announce, GATEWAY, token)
    finally:
        if written is not None:
            written.close()
