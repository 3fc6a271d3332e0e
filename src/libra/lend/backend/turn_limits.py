"""Limits of the turns of an engine on a lent device.

Invariant: no accepted turn can make the engine fail, so no run can end the borrower or its agent.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from libra.backends.transport.engine_messages import Generate

_LONGEST_NAME = 256  # most characters of a turn's id, and of its namespace
_INT32, _INT64 = 1 << 31, 1 << 63
_HOTTEST = 2.0  # highest temperature that vLLM accepts


@dataclass(frozen=True, slots=True)
class TurnLimits:
    """Limits of one engine: `max_model_len` is the longest context in tokens, and `vocabulary` the number of token
    ids."""

    max_model_len: int
    vocabulary: int

    def objection(self, turn: Generate, taken: Container[str]) -> str:
        """Reason to refuse the turn; empty if the turn is valid. `taken` are the ids of turns in flight."""
        room = self.max_model_len - len(turn.tokens)
        wrong = (
            (not 0 < len(turn.id) <= _LONGEST_NAME, f"id has {len(turn.id)} characters; give 1 to {_LONGEST_NAME}"),
            (turn.id in taken, "a turn with this id is in flight; give another id"),
            (not turn.tokens, "tokens is empty; give a context"),
            (
                room < 1,
                f"tokens has {len(turn.tokens)}; the engine's contexts have at most {self.max_model_len}, the next"
                " token included",
            ),
            (
                not all(0 <= token < self.vocabulary for token in turn.tokens),
                f"tokens has an id outside the vocabulary; give ids from 0 to {self.vocabulary - 1}",
            ),
            (not 1 <= turn.max_tokens < _INT32, f"max_tokens is {turn.max_tokens}; give 1 or more, below 2**31"),
            (
                not 0 <= turn.temperature <= _HOTTEST,
                f"temperature is {turn.temperature}; give a number from 0 to {_HOTTEST:g}",
            ),
            (
                not -1 <= turn.stop_token < self.vocabulary,
                f"stop_token is {turn.stop_token}; give an id of the vocabulary, or -1 for none",
            ),
            (not -_INT32 <= turn.priority < _INT32, f"priority is {turn.priority}; give a number of 32 bits"),
            (turn.seed is not None and not -_INT64 <= turn.seed < _INT64, f"seed is {turn.seed}; give one of 64 bits"),
            (turn.salt is not None and len(turn.salt) > _LONGEST_NAME, f"salt exceeds {_LONGEST_NAME} characters"),
            (turn.transfer is not None, "transfer is given; an engine on a lent device accepts no KV of other engines"),
        )
        return next((why for is_wrong, why in wrong if is_wrong), "")
