"""The work of a question's requests, as columns, and the deadlines of this work.

Invariant: a deadline uses only conditions that an objective imposes on all requests except those that may miss it.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from itertools import product
from math import inf
from typing import Literal

import numpy as np

from libra.cost.engine_memory import BLOCK
from libra.cost.grid import Array
from libra.serving.objective import Metric
from libra.serving.question import SizingQuestion
from libra.sim.clock import TICKS
from libra.sim.engine.speculative import Draws, Speculative


class RequestWork:
    """The work of requests, as columns."""

    def __init__(self, question: SizingQuestion, *, loaded: bool = False) -> None:
        """`loaded`: a KV tier may have prefixes, even whole prompts, so an engine may have to compute only the last
        token."""
        requests = question.requests
        first = requests[0].arrival
        # Arrivals in seconds at a mean rate of one request a second.
        self.arrival = np.array([(it.arrival - first) / TICKS for it in requests]) * question.natural_rate
        prompt = np.array([it.prompt_tokens for it in requests], dtype=float)
        self.output = np.array([it.output_tokens for it in requests], dtype=float)
        known = np.array(
            [it.prefix_tokens if loaded else min(it.prefix_tokens, it.prompt_tokens - 1) for it in requests]
        )
        shared = np.minimum(known // BLOCK * BLOCK, prompt - 1)
        self.new = prompt - shared  # tokens of prompts that no prefix cache has
        self.pairs = self.new * shared + self.new * (self.new + 1) / 2
        self.decoded = self.output - 1  # tokens after the first
        self.own = self.decoded * self.new + self.decoded * (self.decoded + 1) / 2  # sum of contexts over tokens
        self.longest = prompt + self.output
        self.contexts = (int(self.new.min()) + 1, int(self.longest.max()))
        self.iterations = self.decoded  # least iterations that generate the decoded tokens

    def __len__(self) -> int:
        return len(self.arrival)

    def with_drafts(self, speculative: Speculative) -> RequestWork:
        """The work with the fewest verifications that the simulator's draws of accepted drafts allow. An iteration with
        fewer drafts gains no more tokens than an iteration that verifies all drafts. The order of gains is unknown, so
        a context grows by at least one token and at most `tokens_each` tokens in each iteration."""
        drawn, draws, each = copy(self), Draws(speculative), speculative.tokens_each
        drawn.iterations, drawn.own = np.zeros(len(self)), np.zeros(len(self))
        for request, (new, decoded) in enumerate(zip(self.new, self.decoded.astype(int), strict=True)):
            if decoded:
                gains = draws.gains(request, 0, int(decoded)).cumsum()
                count = int(gains.searchsorted(decoded)) + 1
                left = np.arange(count)  # iterations that follow each iteration
                grown = np.maximum(count - 1 - left, decoded - each * (left + 1))
                drawn.iterations[request] = count
                drawn.own[request] = (new + 1) * count + grown.sum()
        return drawn


@dataclass(frozen=True, slots=True)
class WorkDeadline:
    """All but `misses` requests must be served within `seconds` of their arrival, at `tpot` seconds a token or less.
    `of` tells whether this is the deadline of the prompt alone or of the whole request."""

    of: Literal["prompt", "finish"]
    seconds: Array
    misses: int
    tpot: float


def deadlines(question: SizingQuestion, work: RequestWork) -> Iterator[WorkDeadline]:
    """Yield the deadlines that follow from the objectives."""
    several = int((work.decoded > 0).sum())
    tails: dict[Metric, list[tuple[float, int]]] = {"ttft": [], "tpot": [], "latency": []}
    for objective in question.objectives:
        count = several if objective.metric == "tpot" else len(work)
        if count:
            tails[objective.metric] += objective.tails(count)
    for limit, misses in (*tails["ttft"], *tails["latency"]):
        yield WorkDeadline("prompt", np.full(len(work), limit), misses, inf)
    for limit, misses in tails["latency"]:
        for pace, more in ((inf, 0), *tails["tpot"]):
            yield WorkDeadline("finish", np.full(len(work), limit), misses + more, pace)
    for (limit, misses), (pace, more) in product(tails["ttft"], tails["tpot"]):
        yield WorkDeadline("finish", limit + pace * work.decoded, misses + more, pace)
