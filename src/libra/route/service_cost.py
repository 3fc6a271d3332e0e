"""Expected cost of serving a trajectory's remaining tokens on an instance.

Invariant: a cost depends on the instance, the longer instances that could take over, and the remaining tokens. Only the
cost of moving the context depends on the trajectory's present instance. So with unchanged evidence and loads, a
worthwhile move is never worth reversing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from libra.route.loads import instance_of, loads_of
from libra.route.policy import Fleet, Instance
from libra.route.remaining import Remaining

# A turn must move while its instance still has room for one more token, since the engine would cut a full context.
_ROOM = 2

# Assumed seconds per generated token on an instance without reports: the order of a 14 B model on one A100, which reads
# 28 GB of weights at 2 TB/s in 14 ms.
TOKEN_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class MigrationCost:
    """Seconds to move a context of n tokens to another instance: `fixed_seconds + seconds_per_token * n`.

    The default is the C-MLFQ paper's upper bound for a move to another node: 40K tokens in less than 733 ms.
    """

    fixed_seconds: float = 0.0
    seconds_per_token: float = 0.733 / 40_000

    def __post_init__(self) -> None:
        for name, seconds in (("fixed_seconds", self.fixed_seconds), ("seconds_per_token", self.seconds_per_token)):
            if not 0 <= seconds < math.inf:
                raise ValueError(f"{name} is {seconds}; give seconds, 0 or more and finite")

    def __deepcopy__(self, _memo: object) -> MigrationCost:
        """Return itself, since it is immutable. The default would set attributes of a copy, which the compiled class
        does not allow.
        """
        return self

    def seconds(self, context_tokens: float, load_tokens: float) -> float:
        """Seconds that a move of n tokens costs, including delays of other trajectories. An instance with a load of m
        tokens serves m / n other trajectories of this size, and each of them waits equally long.
        """
        if context_tokens <= 0:
            return self.fixed_seconds
        others = load_tokens / context_tokens
        return (self.fixed_seconds + self.seconds_per_token * context_tokens) * (1 + others)


@dataclass(slots=True, eq=False)
class Offer:
    """The terms of serving a turn on an instance. It is not frozen, since freezing takes longer than the decision."""

    instance: Instance
    load_tokens: int
    told_seconds: float  # per generated token, as the instance reports; `TOKEN_SECONDS` without a report
    token_seconds: float  # `told_seconds` with congestion, and with the token's share of the wait for the turn's prompt
    reach: float  # largest context that the instance may serve; infinite in the longest bucket
    onward: Offer | None  # the fastest offer of a longer bucket, which would take over beyond `reach`


def offers_of(fleet: Fleet, needed: int, prefix_at: str | None, turn_tokens: float) -> tuple[list[Offer], Offer | None]:
    """Offers of the least loaded instances with room for `needed` tokens, longest bucket first.

    There is an offer for each class of each bucket, one for lent instances, and one for the instance `prefix_at` if it
    is present and has room for the tokens; ties by id. O(instances), unless the fleet is indexed (`loads_of`).

    An instance reports its seconds for all accepted work. An instance without a report is assumed to need
    `TOKEN_SECONDS` per token at the mean load of these instances, half of `TOKEN_SECONDS` when idle, and half of
    `TOKEN_SECONDS` more for each further mean load. A turn's wait for its prompt is divided among its tokens,
    `turn_tokens` on average. If `turn_tokens` is 0, the number is unknown, and the wait does not count.

    The limit of a bucket is not enforced: an instance serves any context that fits into its memory. A turn that exceeds
    the limit leaves the bucket only if another instance is expected to serve it sooner. If every such turn had to
    leave, unforeseen work would gather in the last bucket while other instances are idle.
    """
    loads = loads_of(fleet, needed)
    if not loads.instances:
        return [], None
    home = None if prefix_at is None else instance_of(fleet, prefix_at)
    if home is not None and home.capacity_tokens < needed:
        home = None
    per_load = loads.instances / loads.tokens if loads.tokens else 0.0
    offers: list[Offer] = []
    held: Offer | None = None
    onward: Offer | None = None
    kinds = sorted(loads.least)
    for bucket in range(len(fleet.limits) - 1, -1, -1):
        beyond = onward
        for kind in kinds:
            if kind[0] != bucket:
                continue
            load, least = loads.least[kind]
            offer = _offer(least, load, per_load, beyond, turn_tokens)
            offers.append(offer)
            if home is least:
                held = offer
            if onward is None or offer.token_seconds < onward.token_seconds:
                onward = offer
        if home is not None and home.bucket == bucket and held is None:
            held = _offer(home, home.load_tokens, per_load, beyond, turn_tokens)
    return offers, held


def _offer(instance: Instance, load: int, per_load: float, onward: Offer | None, turn_tokens: float) -> Offer:
    told = instance.token_seconds
    if told is None:
        told = TOKEN_SECONDS
        each = told * (1 + load * per_load) / 2
    else:
        each = told
    reach = math.inf if onward is None else instance.capacity_tokens - _ROOM
    if turn_tokens > 0:
        each += instance.prompt_wait_seconds / turn_tokens
    return Offer(instance, load, told, each, reach, onward)


def service_cost(
    remaining: Remaining, context_tokens: int, offer: Offer, migration: MigrationCost, share: float = 1.0
) -> float:
    """Expected seconds of serving the remaining tokens.

    This instance serves the tokens that fit. A longer instance serves the others, after a move of the context. A recall
    of a lent instance before the last token that fits also moves the context. Only `share` of the service, and of the
    time for a recall, counts, since offers are reliable only for that time. A move counts in full.
    """
    onward, recalls = offer.onward, offer.instance.recall_rate
    if onward is None:
        cost = share * remaining.mean * offer.token_seconds
    else:
        here, beyond = remaining.cut(offer.reach - context_tokens)
        cost = share * (here * offer.token_seconds + (remaining.mean - here) * onward.token_seconds) + (
            beyond * migration.seconds(max(offer.reach, context_tokens), onward.load_tokens)
        )
    per_token = recalls * share * offer.token_seconds
    if per_token > 0:
        probability, passed = remaining.interrupted(per_token, offer.reach - context_tokens)
        cost += probability * migration.seconds(context_tokens + passed, offer.load_tokens)
    return cost


def cheapest(
    remaining: Remaining,
    context_tokens: int,
    offers: Sequence[Offer],
    home: Offer | None,
    migration: MigrationCost,
    turn_tokens: float,
) -> Offer:
    """The cheapest of one or more offers. Ties go to `home`, the offer of the instance with the prefix. Other ties go
    to the lower load, then to the lower id.

    A first placement compares the offers over all remaining tokens. A move is compared over one turn of `turn_tokens`
    tokens, the trajectory's own mean, since loads change and the next tool return allows another move.
    """
    mean, share = remaining.mean, 1.0
    chosen = offers[0]
    least: tuple[float, int, str] | None = None
    if home is not None and context_tokens <= home.reach:
        share = min(1.0, turn_tokens / mean) if mean > 0 else 1.0
        chosen, least = home, (service_cost(remaining, context_tokens, home, migration, share), -1, "")
    for offer in offers:
        if offer is home or context_tokens > offer.reach:
            continue
        move, fastest = migration.seconds(context_tokens, offer.load_tokens), offer.token_seconds
        if offer.onward is not None and offer.onward.token_seconds < fastest:
            fastest = offer.onward.token_seconds
        if least is not None and share * fastest * mean + move > least[0]:
            continue  # this lower bound of the cost rejects most offers
        cost = move + service_cost(remaining, context_tokens, offer, migration, share)
        if least is None or (cost, offer.load_tokens, offer.instance.id) < least:
            chosen, least = offer, (cost, offer.load_tokens, offer.instance.id)
    return chosen
