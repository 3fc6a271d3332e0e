"""Workers on a Ray cluster.

Invariant: every node sees the same directories of the run as the controller; otherwise the run is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import secrets
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libra.backends.launch.cluster import ClusterLauncher, NodeSlot
from libra.backends.launch.fork_server import LaunchError
from libra.backends.launch.launcher import SourceLostError
from libra.backends.launch.node import ClusterNode, NodeFacts, NodeLostError
from libra.backends.transport.engine_messages import LoadWeights
from libra.config.cache import cache_directory
from libra.config.run import ClusterConfig
from libra.records.files import writing

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

_GROUP_SECONDS = 60.0  # in which the requested devices must become free
_ANSWERS = 1000  # pending calls of an actor; they wait for processes, not for each other


class _NodeActor(ClusterNode):
    """A `ClusterNode` as a Ray actor. Ray lists its GPUs in the environment."""

    def __init__(self, logs: str, name: str, accelerated: bool) -> None:
        import ray

        devices = tuple(os.environ["CUDA_VISIBLE_DEVICES"].split(",")) if accelerated else ()
        super().__init__(ray.util.get_node_ip_address(), Path(logs), name, devices)

    async def read_apart(self, order: LoadWeights, size: int, base: LoadWeights | None) -> tuple[None, Any]:
        """Return None and the weights, as two Ray objects: a caller can wait for None, which is there once the weights
        are whole, without moving the weights."""
        return None, await self.read(order, size, base)


class RayNode:
    """A `RemoteNode` that is a Ray actor."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def start(self, marks: Mapping[str, str]) -> NodeFacts:
        try:
            return await _answer(self._actor.start.remote(marks))
        except NodeLostError as error:
            raise NodeLostError(
                f"a node of the Ray cluster did not start: {error}. Check that it has the same Python environment"
            ) from None

    async def fork(self, name: str, slot: int, controller: tuple[str, int], token: bytes) -> int:
        return await _answer(self._actor.fork.remote(name, slot, controller, token))

    def kill(self, pid: int) -> None:
        self._actor.kill.remote(pid)

    async def gone(self, pid: int) -> None:
        await _answer(self._actor.gone.remote(pid))

    async def read(self, order: LoadWeights, size: int, base: LoadWeights | None) -> Any:
        whole, content = self._actor.read_apart.options(num_returns=2).remote(order, size, base)
        await _answer(whole)
        return content

    async def write(self, order: LoadWeights, size: int, base: LoadWeights | None, content: Any) -> None:
        await _answer(self._actor.write.remote(order, size, base, content))

    async def ended(self) -> str:
        return await _answer(self._actor.ended.remote())

    def close(self) -> None:
        import ray

        ray.kill(self._actor)


async def _answer(call: Any) -> Any:
    from ray.exceptions import ObjectLostError, RayError, RayTaskError

    try:
        return await call
    except RayTaskError as error:  # the method failed on its node, or Ray failed to move weights
        if isinstance(error.cause, RayError):
            raise SourceLostError(_reason(error.cause)) from None
        raise error.cause from None
    except ObjectLostError as error:
        raise SourceLostError(_reason(error)) from None
    except RayError as error:
        raise NodeLostError(_reason(error)) from None


def _reason(error: Exception) -> str:
    """The last line of the error, where Ray writes the cause."""
    return (str(error).strip() or type(error).__name__).splitlines()[-1].strip()


class RayNodes:
    """`Nodes` of a Ray cluster. `counts` are the slots of each bundle; a slot takes `each` of the resource `kind`."""

    def __init__(self, host: str, group: Any, counts: Sequence[int], kind: str, each: float, logs: Path) -> None:
        self.host = host
        self._group, self._counts, self._kind, self._each, self._logs = group, counts, kind, each, logs

    def open(self, number: int) -> RayNode:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        amount = _amount(self._counts[number], self._each)
        accelerated = self._kind == "GPU"
        actor = ray.remote(_NodeActor).options(
            num_cpus=0 if accelerated else amount,
            num_gpus=amount if accelerated else 0,
            max_concurrency=_ANSWERS,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number),
        )
        return RayNode(actor.remote(str(self._logs.absolute()), f"fork-server-{number}", accelerated))


@dataclass(frozen=True, slots=True)
class SlotOffer:
    """A node's resources for slots: GPUs, or cores if no node has GPUs."""

    node: str
    cpus: float
    gpus: float


def node_slots(slots: int, offers: Sequence[SlotOffer], share: float, most: int | None) -> list[NodeSlot]:
    """Place `slots` slots on the nodes, one on each node in turn. A node has room for one slot per GPU (if no node has
    a GPU, per `share` of a core), and for at most `most` slots. Nodes that get no slot are left out; the others are
    numbered in order. Raises `LaunchError` if there is too little room.
    """
    accelerated = any(offer.gpus >= 1 for offer in offers)
    rooms = [int(offer.gpus) if accelerated else int(offer.cpus / share + 1e-9) for offer in offers]
    rooms = [each if most is None else min(each, most) for each in rooms]
    if sum(rooms) < slots:
        found = ", ".join(f"{offer.node} {each}" for offer, each in zip(offers, rooms, strict=True))
        raise LaunchError(
            f"cluster.slots: {slots} slots are wanted, but {len(rooms)} node(s) have room for {sum(rooms)}, {found};"
            " use fewer slots, or add nodes"
        )
    rounds = [(node, number) for number in range(slots) for node, each in enumerate(rooms) if number < each]
    chosen = rounds[:slots]
    used = sorted({node for node, _ in chosen})
    return [NodeSlot(used.index(node), number) for node, number in chosen]


@contextlib.asynccontextmanager
async def open_on_ray(cluster: ClusterConfig, logs: Path) -> AsyncIterator[ClusterLauncher]:
    """Context with a launcher that is starting, in the configured Ray cluster or in one started for this context.
    Raises `LaunchError`, `DiskError`."""
    with _marks((logs, cache_directory())) as marks, _ray(cluster.ray_address, logs):
        from ray.util.placement_group import placement_group, remove_placement_group

        offers, here = _offers()
        slots = node_slots(cluster.slots, offers, cluster.share, cluster.slots_per_node)
        counts = [count for _, count in sorted(Counter(slot.node for slot in slots).items())]
        kind, each = ("GPU", 1.0) if any(offer.gpus >= 1 for offer in offers) else ("CPU", cluster.share)
        group = placement_group([{kind: _amount(count, each)} for count in counts], strategy="SPREAD")
        try:
            if not await asyncio.to_thread(group.wait, _GROUP_SECONDS):
                raise LaunchError(
                    f"the Ray cluster has {cluster.slots} slots, but they were not free for {_GROUP_SECONDS:.0f} s:"
                    " others use its devices; see `ray status`"
                )
            nodes = RayNodes(here, group, counts, kind, each, logs)
            async with ClusterLauncher.open(nodes, slots, marks, cluster.losses_per_hour) as launcher:
                yield launcher
        finally:
            remove_placement_group(group)


def _amount(count: int, each: float) -> float:
    """Amount of a resource, rounded to Ray's unit of a ten-thousandth."""
    return round(count * each, 4)


@contextlib.contextmanager
def _ray(address: str | None, logs: Path) -> Iterator[None]:
    """Context connected to a cluster. A cluster started here has this machine's cores and listens on 127.0.0.1. Ray's
    output goes to `<logs>/ray.log`, since Ray would otherwise print it among the results."""
    with contextlib.ExitStack() as stack:
        logs.mkdir(parents=True, exist_ok=True)
        stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(logs / "ray.log", "a", buffering=1))))
        options: dict[str, Any] = {"address": address}
        if address is None:
            # Without this, Ray uses a network address of the machine, even if it is given 127.0.0.1. Ray reads it at
            # import.
            os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
            # Ray gives its directory mode 0777, so a parent directory must keep other users out.
            own = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="libra-ray-")))
            options = {
                "address": "local",
                "num_cpus": len(os.sched_getaffinity(0)),
                "include_dashboard": False,
                "_temp_dir": str(own / "r"),
            }
        import ray

        try:
            ray.init(**options, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, RuntimeError, ValueError) as error:
            where = f"the Ray cluster at {address}" if address is not None else "a Ray cluster on this machine"
            raise LaunchError(f"{where} cannot be used: {str(error).splitlines()[0]}") from None
        stack.callback(ray.shutdown)
        if address is None:
            _require_loopback(ray.util.get_node_ip_address())
        yield


def _require_loopback(address: str) -> None:
    if not ipaddress.ip_address(address).is_loopback:
        raise LaunchError(
            f"a Ray cluster on this machine would listen on {address}, since Ray was imported before: set"
            " RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 before the import, or start a cluster and give its address"
        )


def _offers() -> tuple[list[SlotOffer], str]:
    """Resources of the nodes, and the address of this machine among them."""
    import ray

    own = ray.get_runtime_context().get_node_id()
    alive = [node for node in ray.nodes() if node["Alive"]]
    offers = [
        SlotOffer(node["NodeManagerAddress"], node["Resources"].get("CPU", 0.0), node["Resources"].get("GPU", 0.0))
        for node in alive
    ]
    return offers, next(node["NodeManagerAddress"] for node in alive if node["NodeID"] == own)


@contextlib.contextmanager
def _marks(directories: Sequence[Path]) -> Iterator[dict[str, str]]:
    """Context with a new file in each directory; yields the text of each file by its path."""
    mark = secrets.token_hex(8)
    made: dict[str, str] = {}
    try:
        for directory in directories:
            path = directory.absolute() / f"seen-by-all-nodes-{mark}"
            with writing(path):
                directory.mkdir(parents=True, exist_ok=True)
                path.write_text(mark)
            made[str(path)] = mark
        yield made
    finally:
        for made_path in made:
            Path(made_path).unlink(missing_ok=True)
