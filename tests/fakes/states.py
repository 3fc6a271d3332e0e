"""Train states of a model so small that a step takes no time, and the ways in which a joiner reads a core.

A core is read in memory that both share, or through a relay. The relay serves on a thread here, so that a test can let
the core act in the middle of what it copies: meanwhile the joiner waits.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Thread
from typing import Literal

import pytest
import torch

import libra.backends.grpo.publication
import libra.backends.grpo.relay
from libra.backends.grpo.publication import Publication, SharedPublication
from libra.backends.grpo.relay import await_reader, serve
from libra.backends.grpo.train_state import TrainState
from libra.backends.transport.shared_memory import Vector
from libra.backends.transport.trainer_messages import RelayPlace

RATE = 0.01
SHAPES = ((3, 5), (5,), (2, 2))


def parameters(seed: int = 0, shapes: tuple[tuple[int, ...], ...] = SHAPES) -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {f"p{i}": torch.nn.Parameter(torch.randn(s, generator=generator)) for i, s in enumerate(shapes)}


def make_state(seed: int = 0) -> TrainState:
    made = parameters(seed)
    return TrainState(made, torch.optim.AdamW(made.values(), lr=RATE))


def gradient(number: int, length: int) -> torch.Tensor:
    """Of the step to state `number`."""
    return torch.randn(length, generator=torch.Generator().manual_seed(1000 + number))


def step(state: TrainState, rate: float = RATE) -> None:
    """One step with the gradient that belongs to the next state."""
    slot = state.gradient()
    for view in [p.grad for p in state._parameters.values()]:
        view += gradient(state.number + 1, view.numel()).view(view.shape)
    state.learning_rate = rate
    state.step(denominator=3.0, gradient_norm=float(slot.norm()))


def vectors(state: TrainState) -> list[torch.Tensor]:
    """A copy of everything that makes up the state."""
    return [*(vector.clone() for vector in state._board.vectors), torch.tensor(state._steps())]


Way = Literal["shared", "relayed"]
WAYS: list[Way] = ["shared", "relayed"]

HOST = "127.0.0.2"  # another address of this machine stands for another node
TOKEN = "0123456789abcdef" * 2
PATIENCE = 20.0  # seconds after which a test that would hang fails


@contextmanager
def reading(way: Way, core: TrainState, joiner: TrainState) -> Iterator[Publication]:
    """What the core publishes, as the joiner reads it."""
    if way == "shared":
        yield joiner.publication_at(core.place)
        return
    with socket.create_server((HOST, 0)) as listener:
        thread = Thread(target=_relay, args=(listener, core), daemon=True)
        thread.start()
        publication = joiner.publication_at(RelayPlace(HOST, listener.getsockname()[1], TOKEN))
        yield publication
        publication._stream.close()  # type: ignore[attr-defined]
        thread.join(PATIENCE)
        assert not thread.is_alive()


def around_copies(patch: pytest.MonkeyPatch, act: Callable[[bool], object]) -> None:
    """Let the core act before, in the middle of and after whatever is copied; it is told whether that is a gradient."""
    kind = {"gradient": False}
    state, gradient = SharedPublication.state, SharedPublication.gradient

    def copy(source: Vector, target: Vector) -> None:
        half = len(source) // 2
        act(kind["gradient"])
        target[:half] = source[:half]
        act(kind["gradient"])
        target[half:] = source[half:]
        act(kind["gradient"])

    def piece(data: memoryview) -> bytes:
        half = len(data) // 2
        act(kind["gradient"])
        first = bytes(data[:half])
        act(kind["gradient"])
        second = bytes(data[half:])
        act(kind["gradient"])
        return first + second

    def seen_state(publication: SharedPublication) -> object:
        kind["gradient"] = False
        return state(publication)

    def seen_gradient(publication: SharedPublication, number: int) -> Vector:
        kind["gradient"] = True
        return gradient(publication, number)

    patch.setattr(libra.backends.grpo.publication, "_copy", copy)
    patch.setattr(libra.backends.grpo.relay, "_copy", piece)
    patch.setattr(SharedPublication, "state", seen_state)
    patch.setattr(SharedPublication, "gradient", seen_gradient)


def before_copies(patch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Let the core act whenever a vector is about to be copied. (A vector of these states is one piece.)"""

    def copy(source: Vector, target: Vector) -> None:
        act()
        target[:] = source

    def piece(data: memoryview) -> bytes:
        act()
        return bytes(data)

    patch.setattr(libra.backends.grpo.publication, "_copy", copy)
    patch.setattr(libra.backends.grpo.relay, "_copy", piece)


def _relay(listener: socket.socket, core: TrainState) -> None:
    publication = SharedPublication(core.place, core.shape)
    stream = await_reader(listener, TOKEN, core.shape, PATIENCE)
    with suppress(ConnectionResetError):
        serve(stream, publication)
    stream.close()
