"""C-MLFQ as published: a multi-level feedback queue driven by tool returns.

Invariant: an estimate moves a trajectory to another bucket only if both the mean and the P90 of its remaining tokens
fit this bucket. No turn is placed on an instance without room for it. Estimates come from a prefix tree over
tool-return states. A node has exactly one remainder for each trajectory added through it since its creation: the tokens
generated and returned after the node, without the return that leads to the node. The tree never has more than
`max_nodes` nodes below its root.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

from libra.route.bucket import bucket_of, server
from libra.route.live import Live, LivePolicy
from libra.route.policy import Fleet, Placement, ToolReturn, TurnRequest
from libra.route.tool_state import ToolState, payload_class, remainders
from libra.trajectory import Trajectory

# Remainders that a node keeps for its P90, as a ring. The P90 is exact for a node with at most this many samples, and
# follows recent policy versions in a busier node. Fixed histogram bins would be inexact in the first case, and would
# never forget in the second.
RECENT = 64

# Measured: a node takes 0.5 KB with one sample and 3 KB with a full ring. So the tree typically takes 32 MB, and 200 MB
# at most.
MAX_NODES = 65_536


@dataclass(frozen=True, slots=True)
class Estimate:
    """Remaining tokens at one node: `mean` over all `count` samples, and `p90` over the latest `RECENT` samples."""

    count: int
    mean: float
    p90: int  # by nearest rank: the smallest kept sample with at least 90 % of the kept samples at or below it


@dataclass(slots=True)
class Node:
    """Evidence at one prefix of tool returns, with child nodes for prefixes that are one return longer."""

    count: int = 0
    total: int = 0
    recent: list[int] = field(default_factory=list)
    children: dict[ToolState, Node] = field(default_factory=dict)

    def add(self, remaining: int) -> None:
        if len(self.recent) < RECENT:
            self.recent.append(remaining)
        else:
            self.recent[self.count % RECENT] = remaining
        self.count += 1
        self.total += remaining

    def estimate(self) -> Estimate:
        """The estimate from the node's samples. Raises ValueError without samples."""
        if not self.count:
            raise ValueError("node has no samples: add one before asking for an estimate")
        rank = (9 * len(self.recent) + 9) // 10
        return Estimate(self.count, self.total / self.count, sorted(self.recent)[rank - 1])


class CausalTree:
    """Remaining-token evidence by prompt and ordered tool-return states.

    Prompts are in order of their latest update. A full tree evicts whole prompts, oldest first. A prompt that fills the
    tree alone gets no more nodes, but its existing nodes still count samples.
    """

    def __init__(self, max_nodes: int = MAX_NODES) -> None:
        if max_nodes < 1:
            raise ValueError(f"max_nodes is {max_nodes}, must be >= 1")
        self._max_nodes = max_nodes
        self._size = 0
        self._everyone = Node()
        self._prompts: dict[str, Node] = {}

    @property
    def trajectories(self) -> int:
        """Number of added trajectories, including those of evicted prompts."""
        return self._everyone.count

    @property
    def size(self) -> int:
        """Number of nodes without the root."""
        return self._size

    def add(self, trajectory: Trajectory) -> None:
        """Count a finished trajectory at every node of its path. O(turns)."""
        (_, _, remaining), *returns = remainders(trajectory)
        self._everyone.add(remaining)
        node = self._touch(trajectory.prompt_id)
        node.add(remaining)
        for _, state, remaining in returns:
            assert state is not None
            if state not in node.children:
                if not self._make_room(trajectory.prompt_id):
                    return
                node.children[state] = Node()
                self._size += 1
            node = node.children[state]
            node.add(remaining)

    def estimate(self, prompt_id: str, states: list[ToolState]) -> Estimate | None:
        """The estimate at the longest known prefix of `states`. If the prompt is unknown, the estimate is over all
        prompts; None before any trajectory.
        """
        node = self._prompts.get(prompt_id)
        if node is None:
            return self._everyone.estimate() if self._everyone.count else None
        for state in states:
            child = node.children.get(state)
            if child is None:
                break
            node = child
        return node.estimate()

    def snapshot(self) -> dict[str, Any]:
        """The state as JSON values. Nodes form a flat list, parents first, since a path may be deeper than JSON can
        nest.
        """
        listed: list[tuple[int | None, str | ToolState, Node]] = [
            (None, prompt_id, node) for prompt_id, node in self._prompts.items()
        ]
        for index, (_, _, node) in enumerate(listed):  # the list grows during the loop: breadth first
            listed.extend((index, state, child) for state, child in node.children.items())
        return {
            "max_nodes": self._max_nodes,
            "everyone": _evidence(self._everyone),
            "nodes": [
                [parent, key if isinstance(key, str) else list(key), *_evidence(node)] for parent, key, node in listed
            ],
        }

    @classmethod
    def restore(cls, snapshot: dict[str, Any]) -> Self:
        tree = cls(snapshot["max_nodes"])
        tree._everyone = _node(*snapshot["everyone"])
        nodes: list[Node] = []
        for parent, key, count, total, recent in snapshot["nodes"]:
            node = _node(count, total, recent)
            if parent is None:
                tree._prompts[key] = node
            else:
                nodes[parent].children[ToolState(*key)] = node
            nodes.append(node)
        tree._size = len(nodes)
        return tree

    def _touch(self, prompt_id: str) -> Node:
        """The prompt's node, created if missing; it becomes the most recently updated."""
        node = self._prompts.pop(prompt_id, None)
        if node is None:
            self._make_room(prompt_id)
            node = Node()
            self._size += 1
        self._prompts[prompt_id] = node
        return node

    def _make_room(self, prompt_id: str) -> bool:
        """Evict the oldest prompts except this one, until one more node fits. Returns False if no other prompt
        remains."""
        while self._size >= self._max_nodes:
            oldest = next(iter(self._prompts))
            if oldest == prompt_id:
                return False
            self._size -= _count(self._prompts.pop(oldest))
        return True


def _count(node: Node) -> int:
    nodes = [node]
    for each in nodes:  # the list grows during the loop; recursion would fail on long trajectories
        nodes.extend(each.children.values())
    return len(nodes)


def _evidence(node: Node) -> list[Any]:
    return [node.count, node.total, list(node.recent)]


def _node(count: int, total: int, recent: list[int]) -> Node:
    return Node(count, total, list(recent))


@dataclass(slots=True)
class _Live(Live):
    bucket: int = 0  # of the last placement, or of the next one if no instance has room for the turn now
    states: list[ToolState] = field(default_factory=list)


class PublishedCMLFQ(LivePolicy[_Live]):
    """The `cmlfq-published` policy.

    A trajectory starts in the shortest bucket. After each tool return, its prompt and tool-return states are looked up
    in the causal tree. The trajectory migrates when the mean and the P90 of its remaining tokens fit the same other
    bucket.

    The rule assigns buckets by the remainder, while the limits of a fleet are final contexts. So a bucket's limit on
    the remainder is its limit minus the mean prompt of the finished trajectories. At the start of a trajectory, the
    final context is the prompt plus the remainder. So both limits lead to the same bucket for an average prompt. The
    last bucket also takes longer trajectories.

    An instance is eligible if it has room for the context and one more turn. If the bucket has no eligible instance,
    the next longer bucket with an eligible instance serves the turn. If all longer buckets lack such an instance, the
    nearest shorter bucket with an eligible instance serves the turn. Within a bucket, the turn goes to the instance
    with its prefix, otherwise to the least loaded, ties by id.
    """

    NAME = "cmlfq-published"

    def __init__(self, max_nodes: int = MAX_NODES) -> None:
        super().__init__()
        self._tree = CausalTree(max_nodes)
        self._prompt_tokens = 0  # mean prompt of all finished trajectories

    def place(self, request: TurnRequest, fleet: Fleet) -> Placement | None:
        live = self._live.setdefault(request.trajectory_id, _Live())
        live.bucket = min(live.bucket, len(fleet.limits) - 1)
        reason = "starts in the shortest bucket" if live.instance is None else f"keeps bucket {live.bucket}"
        return self._serve(live, request, fleet, live.bucket, reason)

    def tool_returned(self, request: TurnRequest, returned: ToolReturn, fleet: Fleet) -> Placement | None:
        live = self._placed(request)
        live.states.append(ToolState(returned.tool, payload_class(returned.returned_tokens), returned.status))
        # A new plan may have fewer buckets; trajectories of missing buckets then go to the longest bucket.
        live.bucket = min(live.bucket, len(fleet.limits) - 1)
        bucket, reason = self._wanted(live, request.prompt_id, fleet.limits)
        return self._serve(live, request, fleet, bucket, reason)

    def finished(self, trajectory: Trajectory) -> None:
        self._tree.add(trajectory)
        self._prompt_tokens += trajectory.prompt_tokens
        super().finished(trajectory)

    def _learned(self) -> dict[str, Any]:
        return {"prompt_tokens": self._prompt_tokens, "tree": self._tree.snapshot()}

    def _resume(self, snapshot: dict[str, Any]) -> None:
        self._tree = CausalTree.restore(snapshot["tree"])
        self._prompt_tokens = snapshot["prompt_tokens"]

    def _row(self, live: _Live) -> list[Any]:
        return [live.bucket, live.instance, live.prefix_there, [list(state) for state in live.states]]

    def _of_row(self, bucket: int, instance: str | None, prefix_there: bool, states: list[Any]) -> _Live:
        return _Live(instance, prefix_there, bucket, [ToolState(*state) for state in states])

    def _wanted(self, live: _Live, prompt_id: str, limits: tuple[int, ...]) -> tuple[int, str]:
        """The bucket that fits both mean and P90, otherwise the trajectory's own bucket; and the reason."""
        estimate = self._tree.estimate(prompt_id, live.states)
        if estimate is None:
            return live.bucket, "no evidence"
        mean_prompt = self._prompt_tokens / self._tree.trajectories
        by_mean = bucket_of(mean_prompt + estimate.mean, limits)
        by_p90 = bucket_of(mean_prompt + estimate.p90, limits)
        if by_mean == by_p90:
            return by_mean, f"mean {estimate.mean:.0f} and P90 {estimate.p90} remaining both fit bucket {by_mean}"
        return live.bucket, (
            f"mean {estimate.mean:.0f} remaining fits bucket {by_mean}, P90 {estimate.p90} fits bucket {by_p90}"
        )

    def _serve(self, live: _Live, request: TurnRequest, fleet: Fleet, wanted: int, reason: str) -> Placement | None:
        """Place the turn in the wanted bucket, or in the nearest bucket with room for it, and record the bucket."""
        needed = request.context_tokens + fleet.turn_tokens
        chosen = server(fleet.instances, needed, wanted, live.instance if live.prefix_there else None)
        if chosen is None:
            live.bucket = wanted
            return None
        if chosen.bucket != wanted:
            outgrown = any(instance.bucket == wanted for instance in fleet.instances)
            cause = (
                f"context {request.context_tokens} exceeds bucket {wanted}"
                if outgrown
                else f"bucket {wanted} has no instance"
            )
            reason = f"{reason}; {cause}"
        live.bucket = chosen.bucket
        return self._goes(live, chosen, reason)
