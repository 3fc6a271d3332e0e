"""Attained service: a multi-level feedback queue that knows of a trajectory only how long it has become.

Invariant: every turn is wanted in the bucket of the context attained so far, so a trajectory only moves to longer ones.
"""

from __future__ import annotations

from libra.route.bucket import Bucketed
from libra.route.policy import Request


class AttainedService(Bucketed):
    """The `mlfq` policy: the shortest bucket that holds the prompt, then the next one each time it is outgrown.

    A long generation without tools is demoted while it runs, when it outlives its bucket.
    """

    NAME = "mlfq"
    REASON = "bucket of the attained context"

    def _expected(self, request: Request) -> int:
        return request.context_tokens

    def _rule(self) -> None:
        return None

    def _resume(self, rule: None) -> None:
        pass
