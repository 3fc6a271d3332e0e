"""Sessions without a name: a prompt belongs to the session whose last prompt and answer it continues.

Invariant: if a prompt continues several sessions, the prompt gets the session with the longest last prompt; if several
last prompts are equally long, the session with the longest answer. If several sessions match and no answer
distinguishes them, the prompt gets no session, so a turn never counts for another session. Two sessions with the same
prompt and the same answer have the same history, so either may continue. There are never more than `most` sessions;
each takes a kilobyte at most, whatever its prompts. A search hashes the prompt once, by blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from libra.config.listeners import UNNAMED_SESSIONS
from libra.serve.gateway.history import BLOCK, PromptHistory

_SAME_PROMPT = 512  # most sessions with the same prompt; above it, the oldest session is dropped


@dataclass(slots=True, eq=False)
class _Waiting:
    """A session between two turns. Only the length and hash of its answer are kept."""

    end: tuple[int, int, int]  # `PromptHistory.end` of its last prompt
    unanswered: bool
    length: int | None = None  # bytes of the answer in comparable form; None: unknown
    digest: int = 0

    def continued_by(self, following: bytes) -> bool:
        length = self.length
        return length is not None and length <= len(following) and hash(following[:length]) == self.digest


class UnnamedSessions:
    """The waiting sessions. Call `claim` with each prompt, and `keep` under the claimed or a new name after its
    turn."""

    def __init__(self, most: int = UNNAMED_SESSIONS) -> None:
        self._most = most
        self._waiting: OrderedDict[str, _Waiting] = OrderedDict()  # least recently kept first
        self._at: dict[tuple[int, int, int], dict[str, _Waiting]] = {}  # by `end`, then by name; longest waiting first
        self._tails: dict[int, dict[int, int]] = {}  # mark -> length of the tail -> number of sessions

    def __len__(self) -> int:
        return len(self._waiting)

    def claim(self, history: PromptHistory) -> str | None:
        """The session that this prompt continues, or None. The session then no longer waits for a prompt."""
        content = history.open
        for blocks in range(len(history.marks) - 1, -1, -1):
            mark = history.marks[blocks]
            tails = self._tails.get(mark)
            if tails is None:
                continue
            start = BLOCK * blocks
            for length in sorted(tails, reverse=True):
                end = start + length
                if end > len(content):
                    continue
                at = self._at.get((mark, length, hash(content[start:end])))
                found = None if at is None else _continued(at, history, end)
                if found is not None:
                    self.drop(found)
                    return found
        return None

    def keep(self, id: str, history: PromptHistory, said: bytes | None, answered: bool) -> list[str]:
        """Have a session wait for its next prompt. `said` is the comparable form of the answer; None if it has none.
        Returns the sessions that were dropped to make room."""
        waiting = _Waiting(history.end, not answered)
        if answered and said is not None:
            waiting.length, waiting.digest = len(said), hash(said)
        at = self._at.setdefault(waiting.end, {})
        at[id] = self._waiting[id] = waiting
        mark, length, _ = waiting.end
        tails = self._tails.setdefault(mark, {})
        tails[length] = tails.get(length, 0) + 1
        given_up = [next(iter(at))] if len(at) > _SAME_PROMPT else []
        if len(self._waiting) > self._most:
            given_up.append(next(iter(self._waiting)))
        for each in given_up:
            self.drop(each)
        return list(dict.fromkeys(given_up))

    def drop(self, id: str) -> None:
        """Drop a session if it waits for a prompt."""
        waiting = self._waiting.pop(id, None)
        if waiting is None:
            return
        at = self._at[waiting.end]
        del at[id]
        if not at:
            del self._at[waiting.end]
        mark, length, _ = waiting.end
        tails = self._tails[mark]
        tails[length] -= 1
        if not tails[length]:
            del tails[length]
            if not tails:
                del self._tails[mark]


def _continued(at: dict[str, _Waiting], history: PromptHistory, end: int) -> str | None:
    """The session in `at` that the prompt continues, or None. All their last prompts end at `end` of this prompt."""
    rest = history.open[end:]
    if not rest:
        return next((id for id, waiting in at.items() if waiting.unanswered), None)
    try:
        following = history.kind.following(rest)
    except (ValueError, OverflowError, IndexError):
        return None  # the prompt is malformed, which the engine will report
    if following is None:
        return None
    longest = max(
        (id for id, waiting in at.items() if waiting.continued_by(following)),
        key=lambda id: at[id].length or 0,
        default=None,
    )
    if longest is None and len(at) == 1:
        (id, waiting), *_ = at.items()
        return id if waiting.length is None and not waiting.unanswered else None
    return longest
