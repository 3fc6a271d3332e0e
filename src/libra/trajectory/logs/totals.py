"""Token counts that are estimated from texts, and scaled to the sums in a log.

A log may have only the sum over all calls of an episode. The sum is then exact, and the texts only determine its
division among turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from libra.trajectory.logs.chat import Chat
from libra.trajectory.logs.format import LogReading
from libra.trajectory.record import Turn


def agreeing(found: Chat, sent: int | None, received: int | None, reading: LogReading) -> Chat:
    """The chat, scaled to `received` generated tokens in total, and to contexts with a sum of `sent` tokens; None: not
    recorded.

    Each turn is one call whose prompt is all earlier text. If the recorded `sent` is less than the generated tokens
    alone need, contexts stay as estimated, with a remark.
    """
    if not found.turns:
        return found
    turns = found.turns
    if received is not None:
        shares = divided(received, [turn.generated_tokens for turn in turns])
        turns = tuple(replace(turn, generated_tokens=share) for turn, share in zip(turns, shares, strict=True))
    if sent is None:
        return replace(found, turns=turns)
    later = range(len(turns) - 1, -1, -1)  # number of later calls that read a turn's tokens again
    left = sent - sum(turn.generated_tokens * calls for turn, calls in zip(turns, later, strict=True))
    if left < 0:
        reading.remarks["episodes whose recorded prompt tokens are too few for their turns: lengths estimated"] += 1
        return replace(found, turns=turns)
    return _with_contexts(replace(found, turns=turns), left, later)


def _with_contexts(found: Chat, left: int, later: Sequence[int]) -> Chat:
    """The chat with a prompt and returns of `left` tokens in total, each counted in all of its `later` calls."""
    *inner, last = found.turns
    times = [len(found.turns), *later[:-1]]
    weights = [found.prompt_tokens, *(turn.returned_tokens for turn in inner)]
    shares = divided(left, [weight * calls for weight, calls in zip(weights, times, strict=True)])
    tokens = [share // calls for share, calls in zip(shares, times, strict=True)]
    tokens[-1] += left - sum(count * calls for count, calls in zip(tokens, times, strict=True))  # one call reads it
    returned = [replace(turn, returned_tokens=count) for turn, count in zip(inner, tokens[1:], strict=True)]
    return replace(found, prompt_tokens=tokens[0], turns=(*returned, last))


def divided(total: int, weights: Sequence[int]) -> list[int]:
    """Whole shares of `total` in proportion to the weights; equal shares if all weights are 0."""
    if not any(weights):
        weights = [1] * len(weights)
    whole = sum(weights)
    shares = [total * weight // whole for weight in weights]
    by_rest = sorted(range(len(weights)), key=lambda at: total * weights[at] % whole, reverse=True)
    for at in by_rest[: total - sum(shares)]:
        shares[at] += 1
    return shares


def last_call(found: Chat, prompt: int | None, generated: int | None) -> Chat:
    """The chat, scaled to a last call with a prompt of `prompt` tokens and an answer of `generated` tokens (None: not
    recorded). The texts determine the division of the prompt among the earlier parts.
    """
    if not found.turns:
        return found
    *before, last = found.turns
    last = last if generated is None else replace(last, generated_tokens=generated)
    if prompt is None:
        return replace(found, turns=(*before, last))
    parts = [found.prompt_tokens]
    for turn in before:
        parts += [turn.generated_tokens, turn.returned_tokens]
    first, *rest = divided(prompt, parts)
    turns: list[Turn] = [
        replace(turn, generated_tokens=rest[2 * at], returned_tokens=rest[2 * at + 1]) for at, turn in enumerate(before)
    ]
    return replace(found, prompt_tokens=first, turns=(*turns, last))
