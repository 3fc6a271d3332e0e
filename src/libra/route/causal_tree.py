"""Prefix tree over tool-return states: how many tokens trajectories still needed after what their tools said.

Invariant: a node's evidence is exactly one remainder for each trajectory added through it since it was created, and
the tree never holds more than `max_nodes` nodes below its root. A remainder is the tokens generated and returned from
the node to the end of the trajectory; the return that leads to the node is not in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Self

from libra.trajectory import ToolStatus, Trajectory

PayloadClass = Literal["small", "medium", "large"]

# Published C-MLFQ payload classes, tokens.
SMALL_PAYLOAD = 500
MEDIUM_PAYLOAD = 5_000

# Remainders a node keeps for its P90. A ring is exact for every node with up to this many samples, and the quantile of
# a busier one follows recent policy versions; fixed histogram bins would blur the first and never forget in the second.
RECENT = 64

# Measured: 0.5 KB for a node with one sample, 3 KB with a full ring; so 32 MB as a rule and 200 MB at worst.
MAX_NODES = 65_536


class ToolState(NamedTuple):
    """What the tree knows of one tool return. A tuple, because every lookup hashes one for each return so far."""

    tool: str
    payload: PayloadClass
    status: ToolStatus


def payload_class(returned_tokens: int) -> PayloadClass:
    if returned_tokens <= SMALL_PAYLOAD:
        return "small"
    return "medium" if returned_tokens <= MEDIUM_PAYLOAD else "large"


@dataclass(frozen=True, slots=True)
class Estimate:
    """Remaining tokens as one node saw them: `mean` over all `count` samples, `p90` over the latest `RECENT`."""

    count: int
    mean: float
    p90: int  # nearest rank: the smallest kept sample that at least 90 % of the kept samples do not exceed


@dataclass(slots=True)
class Node:
    """Evidence at one prefix, and the prefixes one return longer."""

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
        """Raises `ValueError` on a node without samples, which has no mean."""
        if not self.count:
            raise ValueError("node has no samples: add one before asking for an estimate")
        rank = (9 * len(self.recent) + 9) // 10
        return Estimate(self.count, self.total / self.count, sorted(self.recent)[rank - 1])


class CausalTree:
    """Remaining-token evidence by prompt and ordered tool-return states.

    Prompts are kept in order of their latest update. When the tree is full, whole prompts are evicted from the oldest
    on; a prompt that fills the tree alone stops growing deeper and goes on counting where it has nodes.
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
        """Trajectories added, those of evicted prompts included."""
        return self._everyone.count

    @property
    def size(self) -> int:
        """Nodes held, the root excluded."""
        return self._size

    def add(self, trajectory: Trajectory) -> None:
        """Count a finished trajectory at every node of its path; O(turns)."""
        if not trajectory.finished:
            raise ValueError(
                f"trajectory {trajectory.id!r} is unfinished, so its remainders are unknown: forget it instead"
            )
        remaining = sum(turn.generated_tokens + turn.returned_tokens for turn in trajectory.turns)
        self._everyone.add(remaining)
        node = self._touch(trajectory.prompt_id)
        node.add(remaining)
        for turn in trajectory.turns:
            remaining -= turn.generated_tokens + turn.returned_tokens
            if turn.tool is None or turn.status is None:
                continue
            state = ToolState(turn.tool, payload_class(turn.returned_tokens), turn.status)
            if state not in node.children:
                if not self._make_room(trajectory.prompt_id):
                    return
                node.children[state] = Node()
                self._size += 1
            node = node.children[state]
            node.add(remaining)

    def estimate(self, prompt_id: str, states: list[ToolState]) -> Estimate | None:
        """At the longest known prefix of `states`; of all prompts if this one is unseen; None before any trajectory."""
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
        """JSON values. Nodes are listed flat, parents first, because a path may be deeper than JSON nests."""
        listed: list[tuple[int | None, str | ToolState, Node]] = [
            (None, prompt_id, node) for prompt_id, node in self._prompts.items()
        ]
        for index, (_, _, node) in enumerate(listed):  # grows while it is read: breadth first
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
        """The prompt's node, made if need be, now the latest updated."""
        node = self._prompts.pop(prompt_id, None)
        if node is None:
            self._make_room(prompt_id)
            node = Node()
            self._size += 1
        self._prompts[prompt_id] = node
        return node

    def _make_room(self, prompt_id: str) -> bool:
        """Evict the oldest prompts other than this one until one more node fits; False if no other is left."""
        while self._size >= self._max_nodes:
            oldest = next(iter(self._prompts))
            if oldest == prompt_id:
                return False
            self._size -= _count(self._prompts.pop(oldest))
        return True


def _count(node: Node) -> int:
    nodes = [node]
    for each in nodes:  # grows while it is read; recursion would fail on long trajectories
        nodes.extend(each.children.values())
    return len(nodes)


def _evidence(node: Node) -> list[Any]:
    return [node.count, node.total, list(node.recent)]


def _node(count: int, total: int, recent: list[int]) -> Node:
    return Node(count, total, list(recent))
