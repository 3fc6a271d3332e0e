"""Engines that others run, with their turns in flight and what these say of their pace."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable

from libra.live.pace import Pace, pace_classes
from libra.live.work import LiveWork, Took


class LiveServer(LiveWork):
    """A live `route.policy.Instance`. `pace` is learned from its own turns, and at first from those of its kind."""

    recall_rate = 0.0  # it does not lend
    prompt_wait_seconds = 0.0  # it computes its prompts itself

    def __init__(
        self, id: str, bucket: int, capacity_tokens: int, pace: Pace, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(pace, clock)
        self.id, self.bucket, self.capacity_tokens = id, bucket, capacity_tokens
        self.pace_class = 0


_TURNS = 64  # between two looks at the classes of servers, or as many as there are servers


class ServerPaces:
    """The paces of servers: of each, of those of a kind (a bucket, or a shape), and of all."""

    def __init__(self) -> None:
        self._all = Pace()
        self._kinds: dict[Hashable, Pace] = {}
        self._turns = 0  # since the classes were last looked at

    def of_kind(self, kind: Hashable) -> Pace:
        """The pace of the servers of a kind."""
        return self._kinds.setdefault(kind, Pace(like=self._all))

    def observe(self, server: LiveServer, generated_tokens: int, took: Took, servers: Collection[LiveServer]) -> bool:
        """Note an answered turn. Now and then put `servers` into classes by their paces. True: some are in another
        class than before."""
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
