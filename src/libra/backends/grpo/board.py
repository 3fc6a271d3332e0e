"""The state board: a replica's parameters and AdamW moments, where other processes can copy them.

Invariant: the sequence number is odd while the state is being changed and even while it is whole; a change adds two. So
a copy during which an even number stayed the same is a copy of one whole state (a sequence lock), and the owner never
waits for readers. State `number` is what the number-th change since the start has left; a replica that takes
over another's state goes on from its number, so that all processes of a replica count alike, whichever states they
copied on their way. The header holds the checksum of the parameters.

The order of stores that this needs is that of x86. On a machine that reorders them a torn copy of the parameters still
shows in the checksum.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np

from libra.backends.transport.shared_vectors import Layout, OwnVectors

PARAMETERS, FIRST_MOMENT, SECOND_MOMENT = range(3)  # the vectors
# The header: see above; AdamW's step count; the layout's signature; the learning rate, a double.
SEQUENCE, CHECKSUM, STEPS, SIGNATURE, LEARNING_RATE = range(5)


def board_layout(length: int, dtype: str) -> Layout:
    return Layout(cells=5, count=3, length=length, dtype=dtype)


class StateBoard:
    """The owner's end. The three vectors are tensors of the length that the flat layout says."""

    def __init__(self, length: int, dtype: str, signature: int) -> None:
        import torch  # a reader of a board does without

        self._shared = OwnVectors("libra-state", board_layout(length, dtype))
        self._shared.header[SIGNATURE] = signature
        self.vectors = [torch.from_numpy(vector) for vector in self._shared.vectors]

    @property
    def descriptor(self) -> int:
        return self._shared.descriptor

    @property
    def number(self) -> int:
        """Of the newest whole state."""
        return int(self._shared.header[SEQUENCE]) // 2

    @property
    def checksum(self) -> int:
        """CRC-32 of the parameters: equal on replicas that agree to the last bit."""
        return int(self._shared.header[CHECKSUM])

    @property
    def steps(self) -> int:
        """Optimiser steps behind the moments."""
        return int(self._shared.header[STEPS])

    @steps.setter
    def steps(self, steps: int) -> None:
        self._shared.header[STEPS] = steps

    def set_learning_rate(self, rate: float) -> None:
        """Of the last step."""
        self._shared.header.view(np.float64)[LEARNING_RATE] = rate

    def take_over(self, number: int) -> None:
        """The change that is being made leads to that state of another replica."""
        self._shared.header[SEQUENCE] = 2 * number - 1

    @contextlib.contextmanager
    def change(self) -> Iterator[None]:
        """Whatever alters the state happens in here. Left with an error, the state stays marked as broken until a
        change ends well."""
        self._shared.header[SEQUENCE] |= 1
        yield
        self._shared.header[CHECKSUM] = self._shared.checksum(PARAMETERS)
        self._shared.header[SEQUENCE] += 1
