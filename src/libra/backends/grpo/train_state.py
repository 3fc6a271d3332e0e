"""State that training changes: parameters, AdamW moments and gradients, on a board. A joiner takes over a core's.

Invariant: model and optimiser only see views of the board's memory, and every change is made in place and marked as a
change. So the board always is the state, and publishing it copies nothing.
"""

from __future__ import annotations

import contextlib
import os
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch

from libra.backends.grpo.publication import (
    FIRST_MOMENT,
    OFF_GPU,
    PARAMETERS,
    SECOND_MOMENT,
    OverrunError,
    Publication,
    Shape,
    SharedPublication,
    Update,
    make_board,
)
from libra.backends.grpo.relay import RemotePublication
from libra.backends.transport.shared_memory import CACHE_LINE, round_up
from libra.backends.transport.trainer_messages import RelayPlace, StatePlace

SNAPSHOTS = 3  # in a row without catching up; then the core is faster than this replica and has to pause for it
SILENT_SECONDS = 30.0  # in the middle of one change; an optimiser step takes seconds at most


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """All parameters of a model as one vector: shapes by name in its order, and the start of each, in elements. Every
    tensor starts on a cache line. The gaps are zero and stay zero, so a sum, a copy or a checksum of whole vectors is
    that of their tensors."""

    shapes: Mapping[str, tuple[int, ...]]
    offsets: Mapping[str, int]
    length: int

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]], element_bytes: int) -> FlatLayout:
        offsets, end = {}, 0
        for name, shape in shapes.items():
            offsets[name] = end
            end += round_up(prod(shape), CACHE_LINE // element_bytes)
        return cls(dict(shapes), offsets, end)

    def views(self, vector: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors by name, as views of a vector of at least `length`."""
        return {
            name: vector[self.offsets[name] : self.offsets[name] + prod(shape)].view(shape)
            for name, shape in self.shapes.items()
        }

    def signature(self) -> int:
        """A number that identifies the layout."""
        return zlib.crc32(repr((list(self.shapes.items()), self.length)).encode())


@dataclass(frozen=True, slots=True)
class Kept:
    """A copy of the whole state in the host's memory, for restoring it."""

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
        # Equal for replicas of one model in one precision.
        self.shape = Shape(self._flat.length, str(first.dtype).removeprefix("torch."), self._flat.signature())
        self._board = make_board(self.shape, first.device)
        self._gradients = [self._flat.views(slot) for slot in self._board.slots]
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
        """The number of this state on the board."""
        return self._board.number

    @property
    def checksum(self) -> int:
        """CRC-32 of the parameters: equal on replicas that agree to the last bit."""
        return self._board.checksum

    @property
    def largest(self) -> float:
        """The largest magnitude of a parameter; NaN where one is not a number."""
        lowest, highest = torch.aminmax(self._board.vectors[PARAMETERS])
        return max(-float(lowest), float(highest))

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        rate: float = self._group["lr"]
        return rate

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        self._group["lr"] = rate

    @property
    def size(self) -> int:
        """Bytes of one vector of the state."""
        return self._board.vectors[PARAMETERS].nbytes

    @property
    def place(self) -> StatePlace:
        """The place where other processes find the state."""
        return StatePlace(os.getpid(), self._board.descriptor)

    def publication_at(self, place: StatePlace | RelayPlace) -> Publication:
        """The publication of another replica of the same model. Raises `LayoutError`, and `OSError` when the replica is
        gone."""
        match place:
            case StatePlace():
                return SharedPublication(place, self.shape)
            case RelayPlace():
                return RemotePublication(place, self.shape)

    def mirror(self, mirrored: bool) -> None:
        """Start or stop keeping the state where joiners read it; always on unless it is on a GPU."""
        self._board.mirror(mirrored)

    def optimiser_tensors(self) -> dict[str, torch.Tensor]:
        """Step count and moments as `<parameter>/<key>`."""
        return {
            f"{name}/{key}": tensor
            for name, parameter in self._parameters.items()
            for key, tensor in self._optimiser.state[parameter].items()
        }

    @contextlib.contextmanager
    def change(self) -> Iterator[None]:
        """Context for every in-place change of parameters or moments."""
        with self._board.change():
            yield
            self._board.describe(int(self._steps()[0]), self.learning_rate)

    def gradient(self) -> torch.Tensor:
        """Zeros [length + 1] for the next step: backward adds to its views, and the last element is the denominator."""
        slot = self._open_slot()
        slot.zero_()
        return slot

    def step(self, denominator: float, gradient_norm: float) -> None:
        """Publish the divided and clipped gradient, and apply it with the optimiser."""
        self._board.publish(Update(self.number + 1, self.learning_rate, denominator, gradient_norm))
        with self.change():
            self._optimiser.step()

    def take_state(self, publication: Publication) -> int | None:
        """Take over the published state. Returns its number; None if it changed during the copy: this replica then has
        no whole state until the next copy."""
        with self.change():
            state = publication.copy_state(self._board.host_vectors)
            if state is not None:
                self._board.upload_state()
                self._board.take_over(state.number)
                self._set_steps(state.steps)
                self.learning_rate = state.learning_rate
        return state.number if state is not None and state.checksum == self.checksum else None

    def take_update(self, publication: Publication, number: int) -> bool:
        """Make the published step to state `number`; returns False if it does not exist yet. Raises `OverrunError`,
        with the state unchanged."""
        self._open_slot()
        update = publication.copy_update(number, self._board.host_slot(number))
        if update is None:
            return False
        self._board.upload_slot(number)
        self.learning_rate = update.learning_rate
        self.step(update.denominator, update.gradient_norm)
        return True

    def keep(self) -> Kept:
        return Kept([vector.to("cpu", copy=True) for vector in self._board.vectors], self._board.steps)

    def put_back(self, kept: Kept) -> None:
        with self.change():
            for vector, saved in zip(self._board.vectors, kept.vectors, strict=True):
                vector.copy_(saved)
            self._set_steps(kept.steps)

    def _open_slot(self) -> torch.Tensor:
        """The slot for the next update; every gradient becomes a view of it."""
        index = self._board.open_slot()
        for name, view in self._gradients[index].items():
            self._parameters[name].grad = view
        return self._board.slots[index]

    def _steps(self) -> list[torch.Tensor]:
        return [self._optimiser.state[parameter]["step"] for parameter in self._parameters.values()]

    def _set_steps(self, steps: int) -> None:
        for tensor in self._steps():
            tensor.fill_(steps)


class BehindError(RuntimeError):
    """The core's state changes too fast for this replica to copy."""


class SilentError(RuntimeError):
    """The core has been in a change for too long, so it hangs or has ended."""


class Follower:
    """A joiner on its way to a core's state, at its own pace while the core steps. It holds exactly state `number` of
    the core, or knows that it holds none: one snapshot, then the later updates, each once and in order. A new snapshot
    replaces a missed update, a bounded number of times."""

    def __init__(self, publication: Publication, state: TrainState) -> None:
        self._publication, self._state = publication, state
        self._snapshots = 0  # since the last time there was nothing left to do
        self._changing_since: float | None = None  # when the core was first seen in the change that it is in
        self.number: int | None = None  # of the core's state that is held

    def advance(self) -> None:
        """Follow until nothing more is published, or the core is in the middle of a change that has to end first.
        Raises `BehindError`, `SilentError`, `UnreachableError`."""
        while True:
            if self.number is None:
                if not self._at_rest():
                    return
                self._take_snapshot()
            elif not self._take_update(self.number + 1):
                break
        self._snapshots = 0

    def _at_rest(self) -> bool:
        """Whether there is a state to copy now. If not, no copy counts as overtaken."""
        if self._publication.at_rest():
            self._changing_since = None
            return True
        now = time.monotonic()
        if self._changing_since is None:
            self._changing_since = now
        if now - self._changing_since >= SILENT_SECONDS + 4 * self._state.size / OFF_GPU:
            raise SilentError("the core replica did not finish a change of its state")
        return False

    def _take_snapshot(self) -> None:
        if self._snapshots == SNAPSHOTS:
            raise BehindError(
                f"{SNAPSHOTS} copies of the core's state in a row were overtaken by its steps: each was torn, or more"
                " steps followed than the ring of gradients keeps"
            )
        self._snapshots += 1
        self.number = self._state.take_state(self._publication)

    def _take_update(self, number: int) -> bool:
        """Whether more remains: an update was applied, or missed."""
        try:
            if not self._state.take_update(self._publication, number):
                return False
            self.number = number
        except OverrunError:
            self.number = None
        return True
