"""A replica's publication in shared memory: its state, and the last few updates, each with its gradient.

Invariant: a copy is whole or refused. Reading is one-way: the owner does not know its readers, and never waits.

The state is under a sequence lock: the sequence is odd during a change and even while the state is whole, and a change
adds two. State `number` is the result of the number-th change since the start. A replica that takes over another's
state continues from the number of this state. So all processes of a replica have equal numbers. The lock relies on the
store order of x86. On a machine that reorders stores, the checksum of the parameters still shows a torn copy.

Updates lie in a ring of slots. A slot has the number of the state to which its gradient leads, but only while it holds
exactly the optimiser's input: summed over all replicas, divided and clipped. The number is removed before anything is
written into the slot. Gradients are accumulated in the slot and exchanged in place, so publishing costs a few stores.
"""

from __future__ import annotations

import contextlib
import mmap
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

from libra.backends.transport.shared_memory import LayoutError, Vector, attach, device_hash, make_memory, round_up
from libra.backends.transport.trainer_messages import StatePlace

if TYPE_CHECKING:
    import torch

PARAMETERS, FIRST_MOMENT, SECOND_MOMENT = range(3)  # the vectors of a state
SLOTS = 4  # one is being filled, so a reader may be three updates late; copying a state takes less than one step
OFF_GPU = 1e9  # bytes per second, at least, at which a core on a GPU copies a vector to where joiners read it
_NONE = -1  # number of a slot without a whole update

_SLOT = [("number", "<i8"), ("learning_rate", "<f8"), ("denominator", "<f8"), ("gradient_norm", "<f8")]
_HEADER = np.dtype(
    [
        ("sequence", "<i8"),
        ("checksum", "<i8"),
        ("steps", "<i8"),
        ("learning_rate", "<f8"),
        ("signature", "<i8"),
        ("slots", _SLOT, (SLOTS,)),
    ]
)

_PAUSE = 0.001  # seconds between two checks of a state that is being changed
_LOOKS = 30  # checks in sequence, after which a reader must handle its own orders


class OverrunError(RuntimeError):
    """The requested update was overwritten, so the joiner needs a new copy of the state."""


class UnreachableError(RuntimeError):
    """The core, or the connection to it, is lost."""


class Shape(msgspec.Struct, frozen=True):
    """Shape of a publication: vectors of `length` numbers of `dtype`. `signature` identifies their flat layout."""

    length: int
    dtype: str
    signature: int

    @property
    def stride(self) -> int:
        """Bytes from one vector to the next. A slot's vector has one more number, the loss denominator, which is
        exchanged with the gradient."""
        return round_up((self.length + 1) * np.dtype(self.dtype).itemsize, mmap.PAGESIZE)

    @property
    def size(self) -> int:
        """Bytes of the shared memory."""
        return mmap.PAGESIZE + (3 + SLOTS) * self.stride


class State(msgspec.Struct, frozen=True, tag=True):
    """A copied state without its vectors."""

    number: int
    checksum: int
    steps: int  # optimiser steps
    learning_rate: float


class Update(msgspec.Struct, frozen=True, tag=True):
    """The update to state `number` without its gradient."""

    number: int
    learning_rate: float
    denominator: float  # divisor of the summed gradients
    gradient_norm: float  # before clipping


class Publication(Protocol):
    """A joiner's access to a core. All methods may raise `UnreachableError`."""

    def at_rest(self) -> bool:
        """Whether the state is whole. Waits some hundredths of a second for a change to end."""

    def copy_state(self, into: Sequence[Vector]) -> State | None:
        """Fill three vectors with the state. Returns None if the state changed meanwhile: the vectors then contain
        parts of several states."""

    def copy_update(self, number: int, into: Vector) -> Update | None:
        """Fill a flat gradient with the update to state `number`. Returns None if the update does not exist yet. Raises
        `OverrunError` if it is gone, or was overwritten meanwhile."""


class _Map:
    """One mapping of the memory: a header page, the vectors of the state, the vectors of the slots."""

    def __init__(self, memory: mmap.mmap, shape: Shape) -> None:
        header = np.frombuffer(memory, _HEADER, 1)
        self._header, self._slots = header, header["slots"][0]
        self._sequence, self._numbers = header["sequence"], self._slots["number"]
        starts = range(mmap.PAGESIZE, shape.size, shape.stride)
        vectors: list[Vector] = [np.frombuffer(memory, shape.dtype, shape.length + 1, start) for start in starts]
        self._vectors, self._gradients = [vector[:-1] for vector in vectors[:3]], vectors[3:]


class StateBoard(_Map):
    """The owner's side of a publication. `vectors` are tensors [length], `slots` tensors [length + 1]."""

    def __init__(self, shape: Shape) -> None:
        import torch  # here, since a reader needs no torch

        self.descriptor, self._memory = make_memory(self, "libra-state", shape.size)
        super().__init__(self._memory, shape)
        self._header["signature"] = shape.signature
        self.vectors = [torch.from_numpy(vector) for vector in self._vectors]
        self.slots = [torch.from_numpy(gradient) for gradient in self._gradients]
        self.forget_updates()

    @property
    def number(self) -> int:
        """The number of the newest whole state."""
        return int(self._sequence[0]) // 2

    @property
    def checksum(self) -> int:
        """CRC-32 of the parameters: equal on replicas that agree to the last bit."""
        return int(self._header["checksum"][0])

    @property
    def steps(self) -> int:
        """Optimiser steps that the moments contain."""
        return int(self._header["steps"][0])

    def describe(self, steps: int, learning_rate: float) -> None:
        """Set the steps of the state that is being changed, and the `learning_rate` of its last step."""
        self._header["steps"], self._header["learning_rate"] = steps, learning_rate

    def take_over(self, number: int) -> None:
        """Have the change in progress lead to state `number` of another replica. No slot here leads to that state."""
        self._sequence[0] = 2 * number - 1
        self.forget_updates()

    @contextlib.contextmanager
    def change(self) -> Iterator[None]:
        """Context for every change of the state. If it ends with an error, the state stays marked as changing until a
        later change succeeds."""
        self._sequence[0] |= 1
        yield
        self._header["checksum"] = zlib.crc32(self._vectors[PARAMETERS].view(np.uint8).data)
        self._sequence[0] += 1

    def open_slot(self) -> int:
        """Clear the slot for the next update; returns its index in `slots`."""
        index = (self.number + 1) % SLOTS
        self._numbers[index] = _NONE
        return index

    def forget_updates(self) -> None:
        self._numbers[:] = _NONE

    def publish(self, update: Update) -> None:
        """Mark the slot as containing this update."""
        slot = self._slots[update.number % SLOTS : update.number % SLOTS + 1]
        slot["learning_rate"], slot["denominator"] = update.learning_rate, update.denominator
        slot["gradient_norm"] = update.gradient_norm
        slot["number"] = update.number  # last, since it makes the slot valid

    def mirror(self, mirrored: bool) -> None:
        """Start or stop copying to shared memory for a joiner. Does nothing in this class, since the state is always in
        shared memory."""

    @property
    def host_vectors(self) -> list[Vector]:
        """Memory for a state of another replica, which `upload_state` then makes the state of this replica."""
        return self._vectors

    def upload_state(self) -> None:
        pass

    def host_slot(self, number: int) -> Vector:
        """Memory for another replica's gradient to state `number`, which `upload_slot` then puts into its slot."""
        return self._gradients[number % SLOTS][:-1]

    def upload_slot(self, number: int) -> None:
        pass


class DeviceBoard(StateBoard):
    """The owner's side if its state is on a GPU. Shared memory has a copy only during a join: after `mirror(True)`,
    every change and every update is copied there. Before, the state there looks as if a change were in progress. One
    slot on the GPU is enough, since an update is copied out before the next one is made."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        import torch

        super().__init__(shape)
        dtype = self.vectors[0].dtype
        self._host, self._host_slots = self.vectors, self.slots
        self.vectors = [torch.zeros(shape.length, dtype=dtype, device=device) for _ in range(3)]
        self.slots = [torch.zeros(shape.length + 1, dtype=dtype, device=device)]
        self._mirrored, self._made = False, 0

    @property
    def number(self) -> int:
        return self._made

    def take_over(self, number: int) -> None:
        super().take_over(number)
        self._made = number - 1

    @contextlib.contextmanager
    def change(self) -> Iterator[None]:
        self._sequence[0] = 2 * self._made + 1
        yield
        self._header["checksum"] = device_hash(self.vectors[PARAMETERS]) >> 1  # 63 bits, for the signed field
        self._made += 1
        self._show()

    def open_slot(self) -> int:
        super().open_slot()
        return 0

    def publish(self, update: Update) -> None:
        if self._mirrored:
            self._host_slots[update.number % SLOTS].copy_(self.slots[0])
            super().publish(update)

    def mirror(self, mirrored: bool) -> None:
        changed, self._mirrored = mirrored != self._mirrored, mirrored
        if mirrored and changed:
            self._show()
        elif not mirrored:
            self.forget_updates()
            self._sequence[0] = 2 * self._made + 1
            self._memory.madvise(mmap.MADV_REMOVE, mmap.PAGESIZE)  # frees everything after the header

    def upload_state(self) -> None:
        for here, host in zip(self.vectors, self._host, strict=True):
            here.copy_(host)

    def upload_slot(self, number: int) -> None:
        self.slots[0].copy_(self._host_slots[number % SLOTS])

    def _show(self) -> None:
        if self._mirrored:
            for here, host in zip(self.vectors, self._host, strict=True):
                host.copy_(here)
            self._sequence[0] = 2 * self._made
        else:
            self._sequence[0] = 2 * self._made + 1


def make_board(shape: Shape, device: torch.device) -> StateBoard:
    """The board for a state on `device`."""
    return StateBoard(shape) if device.type == "cpu" else DeviceBoard(shape, device)


class SharedPublication(_Map):
    """The publication of a process on the same machine. A reader that copies by itself calls `holds_state` or
    `holds_update` afterwards, to check that its copy is whole."""

    def __init__(self, place: StatePlace, shape: Shape) -> None:
        """Raises `LayoutError`, and `OSError` if the process has ended."""
        try:
            super().__init__(attach(place.pid, place.descriptor, shape.size), shape)
        except LayoutError as error:
            raise LayoutError(f"{error}: all replicas must train the same model in the same precision") from None
        if self._header["signature"] != shape.signature:
            raise LayoutError(f"process {place.pid} trains another model: all replicas must start from the same model")

    def at_rest(self) -> bool:
        for _ in range(_LOOKS):
            if self._sequence[0] % 2 == 0:
                return True
            _wait()
        return False

    def state(self) -> State | None:
        """The state without its vectors; None during a change. A reader calls this first, copies the vectors, and then
        checks `holds_state`."""
        sequence = int(self._sequence[0])
        if sequence % 2:
            return None
        return State(sequence // 2, *self._header[0].item()[1:4])

    @property
    def vectors(self) -> list[Vector]:
        """The vectors of the state."""
        return self._vectors

    def holds_state(self, number: int) -> bool:
        return bool(self._sequence[0] == 2 * number)

    def copy_state(self, into: Sequence[Vector]) -> State | None:
        state = self.state()
        if state is None:
            return None
        for source, target in zip(self.vectors, into, strict=True):
            _copy(source, target)
        return state if self.holds_state(state.number) else None

    def update(self, number: int) -> Update | None:
        """The update without its gradient, to be read before the gradient; None if it does not exist yet. Raises
        `OverrunError`."""
        # This check comes first, since an update is published before its state is reached.
        reached = self._sequence[0] // 2 >= number
        if self.holds_update(number):
            slot = self._slots[number % SLOTS]
            return Update(
                number, float(slot["learning_rate"]), float(slot["denominator"]), float(slot["gradient_norm"])
            )
        if reached:
            raise OverrunError(f"the update to state {number} is gone; {SLOTS - 1} are kept")
        return None

    def gradient(self, number: int) -> Vector:
        """The gradient in the slot of update `number`, without a check that the slot has this update."""
        return self._gradients[number % SLOTS][:-1]

    def holds_update(self, number: int) -> bool:
        return bool(self._numbers[number % SLOTS] == number)

    def copy_update(self, number: int, into: Vector) -> Update | None:
        update = self.update(number)
        if update is None:
            return None
        _copy(self.gradient(number), into)
        if not self.holds_update(number):
            raise overwritten(number)
        return update


def overwritten(number: int) -> OverrunError:
    return OverrunError(f"the update to state {number} was overwritten while it was copied")


def _copy(source: Vector, target: Vector) -> None:
    np.copyto(target, source)


def _wait() -> None:
    time.sleep(_PAUSE)
