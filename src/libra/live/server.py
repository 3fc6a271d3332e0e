"""An engine that others run, and its turns in flight."""

from __future__ import annotations

import time
from collections.abc import Callable

from libra.live.pace import Pace
from libra.live.work import LiveWork


class LiveServer(LiveWork):
    """A live `route.policy.Instance`. `pace` is that of servers of its kind."""

    recall_rate = 0.0  # it does not lend
    prompt_wait_seconds = 0.0  # it computes its prompts itself

    def __init__(
        self, id: str, bucket: int, capacity_tokens: int, pace: Pace, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(pace, clock)
        self.id, self.bucket, self.capacity_tokens = id, bucket, capacity_tokens
