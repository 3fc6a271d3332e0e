"""The gradient ring: the last few updates of a replica, where others can copy them.

Invariant: a slot's number is that of the state to which its gradient leads, and is set only while the slot holds just
what the optimiser consumes: added up over all replicas, divided and clipped. Before anything is written to a slot its
number is taken away. So a copy before and after which a slot had the same number is a copy of that whole update.

The gradients of a step are accumulated in the slot itself and exchanged in place: publishing them costs a few stores.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from libra.backends.transport.shared_vectors import Layout, OwnVectors

SLOTS = 4  # one is being filled, so a reader may be three updates late: copying a state takes less than one step
CELLS = 4  # header cells of a slot
NUMBER, LEARNING_RATE, DENOMINATOR, NORM = range(CELLS)  # an integer, then doubles
NONE = -1  # the number of a slot that holds no whole update


@dataclass(frozen=True, slots=True)
class Update:
    """What leads to state `number`, beside the gradient."""

    number: int
    learning_rate: float
    denominator: float  # by which the sum of gradients was divided
    gradient_norm: float  # before clipping


def ring_layout(length: int, dtype: str) -> Layout:
    """Slots for a flat gradient and one number more: the loss denominator is exchanged with it."""
    return Layout(cells=SLOTS * CELLS, count=SLOTS, length=length + 1, dtype=dtype)


class GradientRing:
    """The owner's end. `slots` are tensors [length + 1]; the last element is for the denominator."""

    def __init__(self, length: int, dtype: str) -> None:
        import torch  # a reader of a ring does without

        self._shared = OwnVectors("libra-gradients", ring_layout(length, dtype))
        self._numbers = self._shared.header.reshape(SLOTS, CELLS)
        self._doubles = self._numbers.view(np.float64)
        self.forget()
        self.slots = [torch.from_numpy(vector) for vector in self._shared.vectors]

    @property
    def descriptor(self) -> int:
        return self._shared.descriptor

    def open(self, number: int) -> int:
        """The index of the slot in which the update to state `number` is to be made. What it held is gone."""
        index = number % SLOTS
        self._numbers[index, NUMBER] = NONE
        return index

    def forget(self) -> None:
        """No slot holds an update any more."""
        self._numbers[:, NUMBER] = NONE

    def publish(self, update: Update) -> None:
        """From now on the slot holds this update."""
        index = update.number % SLOTS
        self._doubles[index, LEARNING_RATE] = update.learning_rate
        self._doubles[index, DENOMINATOR] = update.denominator
        self._doubles[index, NORM] = update.gradient_norm
        self._numbers[index, NUMBER] = update.number
