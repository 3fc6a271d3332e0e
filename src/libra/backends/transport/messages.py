"""The base of all messages between the controller and its workers, and the messages of every kind of worker.

Invariant: every message is a small typed struct that `msgspec` checks on arrival; nothing is ever unpickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

Precision = Literal["bf16", "fp32", "fp64"]  # of a trainer's arithmetic; bf16 is autocast over float32 parameters
Dtype = Literal["bfloat16", "float32"]  # of engines, and of the weights published for them
DTYPE_BYTES: Mapping[Dtype, int] = {"bfloat16": 2, "float32": 4}
Denominator = Literal["tokens", "sequences", "constant"]  # of the loss; see `grpo.denominator`
DeviceKind = Literal["cpu", "cuda"]
Sharding = Literal["none", "fsdp2"]  # of parameters, moments and gradients among the processes of one replica


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages; the tag on the wire is the class name."""


class Tensor(msgspec.Struct, frozen=True):
    """Place of one weight in the shared buffer: elements of `dtype`, starting at byte `offset`."""

    name: str
    shape: tuple[int, ...]
    offset: int
    dtype: Dtype


class Stop(Message, frozen=True):
    pass


class Ready(Message, frozen=True):
    """The worker has started in its role. Trainers set `layout` and `buffer_bytes`."""

    seconds: float
    layout: tuple[Tensor, ...] = ()
    buffer_bytes: int = 0


class Acknowledged(Message, frozen=True):
    """The answer to orders that return nothing, such as Discard, Prepare, SaveCheckpoint, LoadCheckpoint and Stop."""


class Failure(Message, frozen=True):
    """The worker could not carry out an order."""

    error: str
