"""The decoupled objective: one case in numbers, then what must hold of all."""

from __future__ import annotations

from math import log

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.backends.grpo.grpo import (
    BEHAVIOUR_WEIGHT_CAP,
    collate,
    denominator,
    group_advantages,
    loss_sum,
    made_up_sample,
)
from libra.backends.grpo.logprobs import chosen_logprobs
from libra.backends.transport.messages import Denominator
from libra.backends.transport.trainer_messages import TokenSums

KINDS: tuple[Denominator, ...] = ("tokens", "sequences", "constant")
CLIP = (0.8, 1.28)
Rows = list[list[float]]


@pytest.mark.parametrize(
    ("rewards", "wanted"),
    [
        ([1.0, 0.0, 0.0, 1.0], [0.9998, -0.9998, -0.9998, 0.9998]),  # spread 1/2: +-0.5 / 0.5001
        ([3.0, 0.0, 0.0], [1.414114, -0.707057, -0.707057]),  # mean 1, spread sqrt(2): 2 / 1.414314
        ([0.0, 0.0], None),
        ([0.1, 0.1, 0.1], None),
    ],
)
def test_group_advantages(rewards: list[float], wanted: list[float] | None) -> None:
    advantages = group_advantages(rewards)
    assert advantages == (None if wanted is None else pytest.approx(wanted, abs=1e-6))


@pytest.mark.parametrize(("kind", "wanted"), [("tokens", 50.0), ("sequences", 4.0), ("constant", 48.0)])
def test_denominator(kind: Denominator, wanted: float) -> None:
    assert denominator(kind, sequences=4, tokens=50, constant=12.0) == wanted
    halves = [denominator(kind, sequences, tokens, 12.0) for sequences, tokens in ((1, 41), (3, 9))]
    assert sum(halves) == wanted


# Two samples of three tokens. `ratio` is pi / pi_prox, `stale` is pi_prox / mu. The last token of the second sample was
# written by a tool: its numbers must not matter.
#
#   sample 1, A = 2:   ratio  1.5     min(3, 2.56)     = 2.56 (clipped)  weight 1.25               3.2
#                             0.5     min(1, 1.6)      = 1               weight min(4, 2) = 2      2.0
#                             1.1     min(2.2, 2.2)    = 2.2             weight 0.5                1.1    sum  6.3
#   sample 2, A = -1:  ratio  0.5     min(-0.5, -0.8)  = -0.8 (clipped)  weight 1                 -0.8
#                             1.5     min(-1.5, -1.28) = -1.5            weight 0.8               -1.2    sum -2.0
RATIO = [[1.5, 0.5, 1.1], [0.5, 1.5, 99.0]]
STALE = [[1.25, 4.0, 0.5], [1.0, 0.8, 99.0]]
MASK = [[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]]
ADVANTAGES = [[2.0], [-1.0]]
BEHAVIOUR = [[-1.0, -2.0, -0.5], [-0.25, -3.0, -0.1]]


def tensor(rows: Rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
@pytest.mark.parametrize(
    ("kind", "loss", "length"),
    [
        ("tokens", -4.3, [1.0, 1.0]),
        ("constant", -4.3, [1.0, 1.0]),
        ("sequences", -1.1, [3.0, 2.0]),  # -(6.3 / 3 - 2 / 2)
    ],
)
def test_the_case_worked_out_by_hand(kind: Denominator, loss: float, length: list[float]) -> None:
    behaviour = tensor(BEHAVIOUR)
    prox = behaviour + tensor(STALE).log()
    logprobs = prox + tensor(RATIO).log()
    for leaf in (logprobs, prox, behaviour):
        leaf.requires_grad_()
    computed, sums = loss_sum(logprobs, prox, behaviour, tensor(ADVANTAGES), tensor(MASK), CLIP, kind)
    assert float(computed) == pytest.approx(loss)
    assert (sums.forward_tokens, sums.generated_tokens) == (8, 5)
    assert sums.clipped == 4
    assert sums.behaviour_weight == pytest.approx(1.25 + 2.0 + 0.5 + 1.0 + 0.8)
    assert sums.prox_gap == pytest.approx(log(1.25) + log(4.0) + log(2.0) - log(0.8))
    # d loss / d log pi is -weight * A * ratio where the unclipped side is the smaller one, and nothing elsewhere.
    computed.backward()
    by_hand = [[0.0, -2.0 * 2.0 * 0.5, -0.5 * 2.0 * 1.1], [0.0, 0.8 * 1.5, 0.0]]
    wanted = [[value / own for value in row] for row, own in zip(by_hand, length, strict=True)]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [pytest.approx(row) for row in wanted]
    assert prox.grad is None
    assert behaviour.grad is None


def test_one_step_per_batch_pushes_by_the_truncated_weight() -> None:
    """As the trainer calls it: the proximal policy is the policy itself, so all that acts is the weight."""
    behaviour = tensor([[-2.0, -1.0, -1.0]])
    logprobs = tensor([[-1.0, -1.0, -2.0]]).requires_grad_()
    loss, sums = loss_sum(logprobs, logprobs.detach(), behaviour, tensor([[1.0]]), tensor([[1.0] * 3]), CLIP, "tokens")
    loss.backward()
    weights = [BEHAVIOUR_WEIGHT_CAP, 1.0, pytest.approx(0.36787944)]  # min(e, 2), 1, 1 / e
    assert [-gradient for gradient in logprobs.grad[0].tolist()] == weights  # type: ignore[index]
    assert (sums.clipped, sums.prox_gap) == (0.0, 2.0)


def test_no_gradient_through_the_weight_even_where_prox_is_the_policy_itself() -> None:
    behaviour = tensor([[-1.5, -1.0]])
    logprobs = tensor([[-1.0, -1.25]]).requires_grad_()
    loss_sum(logprobs, logprobs, behaviour, tensor([[3.0]]), tensor([[1.0, 1.0]]), CLIP, "tokens")[0].backward()
    weights = (logprobs.detach() - behaviour).exp()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [pytest.approx(row) for row in (-3.0 * weights).tolist()]


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[torch.Tensor], int]:
    """log-probs, prox, behaviour, advantages and mask of a few samples, and where to split them in two."""
    samples, tokens = draw(st.integers(2, 5)), draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    drift = draw(st.sampled_from([0.0, 0.1, 1.0]))

    def noise(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    behaviour = -noise(samples, tokens).abs()
    prox = behaviour + drift * noise(samples, tokens)
    logprobs = prox + drift * noise(samples, tokens)
    mask = (noise(samples, tokens) > -0.5).double()
    return [logprobs, prox, behaviour, noise(samples, 1), mask], draw(st.integers(1, samples - 1))


@settings(deadline=None)
@given(batches(), st.sampled_from(KINDS))
def test_sums_over_micro_batches_are_the_sum_over_the_batch(
    batch: tuple[list[torch.Tensor], int], kind: Denominator
) -> None:
    tensors, split = batch

    def computed(part: slice) -> tuple[float, TokenSums, torch.Tensor]:
        logprobs, prox, behaviour, advantages, mask = (tensor[part].clone() for tensor in tensors)
        # A micro-batch is padded only to its own longest sample.
        used = int(mask.amax(dim=0).nonzero().max()) + 1 if mask.any() else 1
        logprobs.requires_grad_()
        cut = [tensor[:, :used] for tensor in (logprobs, prox, behaviour)]
        loss, sums = loss_sum(*cut, advantages, mask[:, :used], CLIP, kind)
        loss.backward()
        assert logprobs.grad is not None
        return float(loss), sums, logprobs.grad

    loss, whole, gradient = computed(slice(None))
    parts = [computed(slice(0, split)), computed(slice(split, None))]
    assert torch.allclose(torch.cat([part for _, _, part in parts]), gradient)
    assert sum(part for part, _, _ in parts) == pytest.approx(loss, abs=1e-9)
    total = sum((sums for _, sums, _ in parts), TokenSums())
    assert (total.generated_tokens, total.clipped) == (whole.generated_tokens, whole.clipped)
    assert (total.behaviour_weight, total.prox_gap) == (
        pytest.approx(whole.behaviour_weight, abs=1e-9),
        pytest.approx(whole.prox_gap, abs=1e-9),
    )


@pytest.mark.parametrize("tokens", [8, 70])
def test_logits_by_the_chunk_give_the_same_log_probs_and_gradients(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("libra.backends.grpo.logprobs.LOGIT_CHUNK", 16)
    generator = torch.Generator().manual_seed(1)
    chosen = torch.randint(0, 11, (2, tokens), generator=generator)
    made = []
    for chunked in (True, False):
        given = torch.randn(2, tokens + 1, 11, generator=torch.Generator().manual_seed(2)).bfloat16().requires_grad_()
        logits = given * 1  # made by the model, as they are in training
        if chunked:
            found = chosen_logprobs(logits, chosen, 0.7, torch.float32)
        else:
            found = torch.log_softmax(logits[:, :-1].float() / 0.7, -1).gather(2, chosen[..., None])[..., 0]
        (found * torch.arange(2 * tokens).view(2, tokens)).sum().backward()
        assert given.grad is not None
        made.append((found.detach(), given.grad))
    for one, other in zip(*made, strict=True):
        assert torch.equal(one, other)


def test_a_batch_is_made_on_the_device() -> None:
    assert {tensor.device.type for tensor in collate([made_up_sample(0, 5)], "meta")} == {"meta"}
