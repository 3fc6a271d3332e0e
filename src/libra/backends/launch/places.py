"""Which slot is on which node.

Invariant: slots go round the nodes in turn until each node is full, so neighbours in the list, such as two core
trainers, are on different nodes where there are several. A pure function of what the nodes offer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class NoRoomError(ValueError):
    """The nodes do not have that many slots."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What a node has for slots: accelerators, or where no node has any, cores."""

    node: str
    cpus: float
    gpus: float


@dataclass(frozen=True, slots=True)
class Seat:
    """A slot: the `number`th on node `node` of those that are used."""

    node: int
    number: int


def room(offers: Sequence[Offer], share: float, most: int | None) -> list[int]:
    """Slots that each node has: one for each accelerator, or for each `share` of a core where no node has any; at most
    `most`."""
    accelerated = any(offer.gpus >= 1 for offer in offers)
    rooms = [int(offer.gpus) if accelerated else int(offer.cpus / share + 1e-9) for offer in offers]
    return [each if most is None else min(each, most) for each in rooms]


def seats(slots: int, rooms: Sequence[int]) -> list[Seat]:
    """Where each slot is. Nodes without room, or not needed, are left out and the others numbered in order. Raises
    `NoRoomError`."""
    if sum(rooms) < slots:
        raise NoRoomError(f"{slots} slots are wanted, and {len(rooms)} node(s) have room for {sum(rooms)}")
    rounds = [(node, number) for number in range(slots) for node, each in enumerate(rooms) if number < each]
    chosen = rounds[:slots]
    used = sorted({node for node, _ in chosen})
    return [Seat(used.index(node), number) for node, number in chosen]
