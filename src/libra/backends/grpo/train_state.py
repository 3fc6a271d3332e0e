"""State that training changes: parameters, AdamW moments and gradients, on a board. A joiner copies a core's state.

Invariant: model and optimiser only see views of the board's memory, and every change is made in place and marked as a
change. So the board always has the current state, and publishing it needs no copy.
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

SNAPSHOTS = 3  # without reaching the core; the core is then faster than this replica, and must pause for it
SILENT_SECONDS = 30.0  # longest time of one change; an optimiser step takes seconds at most


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """All parameters of a model as one vector: the shapes by name in the vector's order, and the start of each tensor,
    in elements. Every tensor starts on a cache line. The gaps are zero and stay zero, so sums, copies and checksums of
    the vector are those of its tensors."""

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
        """The tensors by name, as views of a vector with at least `length` elements."""
        return {
            name: vector[self.offsets[name] : self.offsets[name] + prod(shape)].view(shape)
            for name, shape in self.shapes.items()
        }

    def signature(self) -> int:
        """A number that identifies the layout."""
        return zlib.crc32(repr((list(self.shapes.items()), self.length)).encode())


@dataclass(frozen=True, slots=True)
class Kept:
    """A copy of the whole state in the host's memory, from which it can be restored."""

    vectors: list[torch.Tensor]
    steps: int


class TrainState:
    """The parameters of a model by name, and the AdamW optimiser that steps them."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], optimiser: torch.optim.AdamW) -> None:
        """Move the parameters onto a board, with their values. The optimiser must not have stepped yet."""
        first = next(iter(parameters.values()))
        self._parameters, self._optimiser = dict(parameters), optimiser
        (self._group,) = optimiser.param_groups
        shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        self._flat = FlatLayout.of(shapes, first.element_size())
        # Equal for replicas with the same model and precision.
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
        """The largest magnitude of a parameter; NaN if one is not a number."""
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
        """The publication of another replica with the same model. Raises `LayoutError`, and `OSError` if the replica is
        lost."""
        match place:
            case StatePlace():
                return SharedPublication(place, self.shape)
            case RelayPlace():
                return RemotePublication(place, self.shape)

    def mirror(self, mirrored: bool) -> None:
        """Start or stop copying the state to where joiners read it. A state that is not on a GPU is always there."""
        self._board.mirror(mirrored)

    def optimiser_tensors(self) -> dict[str, torch.Tensor]:
        """Step count and moments, named `<parameter>/<key>`."""
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
        """Zeros [length + 1] for the next step. Backward adds to its views; the last element is the denominator."""
        slot = self._open_slot()
        slot.zero_()
        return slot

    def step(self, denominator: float, gradient_norm: float) -> None:
        """Publish the divided and clipped gradient, and step the optimiser with it."""
        self._board.publish(Update(self.number + 1, self.learning_rate, denominator, gradient_norm))
        with self.change():
            self._optimiser.step()

    def take_state(self, publication: Publication) -> int | None:
        """Copy the published state into this one. Returns its number, or None if it changed during the copy. This
        replica then has no whole state until the next copy."""
        with self.change():
            state = publication.copy_state(self._board.host_vectors)
            if state is not None:
                self._board.upload_state()
                self._board.take_over(state.number)
                self._set_steps(state.steps)
                self.learning_rate = state.learning_rate
        return state.number if state is not None and state.checksum == self.checksum else None

    def take_update(self, publication: Publication, number: int) -> bool:
        """Make the published step to state `number`; returns False if that update does not exist yet. Raises
        `OverrunError` and leaves the state unchanged."""
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
        """The slot for the next update. Makes every gradient a view of it."""
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
    """The core has been changing its state for too long, so it hangs or has ended."""


class Follower:
    """A joiner that follows a core's state, at its own speed while the core steps. It copies one snapshot, then applies
    the later updates, each once and in order. After a missed update it copies a new snapshot, a limited number of
    times. It knows which state of the core it has, or that it has none."""

    def __init__(self, publication: Publication, state: TrainState) -> None:
        self._publication, self._state = publication, state
        self._snapshots = 0  # since it last had the core's newest state
        self._changing_since: float | None = None  # time at which the core's current change was first seen
        self.number: int | None = None  # of the core's state that this replica has; None: none

    def advance(self) -> None:
        """Follow until there is no newer update, or the core is in the middle of a change. Raises `BehindError`,
        `SilentError`, `UnreachableError`."""
        while True:
            if self.number is None:
                if not self._at_rest():
                    return
                self._take_snapshot()
            elif not self._take_update(self.number + 1):
                break
        self._snapshots = 0

    def _at_rest(self) -> bool:
        """Whether a whole state can be copied now. If not, this does not count as a snapshot."""
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
                f"{SNAPSHOTS} copies of the core's state in sequence became outdated: each was torn, or more steps"
                " followed than the ring of gradients keeps"
            )
        self._snapshots += 1
        self.number = self._state.take_state(self._publication)

    def _take_update(self, number: int) -> bool:
        """Take the update to state `number`. Returns whether there may be more to do: it was applied, or missed."""
        try:
            if not self._state.take_update(self._publication, number):
                return False
            self.number = number
        except OverrunError:
            self.number = None
        return True
