"""Train states of a model so small that a step takes no time."""

from __future__ import annotations

import torch

from libra.backends.grpo.train_state import TrainState

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
