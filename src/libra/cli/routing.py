"""`libra route`. Bad input is refused before a port is opened."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from libra.cli.errors import bad_input, require
from libra.cli.options import TokenFile, page_option
from libra.cli.output import check_writable, tell_note

if TYPE_CHECKING:
    from libra.route.policy import Policy
    from libra.serve.gateway.config import GatewayConfig
    from libra.serve.gateway.watcher import Watcher
    from libra.trajectory import Trajectory


def route(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="YAML file with the engines and their addresses.")
    ] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option("--engine", metavar="URL", help="Address of an engine, instead of FILE; repeatable."),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option("--route", help="Routing policy: a name, or path.py:Class (default: `route` of the file)."),
    ] = None,
    workers_from: Annotated[
        list[str] | None,
        typer.Option(
            "--workers-from",
            metavar="HOST",
            help="Address, network or name of hosts whose engines may join by POST /workers; repeatable.",
        ),
    ] = None,
    shared: Annotated[
        bool,
        typer.Option(
            "--shared",
            help="Query the engines' queues, since other clients (such as other gateways) use the same engines.",
        ),
    ] = False,
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free port.")] = 9000,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Any address except 127.0.0.1 needs --token-file.")
    ] = ("127.0.0.1"),
    token_file: TokenFile = None,
    learn_from: Annotated[
        list[Path] | None,
        typer.Option("--learn-from", help="Log of trajectories from which the policy learns at start; repeatable."),
    ] = None,
    log: Annotated[Path | None, typer.Option("--log", help="Append finished trajectories to this JSONL file.")] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            "--state", help="File of the policy's learned state; read at start if it exists, and written at the end."
        ),
    ] = None,
    otel: Annotated[
        str | None,
        typer.Option(
            "--otel",
            metavar="URL",
            help="Send spans of trajectories, turns and tools to this OpenTelemetry collector (OTLP over HTTP; "
            "default: OTEL_EXPORTER_OTLP_ENDPOINT).",
        ),
    ] = None,
    page_port: Annotated[
        int | None,
        page_option("a live page of the router at this port of 127.0.0.1"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the address as one line of JSON.")] = False,
) -> None:
    """One OpenAI-compatible endpoint for many engines: a policy chooses the engine for each turn of an agent.

    Engines are listed in FILE, given with --engine, or join by POST /workers. The gateway serves completions, chats,
    responses and messages, and the token-id endpoints of vLLM and SGLang.

    The field `libra` of a body, or the header X-Session-ID, names the trajectory of a turn. A turn without a name
    belongs to the trajectory that it continues. POST /trajectories/ID/finish or /finish_session ends a trajectory, and
    the policy learns from it. If an engine fails or hangs, its turns are retried on other engines.

    Other endpoints: /engines, /plan, /metrics (Prometheus), /health; --page serves a live page, --otel sends spans.

    Runs until it is interrupted. Exit status: 0 ended by Ctrl-C or SIGTERM, 2 bad input.
    """
    # Imported here, so that `--help` need not load the gateway.
    from libra.records.files import DiskError, write_whole
    from libra.trajectory import read_trajectories

    try:
        if not 0 <= port <= 65535:
            raise ValueError(f"--port is {port}; give 0 to 65535")
        if page_port and page_port == port:
            raise ValueError(f"--page and --port are both {port}; give --page another port, or 0 for any")
        check_writable(log, state, reads=(file, *(learn_from or ())))
        asked = _config(file, engine or [], policy, workers_from or [])
        if shared:
            asked = asked.model_copy(update={"shared": True})
        router = _policy(asked, state)
        for known in learn_from or ():
            for trajectory in read_trajectories(known, tell_note):
                if trajectory.finished:
                    router.finished(trajectory)
        require("http")
        if page_port is not None:
            require("report")
        from libra.serve.guard import read_token
        from libra.serve.http import run
        from libra.serve.span_endpoint import span_endpoint

        token = None if token_file is None else read_token(token_file)
        with ExitStack() as watching:
            watchers: list[Watcher] = []
            if (collector := span_endpoint(otel, os.environ)) is not None:
                require("otel")
                from libra.serve.gateway.spans import Spans
                from libra.serve.span_export import exporting

                tracer = watching.enter_context(exporting(collector, "libra-route"))
                watchers.append(watching.enter_context(closing(Spans(tracer))))
            run(_serve(asked, router, host, port, token, log, watchers, page_port, as_json))
        if state is not None:
            write_whole(state, json.dumps(router.snapshot()))
    except (ValueError, OSError, DiskError) as error:
        bad_input(error)


def _config(file: Path | None, engines: list[str], policy: str | None, workers_from: list[str]) -> GatewayConfig:
    from libra.serve.gateway.config import gateway_of, load_gateway

    if file is None:
        if not engines and not workers_from:
            raise ValueError(
                "no engines: give FILE, or --engine http://HOST:PORT for each, or --workers-from with the hosts "
                "whose engines will join (127.0.0.1 for this machine)"
            )
        return gateway_of(engines, policy, workers_from)
    if engines:
        raise ValueError(
            "--engine and FILE exclude each other: list all engines in the file, or give all with --engine"
        )
    return load_gateway(file, policy, workers_from)


def _policy(config: GatewayConfig, state: Path | None) -> Policy:
    from libra.config.input_file import read_input
    from libra.route.custom import load_policy, restore_policy

    try:
        policy = load_policy(config.route, sticky=config.sticky)
    except ValueError as error:
        raise ValueError(f"route: {error}") from None
    if state is not None and not callable(getattr(policy, "snapshot", None)):
        raise ValueError(f"--state {state}: the policy {config.route} has no method snapshot; leave --state out")
    if state is None or not state.exists():
        return policy
    try:
        known = json.loads(read_input(state))
        if not isinstance(known, dict):
            raise ValueError(f"the file has {type(known).__name__}, not an object")
        return restore_policy(config.route, known)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(
            f"--state {state}: not a state of the policy {config.route} ({error}); give another file"
        ) from None


async def _serve(
    file: GatewayConfig,
    policy: Policy,
    host: str,
    port: int,
    token: str | None,
    log: Path | None,
    watchers: list[Watcher],
    page_port: int | None,
    as_json: bool,
) -> None:
    from libra.config.listeners import GATEWAY
    from libra.config.sealed_line import sealed
    from libra.records.files import LineFile
    from libra.serve.gateway.recent import Recent
    from libra.serve.gateway.server import Gateway
    from libra.serve.http import serve
    from libra.trajectory import dump_trajectory

    written = None if log is None else LineFile(log)

    def record(ended: Trajectory) -> None:
        if written is not None:
            written.append(sealed(dump_trajectory(ended).encode()))

    recent, page = Recent(), ""
    watching = [*watchers, *(() if page_port is None else (recent,))]
    gateway = Gateway(file, policy, record, token is not None, watching)
    application = gateway.application()

    async def with_page(_: object) -> AsyncIterator[None]:
        nonlocal page
        from libra.serve.gateway.page import router_page_at

        assert page_port is not None
        async with router_page_at(page_port, token, gateway, recent, file.route) as page:
            yield

    if page_port is not None:
        application.cleanup_ctx.append(with_page)

    def announce(base: str) -> None:
        healthy, count = len(gateway.upstreams.instances), len(gateway.upstreams.all)
        if as_json:
            told = {"base": base, "v1": f"{base}/v1", "healthy": healthy, "engines": count}
            typer.echo(json.dumps({**told, "page": page} if page else told))
        else:
            typer.echo(f"{file.route} routes at {base}/v1 to {healthy} of {count} engines (Ctrl-C ends)")
            if page:
                typer.echo(f"page: {page}")

    try:
        await serve(application, host, port, announce, GATEWAY, token)
    finally:
        if written is not None:
            written.close()
