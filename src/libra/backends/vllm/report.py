"""Reports of an engine: tokens since the last report, and counters since the start.

Invariant: each token is reported once, in the order of its turn and with the weight version that sampled it. A turn's
end is reported with its last token or after it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from libra.backends.transport.engine_messages import Generated, LoanState, Piece

# Seconds between two reports of a working engine. If an engine is killed, its unreported tokens are generated again: a
# few tokens per turn, from this time at most. A report of 16 turns has 1.5 kB, and takes 2 us to encode and 10 us to
# decode.
REPORT_SECONDS = 0.05
SILENT_SECONDS = 1.0  # between two reports of an engine with turns that may make no progress


@dataclass(frozen=True, slots=True)
class Sampled:
    """Result of one iteration for one turn."""

    turn: str
    tokens: list[int]
    logprobs: list[float]  # one per token
    prefilled_tokens: int  # prompt tokens computed for the turn, without prefix-cache hits; 0 after its first token
    ended: bool


class Report:
    """The next report. It collects iterations, and is empty again after `take`."""

    def __init__(self, now: float) -> None:
        self._pieces: list[Piece] = []
        self._latest: dict[str, Piece] = {}  # the last piece of each turn
        self._ended: list[str] = []
        self._iterations = self._prefilled_tokens = self._generated_tokens = 0
        self._told_iterations, self._told_at = 0, now

    def iteration(self, sampled: Iterable[Sampled], version: int) -> None:
        """Add an iteration that used weights of this version."""
        self._iterations += 1
        for part in sampled:
            self._prefilled_tokens += part.prefilled_tokens
            self._generated_tokens += len(part.tokens)
            self._add(part, version)
            if part.ended:
                self._ended.append(part.turn)

    def interrupted(self, turn: str) -> None:
        """Add the end of a turn that was stopped between two iterations."""
        self._ended.append(turn)

    def due(self, now: float) -> bool:
        """Whether to report now. The end of a turn is due at once, tokens and counters after the interval. Iterations
        are reported even without tokens, since a silent engine counts as lost."""
        if self._ended:
            return True
        return self._iterations > self._told_iterations and now - self._told_at >= REPORT_SECONDS

    def silent(self, now: float) -> bool:
        """Whether to send an empty report as a sign of life."""
        return now - self._told_at >= SILENT_SECONDS

    def take(self, now: float, busy_seconds: float, loan: LoanState | None = None) -> Generated:
        pieces, ended = self._pieces, self._ended
        self._pieces, self._latest, self._ended = [], {}, []
        self._told_iterations, self._told_at = self._iterations, now
        return Generated(
            pieces, ended, busy_seconds, self._prefilled_tokens, self._iterations, self._generated_tokens, loan
        )

    def _add(self, part: Sampled, version: int) -> None:
        piece = self._latest.get(part.turn)
        if piece is None or piece.version != version:
            piece = self._latest[part.turn] = Piece(part.turn, version, [], [])
            self._pieces.append(piece)
        piece.tokens.extend(part.tokens)
        piece.logprobs.extend(part.logprobs)
