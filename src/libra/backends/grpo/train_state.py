"""What training changes: parameters and AdamW moments on a state board, gradients in a gradient ring.

Invariant: model and optimiser only ever see views of that memory, and whatever changes them does so in place and marked
as a change; so the board is the state at every moment, and nothing is copied to publish it.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch

from libra.backends.grpo.board import FIRST_MOMENT, PARAMETERS, SECOND_MOMENT, StateBoard
from libra.backends.grpo.gradient_ring import GradientRing, Update
from libra.backends.grpo.publication import Publication, Shape, SharedPublication
from libra.backends.grpo.state_stream import RemotePublication
from libra.backends.transport.trainer_messages import RelayPlace, StatePlace

_ALIGNMENT = 64  # bytes: a cache line


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """All parameters of a model as one vector: shapes by name in its order, and where each starts, in elements.

    Every tensor starts on a cache line. What lies between two of them is zero and stays zero, so a sum, a copy or a
    checksum of whole vectors is that of their tensors.
    """

    shapes: Mapping[str, tuple[int, ...]]
    offsets: Mapping[str, int]
    length: int

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]], element_bytes: int) -> FlatLayout:
        step = _ALIGNMENT // element_bytes
        offsets, end = {}, 0
        for name, shape in shapes.items():
            offsets[name] = end
            end += -(-prod(shape) // step) * step
        return cls(dict(shapes), offsets, end)

    def views(self, vector: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors by name, as views of a vector of at least `length`."""
        return {
            name: vector[self.offsets[name] : self.offsets[name] + prod(shape)].view(shape)
            for name, shape in self.shapes.items()
        }

    def signature(self) -> int:
        """A number that tells layouts apart."""
        return zlib.crc32(repr((list(self.shapes.items()), self.length)).encode())


@dataclass(frozen=True, slots=True)
class Kept:
    """A copy of the whole state, to be put back."""

    vectors: list[torch.Tensor]
    steps: int


class TrainState:
    """The parameters of a model by name, and the AdamW that steps them."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], optimiser: torch.optim.AdamW) -> None:
        """Move the parameters onto a board, keeping their values. The optimiser has not stepped yet."""
        first = next(iter(parameters.values()))
        self._parameters, self._optimiser = dict(parameters), optimiser
        (self._group,) = optimiser.param_groups
        shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        self._flat = FlatLayout.of(shapes, first.element_size())
        self._dtype = str(first.dtype).removeprefix("torch.")
        self._board = StateBoard(self._flat.length, self._dtype, self._flat.signature())
        self._ring = GradientRing(self._flat.length, self._dtype)
        self._gradients = [self._flat.views(slot) for slot in self._ring.slots]
        places, means, squares = (
            self._flat.views(self._board.vectors[vector]) for vector in (PARAMETERS, FIRST_MOMENT, SECOND_MOMENT)
        )
        with self.change():
            for name, parameter in parameters.items():
                places[name].copy_(parameter.detach())
                parameter.data = places[name]
                optimiser.state[parameter] = {
                    "step": torch.zeros(()),
                    "exp_avg": means[name],
                    "exp_avg_sq": squares[name],
                }

    @property
    def number(self) -> int:
        """Of this state on the board."""
        return self._board.number

    @property
    def checksum(self) -> int:
        """CRC-32 of the parameters: equal on replicas that agree to the last bit."""
        return self._board.checksum

    @property
    def learning_rate(self) -> float:
        """Of the next step."""
        rate: float = self._group["lr"]
        return rate

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        self._group["lr"] = rate

    @property
    def size(self) -> int:
        """Bytes of one vector of it."""
        return self._board.vectors[PARAMETERS].nbytes

    @property
    def place(self) -> StatePlace:
        """Where other processes find it."""
        return StatePlace(os.getpid(), self._board.descriptor, self._ring.descriptor)

    @property
    def shape(self) -> Shape:
        """Equal for replicas of one model in one precision."""
        return Shape(self._flat.length, self._dtype, self._flat.signature())

    def publication_at(self, place: StatePlace | RelayPlace) -> Publication:
        """What another replica of the same model publishes. Raises `LayoutError`, and `OSError` when it is gone."""
        match place:
            case StatePlace():
                return SharedPublication(place, self.shape)
            case RelayPlace():
                return RemotePublication(place, self.shape)

    def optimiser_tensors(self) -> dict[str, torch.Tensor]:
        """Step count and moments as `<parameter>/<key>`."""
        return {
            f"{name}/{key}": tensor
            for name, parameter in self._parameters.items()
            for key, tensor in self._optimiser.state[parameter].items()
        }

    @contextlib.contextmanager
    def change(self) -> Iterator[None]:
        """Whatever alters parameters or moments, in place, does it in here."""
        with self._board.change():
            yield
            self._board.steps = int(self._steps()[0])
            self._board.set_learning_rate(self.learning_rate)

    def gradient(self) -> torch.Tensor:
        """Zeros [length + 1] for the next step: backward adds to its views, the last element is the denominator's."""
        slot = self._open_slot()
        slot.zero_()
        return slot

    def step(self, denominator: float, gradient_norm: float) -> None:
        """Publish the gradient, which is divided and clipped by now, and let the optimiser take it."""
        self._ring.publish(Update(self.number + 1, self.learning_rate, denominator, gradient_norm))
        with self.change():
            self._optimiser.step()

    def take_state(self, publication: Publication) -> int | None:
        """Become what is published. Returns its number; None when it changed while it was copied: this replica then
        holds no whole state until it takes one."""
        with self.change():
            state = publication.copy_state([vector.numpy() for vector in self._board.vectors])
            if state is not None:
                self._board.take_over(state.number)
                self._ring.forget()  # what led to states of the same numbers here
                self._set_steps(state.steps)
                self.learning_rate = state.learning_rate
        return state.number if state is not None and state.checksum == self.checksum else None

    def take_update(self, publication: Publication, number: int) -> None:
        """Make the published step to state `number`. Raises `OverrunError`, with the state as it was."""
        update = publication.copy_update(number, self._open_slot()[:-1].numpy())
        self.learning_rate = update.learning_rate
        self.step(update.denominator, update.gradient_norm)

    def keep(self) -> Kept:
        return Kept([vector.clone() for vector in self._board.vectors], self._board.steps)

    def put_back(self, kept: Kept) -> None:
        with self.change():
            for vector, saved in zip(self._board.vectors, kept.vectors, strict=True):
                vector.copy_(saved)
            self._set_steps(kept.steps)

    def _open_slot(self) -> torch.Tensor:
        """The slot for the next update, with every gradient a view of it."""
        index = self._ring.open(self.number + 1)
        for name, view in self._gradients[index].items():
            self._parameters[name].grad = view
        return self._ring.slots[index]

    def _steps(self) -> list[torch.Tensor]:
        return [self._optimiser.state[parameter]["step"] for parameter in self._parameters.values()]

    def _set_steps(self, steps: int) -> None:
        for tensor in self._steps():
            tensor.fill_(steps)
