"""An engine that others run, and its turns in flight."""

from __future__ import annotations

from collections.abc import Callable


class LiveServer:
    """A live `route.policy.Instance`, whose load is the total context of its turns in flight."""

    token_seconds: float | None = None  # the server does not say
    recall_rate = 0.0  # nor does it lend
    prompt_wait_seconds = 0.0  # it computes its prompts itself

    def __init__(self, id: str, bucket: int, capacity_tokens: int) -> None:
        self.id, self.bucket, self.capacity_tokens = id, bucket, capacity_tokens
        self._load_tokens = 0
        self._changed: Callable[[], object] = _nothing

    @property
    def load_tokens(self) -> int:
        return self._load_tokens

    @load_tokens.setter
    def load_tokens(self, tokens: int) -> None:
        self._load_tokens = tokens
        self._changed()

    def watch(self, changed: Callable[[], object]) -> bool:
        """See `route.loads.WatchedInstance`."""
        self._changed = changed
        return True


def _nothing() -> None:
    pass
