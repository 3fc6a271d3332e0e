"""Replicas that share a step against one process that makes it alone."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from pathlib import Path
from typing import cast

import pytest
import torch
from fakes.replicas import (
    BATCH,
    RATE,
    MeanOfMeans,
    at_once,
    commit,
    make_trainer,
    order,
    parameters,
    regroup,
    sample,
    step_together,
    train,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from safetensors.torch import save_file

from libra.backends.grpo.elastic import GradientExchange, PeerLostError
from libra.backends.grpo.grpo import micro_batches
from libra.backends.grpo.trainer import TrainerProcess
from libra.backends.tiny_model import TokenizerCodec
from libra.backends.transport.messages import Denominator
from libra.backends.transport.shared_memory import WeightBuffer
from libra.backends.transport.trainer_messages import Commit, MeasureTraining, Sample, Train, Trained, WarmUp

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS: tuple[Denominator, ...] = ("tokens", "sequences", "constant")
# Two short samples against three long ones: 5 generated tokens against 68, and 2 sequences against 3.
SHARES = [BATCH[:2], BATCH[2:]]


def alone(model: Path, kind: Denominator, batch: list[Sample]) -> tuple[TrainerProcess, Trained]:
    trainer = make_trainer(model, kind)
    return trainer, train(trainer, order(batch))


def shared(
    model: Path, kind: Denominator, shares: list[list[Sample]], exchange: type[GradientExchange] = GradientExchange
) -> tuple[list[TrainerProcess], list[Trained]]:
    """One step of as many replicas as there are shares."""
    replicas = [make_trainer(model, kind) for _ in shares]
    for replica in replicas:
        replica.elastic.exchange = exchange()
    regroup(replicas, 1)
    return replicas, step_together(replicas, shares)


def furthest(one: TrainerProcess, other: TrainerProcess) -> float:
    """The largest difference of a parameter, in steps of the learning rate: AdamW's first step is about one."""
    return float((parameters(one) - parameters(other)).abs().max()) / RATE


def gradients(trainer: TrainerProcess) -> torch.Tensor:
    return torch.cat([cast(torch.Tensor, tensor.grad).reshape(-1) for tensor in trainer.part.parameters.values()])


def rounding(reference: TrainerProcess, fresh: TrainerProcess) -> torch.Tensor:
    """By how much each parameter may differ from the reference's after its step, where the samples' gradients are the
    same and are added up in another order. In whatever precision they were computed, they are added up, and stepped on,
    in float32.

    A sum of n terms is off by at most n half ulps of the sum of their magnitudes. AdamW's first step is
    RATE * g / (|g| + eps), whose slope is eps / (|g| + eps)^2: steep only where the terms all but cancel. What it makes
    of g, and the parameter that it is subtracted from, are each rounded once more: near the 1 of a norm's weight, an
    ulp is 1.2e-4 of a step."""
    magnitudes = torch.zeros_like(parameters(fresh))
    for it in BATCH:
        fresh.reduce(order([it]))
        magnitudes += gradients(fresh).abs()
        fresh.discard()
    fresh.reduce(order(BATCH))
    gradient = gradients(reference).abs()  # divided and clipped
    magnitudes *= gradient.norm() / gradients(fresh).norm()
    fresh.discard()
    ulp, eps = torch.finfo(torch.float32).eps, 1e-8
    error = (len(BATCH) + 2) * ulp * magnitudes  # 2: the division, and the clip
    slope = eps / ((gradient - error).clamp(min=0) + eps) ** 2
    return RATE * (slope * error + 4 * ulp) + 2 * ulp * parameters(reference).abs()


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_the_policy_is_that_of_the_temperature(temperature: float, tiny_model: Path) -> None:
    trainer = make_trainer(tiny_model, precision="fp32", temperature=temperature)
    with torch.no_grad():
        for tensor in trainer.part.parameters.values():
            tensor *= 3  # away from the uniform distribution, which is the same at any temperature

    def scored(heat: float, tokens: list[int]) -> list[float]:
        ids = torch.tensor([tokens])
        logits = trainer.part.model(input_ids=ids, use_cache=False).logits[0, :-1]
        return torch.log_softmax(logits / heat, -1)[torch.arange(len(tokens) - 1), ids[0, 1:]].tolist()

    # Behaviour log-probs of this very policy: nothing lies between it and the one that trains.
    batch = [replace(it, logprobs=[0.0, *scored(temperature, it.tokens)]) for it in BATCH]
    assert trainer.score([it.tokens for it in batch]) == [pytest.approx(it.logprobs[1:], abs=1e-5) for it in batch]
    assert trainer.reduce(order(batch)).sums.prox_gap < 1e-3
    trainer.discard()
    hotter = [replace(it, logprobs=[0.0, *scored(2 * temperature, it.tokens)]) for it in BATCH]
    assert trainer.reduce(order(hotter)).sums.prox_gap > 1.0
    trainer.discard()
    # Demonstrations are not sampled: they are imitated as they are.
    loss = trainer.warm_up(WarmUp([(it.tokens, it.generated) for it in BATCH], 0.0)).loss
    taught = [-x for it in BATCH for x, own in zip(scored(1.0, it.tokens), it.generated[1:], strict=True) if own]
    assert loss == pytest.approx(sum(taught) / len(taught), rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_two_replicas_make_the_step_of_one_process(kind: Denominator, tiny_model: Path) -> None:
    reference, wanted = alone(tiny_model, kind, BATCH)
    replicas, done = shared(tiny_model, kind, SHARES)
    assert done[0].parameter_hash == done[1].parameter_hash
    allowed = rounding(reference, make_trainer(tiny_model, kind))
    assert allowed.median() < 1e-3 * RATE
    for replica, answer in zip(replicas, done, strict=True):
        assert answer.gradient_norm == pytest.approx(wanted.gradient_norm, rel=1e-5)
        assert bool(((parameters(replica) - parameters(reference)).abs() <= allowed).all())
    assert furthest(reference, make_trainer(tiny_model, kind)) > 0.5  # it was a step


@pytest.mark.parametrize("kind", KINDS)
def test_a_mean_of_means_would_fail_the_test_above(kind: Denominator, tiny_model: Path) -> None:
    reference, wanted = alone(tiny_model, kind, BATCH)
    replicas, done = shared(tiny_model, kind, SHARES, exchange=MeanOfMeans)
    assert done[0].parameter_hash == done[1].parameter_hash
    assert done[0].gradient_norm != pytest.approx(wanted.gradient_norm, rel=1e-2)
    allowed = rounding(reference, make_trainer(tiny_model, kind))
    assert bool(((parameters(replicas[0]) - parameters(reference)).abs() > allowed).any())
    assert furthest(replicas[0], reference) > 0.1


def test_the_denominator_may_be_reported_by_one_replica(tiny_model: Path) -> None:
    """As the controller does it, and with a replica that has no sample at all."""
    reference, wanted = alone(tiny_model, "tokens", BATCH)
    replicas = [make_trainer(tiny_model) for _ in range(2)]
    regroup(replicas, 1)
    whole = order(BATCH)
    votes = at_once(lambda: replicas[0].reduce(whole), lambda: replicas[1].reduce(Train(1, [], 0, 0, whole.patience)))
    done = [commit(replica, vote) for replica, vote in zip(replicas, votes, strict=True)]
    assert done[0].parameter_hash == done[1].parameter_hash == wanted.parameter_hash
    assert furthest(replicas[0], reference) == 0


def test_trajectories_without_signal_count_in_the_denominator(tiny_model: Path) -> None:
    few, many = make_trainer(tiny_model), make_trainer(tiny_model)
    norms = [
        train(trainer, Train(1, BATCH[:2], 4, tokens, 1.0)).gradient_norm for trainer, tokens in ((few, 5), (many, 50))
    ]
    assert norms[0] == pytest.approx(10 * norms[1], rel=1e-4)


def test_a_batch_without_signal_changes_nothing_and_says_so(tiny_model: Path) -> None:
    trainer = make_trainer(tiny_model)
    before = trainer.state.checksum
    vote = trainer.reduce(Train(7, [], 4, 50, 1.0))
    assert (vote.version, vote.sums.forward_tokens, vote.sums.generated_tokens) == (7, 0, 0)
    done = commit(trainer, vote, publish_to=1)
    assert (done.version, done.parameter_hash, done.gradient_norm) == (7, before, 0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_do_not_change_the_step(kind: Denominator, tiny_model: Path) -> None:
    """Up to the rounding of bfloat16, which depends on who is padded with whom."""
    single, packed = make_trainer(tiny_model, kind), make_trainer(tiny_model, kind, micro_batch=80)
    wanted, found = single.reduce(order(BATCH)), packed.reduce(order(BATCH))
    assert wanted.sums.forward_tokens == sum(len(s.tokens) for s in BATCH)
    assert found.sums.forward_tokens > wanted.sums.forward_tokens  # it was padded
    assert (found.sums.generated_tokens, found.sums.clipped) == (wanted.sums.generated_tokens, wanted.sums.clipped)
    assert found.sums.behaviour_weight == pytest.approx(wanted.sums.behaviour_weight, rel=0.02)
    norm = commit(packed, found).gradient_norm
    assert norm == pytest.approx(commit(single, wanted).gradient_norm, rel=0.02)


def test_the_gradient_norm_is_that_before_clipping(tiny_model: Path) -> None:
    trainer = make_trainer(tiny_model, "constant")
    loud = [sample(0, 4, 20, 100.0), sample(1, 4, 20, -50.0)]
    assert train(trainer, order(loud)).gradient_norm > 1.0


def test_until_the_verdict_nothing_has_changed(tiny_model: Path) -> None:
    trainer, untouched = make_trainer(tiny_model), make_trainer(tiny_model)
    before, number = trainer.state.checksum, trainer.state.number
    trainer.reduce(order(BATCH[:2], 1))
    assert (trainer.state.checksum, trainer.state.number) == (before, number)
    with pytest.raises(RuntimeError, match="version 1 still awaits its verdict"):
        trainer.reduce(order(BATCH, 1))
    with pytest.raises(RuntimeError, match="no gradient of version 2 awaits a verdict"):
        trainer.commit(Commit(2, -1))
    trainer.discard()
    with pytest.raises(RuntimeError, match="no gradient of version 1"):
        trainer.commit(Commit(1, -1))
    # And nothing of the gradient that was discarded is in the next one.
    assert train(trainer, order(BATCH, 1)).parameter_hash == train(untouched, order(BATCH, 1)).parameter_hash


def test_a_saved_replica_goes_on_as_if_nothing_had_happened(tiny_model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(tiny_model)
    train(trainer, order(BATCH, 1))
    trainer.save(tmp_path / "checkpoint", optimiser=True)
    saved = trainer.state.checksum
    wanted = train(trainer, order(BATCH[:3], 2)).parameter_hash
    for other in (make_trainer(tiny_model, seed=1), make_trainer(tmp_path / "checkpoint", seed=1)):
        other.load(tmp_path / "checkpoint")
        assert other.state.checksum == saved
        assert train(other, order(BATCH[:3], 2)).parameter_hash == wanted
    assert not list((tmp_path / "checkpoint").glob("*.part"))


def test_a_model_saved_without_its_optimiser_is_just_the_model(tiny_model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(tiny_model)
    train(trainer, order(BATCH, 1))
    trainer.save(tmp_path / "model", optimiser=False)
    assert sorted(path.name for path in (tmp_path / "model").glob("*.safetensors")) == ["model.safetensors"]
    assert make_trainer(tmp_path / "model", seed=1).state.checksum == trainer.state.checksum


def test_publishing_writes_the_buffer_that_was_named(tiny_model: Path) -> None:
    trainer = make_trainer(tiny_model)
    checksum = train(trainer, order(BATCH, 1), publish_to=1).checksum
    buffer: WeightBuffer = trainer._buffer
    named = trainer.part.parameters
    for name, tensor in buffer.read(1, trainer.layout, checksum):
        assert torch.equal(tensor, named[name].to(torch.bfloat16)), name
    assert buffer.checksum(0) != checksum
    assert train(trainer, order(BATCH, 2)).checksum == 0


def test_measuring_puts_everything_back(tiny_model: Path) -> None:
    trainer, untouched = make_trainer(tiny_model), make_trainer(tiny_model)
    for t in (trainer, untouched):
        train(t, order(BATCH, 1))
    measured = trainer.measure(MeasureTraining([[6, 9], [12]], 2))
    assert [tokens for tokens, _ in measured.batches] == [15, 12, 15, 12]
    assert trainer.state.checksum == untouched.state.checksum
    assert train(trainer, order(BATCH, 2)).parameter_hash == train(untouched, order(BATCH, 2)).parameter_hash


def test_measuring_that_loses_a_replica_puts_everything_back_and_says_so(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, adds = make_trainer(tiny_model), iter([0.0, 0.0])
    before = trainer.state.checksum

    def all_reduce(tensor: torch.Tensor, seconds: float) -> float:
        for taken in adds:
            return taken
        raise PeerLostError("replica 1 is gone")

    monkeypatch.setattr(trainer.elastic.exchange, "all_reduce", all_reduce)
    assert trainer.measure(MeasureTraining([[6, 9], [12]], 2)).failure == "replica 1 is gone"
    assert trainer.state.checksum == before


def test_warming_up_learns_what_is_demonstrated(tiny_model: Path) -> None:
    trainer = make_trainer(tiny_model)
    tokens = BATCH[0].tokens
    batch = [(tokens, BATCH[0].generated)]
    losses = [trainer.warm_up(WarmUp(batch, 1e-2)).loss for _ in range(8)]
    assert losses[-1] < losses[0] - 0.5


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), max_size=20),
    limit=st.integers(1, 120),
)
def test_micro_batches_cover_every_sample_once_within_the_limit(lengths: list[int], limit: int) -> None:
    samples = [Sample(str(number), [5] * length, [], [], [], 0.0) for number, length in enumerate(lengths)]
    batches = list(micro_batches(samples, limit))
    assert sorted(s.id for batch in batches for s in batch) == sorted(s.id for s in samples)
    for batch in batches:
        assert batch
        assert len(batch) == 1 or len(batch) * max(len(s.tokens) for s in batch) <= limit
    # And no fuller than that: the first of a batch had no room in the one before.
    for batch, following in pairwise(batches):
        assert (len(batch) + 1) * len(following[0].tokens) > limit


def test_the_tokenizer_of_a_tiny_model(tiny_model: Path) -> None:
    codec = TokenizerCodec(tiny_model)
    text = "12+34-5*6/7"
    assert len(codec.encode(text)) == len(text)
    assert codec.decode(codec.encode(text)) == text


@pytest.mark.parametrize(("value", "words"), [(math.nan, "nan"), (math.inf, "inf"), (1e30, "1e\\+30")])
def test_weights_that_are_no_numbers_are_told_and_never_saved(
    tiny_model: Path, tmp_path: Path, value: float, words: str
) -> None:
    trainer = make_trainer(tiny_model)
    assert trainer.diverged() == ""
    with trainer.state.change(), torch.no_grad():
        next(iter(trainer.part.parameters.values())).view(-1)[0] = value
    assert re.search(f"its largest weight is {words}", trainer.diverged())
    with pytest.raises(ValueError, match="the model has diverged: its largest weight is"):
        trainer.save(tmp_path / "saved", optimiser=True)
    assert not (tmp_path / "saved").exists()


def test_a_step_on_a_gradient_that_is_no_number_is_told(tiny_model: Path) -> None:
    trainer = make_trainer(tiny_model)
    damaged = replace(BATCH[0], advantage=math.nan)
    assert train(trainer, order([damaged])).diverged == "the norm of its gradient is nan"
    assert train(make_trainer(tiny_model), order(BATCH)).diverged == ""


def test_the_optimiser_of_a_checkpoint_is_required(tiny_model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(tiny_model)
    trainer.save(tmp_path, optimiser=True)
    trainer.load(tmp_path)
    (tmp_path / "optimizer.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"optimizer\.safetensors"):
        trainer.load(tmp_path)


def test_a_file_that_cannot_be_read_back_as_it_was_written_is_none(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bad_disk(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        save_file({name: tensor + 1 for name, tensor in tensors.items()}, path, metadata)

    monkeypatch.setattr("libra.backends.grpo.model_part.save_file", bad_disk)
    with pytest.raises(OSError, match=r"cannot be read back as it was written; check the disk"):
        make_trainer(tiny_model).save(tmp_path, optimiser=True)
    assert not (tmp_path / "model.safetensors").exists()
