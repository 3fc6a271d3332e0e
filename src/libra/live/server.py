"""Engines that run outside Libra, with their turns in flight and learned paces."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable

from libra.live.pace import Pace, pace_classes
from libra.live.work import LiveWork, Took


class LiveServer(LiveWork):
    """A live `route.policy.Instance`. `pace` is learned from its own turns, and at first from turns of servers of its
    kind.
    """

    recall_rate = 0.0  # the server is not lent
    prompt_wait_seconds = 0.0  # the server computes its prompts itself

    def __init__(
        self, id: str, bucket: int, capacity_tokens: int, pace: Pace, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(pace, clock)
        self.id, self.bucket, self.capacity_tokens = id, bucket, capacity_tokens
        self.pace_class = 0


_TURNS = 64  # turns between two classifications of servers; at least the number of servers


class ServerPaces:
    """Paces of servers: of each server, of each kind (a bucket or a shape), and of all servers."""

    def __init__(self) -> None:
        self._all = Pace()
        self._kinds: dict[Hashable, Pace] = {}
        self._turns = 0  # turns since the last classification

    def of_kind(self, kind: Hashable) -> Pace:
        """The pace of the servers of a kind."""
        return self._kinds.setdefault(kind, Pace(like=self._all))

    def observe(self, server: LiveServer, generated_tokens: int, took: Took, servers: Collection[LiveServer]) -> bool:
        """Learn from an answered turn. After every `_TURNS` turns (or one per server, if that is more), classify
        `servers` again by their paces. Returns whether a class has changed.
        """
        server.pace.observe(generated_tokens, took.seconds, took.load_tokens)
        self._turns += 1
        if self._turns < max(_TURNS, len(servers)):
            return False
        self._turns = 0
        changed, load = False, self._all.load_tokens
        told = [it.pace.token_seconds(load) or 0.0 for it in servers]
        for each, number in zip(servers, pace_classes(told), strict=True):
            changed |= each.pace_class != number
            each.pace_class = number
        return changed
