"""verl's request load balancer, with a policy of Libra. verl makes it a Ray actor, so calls come one at a time."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from libra.config.sealed_line import sealed
from libra.config.yaml_file import Section, valid
from libra.live.session_router import IDLE_SECONDS, SessionRouter
from libra.records.files import DiskError, LineFile
from libra.route.cmlfq import CMLFQ
from libra.route.custom import load_policy
from libra.route.policy import Policy
from libra.trajectory import ToolStatus, Trajectory, dump_trajectory, read_trajectories

_LOG = logging.getLogger(__name__)
_UNBOUNDED = 2**40  # tokens; the servers check a context themselves
_EMPTY = "No available servers in load balancer"  # text of the error at which verl's client waits and retries

_Count = Annotated[int, Field(gt=0)]


class RouterFile(Section):
    """The file named by `actor_rollout_ref.rollout.router_config_path`."""

    router_class: str = ""  # key by which verl finds the class
    route: str = CMLFQ.NAME  # a policy of the catalogue, or path.py:Class
    sticky: bool = True
    max_model_len: _Count = _UNBOUNDED  # tokens for which each server has room
    turn_tokens: _Count = 1024  # tokens that one turn needs beyond its context
    # Seconds after which a trajectory without turns is forgotten.
    idle_seconds: Annotated[float, Field(gt=0)] = IDLE_SECONDS
    log: Path | None = None  # log of finished trajectories; the policy learns from it at start


class Router:
    """Implements verl's protocol `RequestLoadBalancer`, and calls for an agent loop that reports more: `began`,
    `answered`, `returned`, and `finished` or `forget`. A trajectory is a `request_id` of verl.
    """

    def __init__(self, servers: dict[str, Any], yaml_config: dict[str, Any]) -> None:
        """Create the router from servers by address and the router's file. Raises ValueError that names the wrong
        key.
        """
        file = valid(RouterFile, yaml_config)
        policy = load_policy(file.route, sticky=file.sticky)
        self._log = None if file.log is None else _learned(policy, file.log)
        self._router = SessionRouter(
            policy,
            capacity_tokens=file.max_model_len,
            turn_tokens=file.turn_tokens,
            idle_seconds=file.idle_seconds,
        )
        self._handles: dict[str, Any] = {}
        self.add_servers(servers)

    def require_acquire_fields(self) -> list[str]:
        return ["prompt_ids"]

    def require_release_fields(self) -> list[str]:
        return ["request_id"]

    def acquire_server(self, request_id: str, prompt_ids: list[int]) -> tuple[str, Any]:
        """The server of a turn. Raises RuntimeError, with the text that verl's client expects, if no server is in
        service.
        """
        if not self._handles:
            raise RuntimeError(_EMPTY)
        server = self._router.acquire(request_id, len(prompt_ids))
        return server, self._handles[server]

    def release_server(self, server_id: str, request_id: str | None = None) -> None:
        if request_id is None:
            raise ValueError("release_server needs request_id, which require_release_fields asks for")
        self._router.release(server_id, request_id)

    def add_servers(self, servers: dict[str, Any]) -> None:
        self._handles |= servers
        self._router.add(servers)

    def remove_servers(self, server_ids: list[str]) -> None:
        for server in server_ids:
            self._handles.pop(server, None)
        self._router.remove(server_ids)

    def get_all_servers(self) -> list[str]:
        return list(self._handles)

    def get_status(self) -> dict[str, Any]:
        turns = self._router.in_flight
        return {
            "servers": turns,
            "total_inflight": sum(turns.values()),
            "active_servers": len(turns),
            "load_tokens": {server.id: server.load_tokens for server in self._router.servers},
            "trajectories": len(self._router),
        }

    def get_total_inflight(self) -> int:
        return sum(self._router.in_flight.values())

    def clear_sticky_cache(self) -> dict[str, Any]:
        """Let every trajectory go to any server. verl calls this when replicas join and when weights change."""
        self._router.prefixes_lost()
        return {"cleared_entries": len(self._router), "server_loads": self._router.in_flight}

    def began(self, request_id: str, prompt: str, task: str) -> None:
        """Set the prompt that a trajectory shares with its group, and the kind of prompt."""
        self._router.began(request_id, prompt, task)

    def answered(self, request_id: str, prompt_tokens: int, generated: int) -> None:
        """Note a complete turn, from one server or several."""
        self._router.answered(request_id, prompt_tokens, generated)

    def returned(self, request_id: str, tool: str, status: ToolStatus) -> None:
        """Note a tool return; the next prompt contains its output."""
        self._router.returned(request_id, tool, status)

    def finished(self, request_id: str, reward: float | None, policy_version: int) -> None:
        """End a trajectory: append it to the log, and let the policy learn from it."""
        trajectory = self._router.finished(request_id, reward, policy_version)
        if trajectory is not None and self._log is not None:
            try:
                self._log.append(sealed(dump_trajectory(trajectory).encode()))
            except DiskError as error:
                _LOG.warning("trajectory %s is not logged: %s", request_id, error)

    def forget(self, request_id: str) -> None:
        """Drop an abandoned trajectory."""
        self._router.forget(request_id)


def _learned(policy: Policy, log: Path) -> LineFile:
    """Let the policy learn from the log, and open the log for appending."""
    file = LineFile(log)
    for trajectory in _kept(log):
        policy.finished(trajectory)
    return file


def _kept(log: Path) -> list[Trajectory]:
    return list(read_trajectories(log)) if log.stat().st_size else []
