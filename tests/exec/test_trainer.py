"""Replicas that share a step against one process that makes it alone."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from replicas import BATCH, RATE, at_once, free_port, make_trainer, order, parameters, regroup, sample

from libra.exec.elastic import GradientExchange
from libra.exec.grpo import Denominator
from libra.exec.messages import MeasureTraining, Regroup, Sample, Train, Trained, WarmUp
from libra.exec.tiny_model import TokenizerCodec
from libra.exec.trainer import Trainer, micro_batches
from libra.exec.weights import WeightBuffer

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS: tuple[Denominator, ...] = ("tokens", "sequences", "constant")
# Two short samples against three long ones: 5 generated tokens against 68, and 2 sequences against 3.
SHARES = [BATCH[:2], BATCH[2:]]


class MeanOfMeans(GradientExchange):
    """What must not be done: every replica's own mean, averaged with equal weights."""

    def add_up(self, tensors: list[torch.Tensor], denominator: float) -> tuple[float, float]:
        for tensor in tensors:
            tensor /= denominator * self.size
        _, seconds = super().add_up(tensors, 0.0)
        return 1.0, seconds


def alone(model: Path, kind: Denominator, batch: list[Sample]) -> tuple[Trainer, Trained]:
    trainer = make_trainer(model, kind)
    return trainer, trainer.train(order(batch))


def shared(
    model: Path, kind: Denominator, shares: list[list[Sample]], exchange: type[GradientExchange] = GradientExchange
) -> tuple[list[Trainer], list[Trained]]:
    """One step of as many replicas as there are shares."""
    replicas = [make_trainer(model, kind) for _ in shares]
    for replica in replicas:
        replica._exchange = exchange()
    regroup(replicas, 1, free_port())
    first, second = (lambda r=r, s=s: r.train(order(s)) for r, s in zip(replicas, shares, strict=True))
    return replicas, at_once(first, second)


def furthest(one: Trainer, other: Trainer) -> float:
    """The largest difference of a parameter, in steps of the learning rate: AdamW's first step is about one."""
    return float((parameters(one) - parameters(other)).abs().max()) / RATE


@pytest.mark.parametrize("kind", KINDS)
def test_two_replicas_make_the_step_of_one_process(kind: Denominator, tiny_model: Path) -> None:
    reference, wanted = alone(tiny_model, kind, BATCH)
    replicas, done = shared(tiny_model, kind, SHARES)
    assert done[0].parameter_hash == done[1].parameter_hash
    assert [answer.generated_tokens for answer in done] == [5, 68]
    for replica, answer in zip(replicas, done, strict=True):
        assert answer.gradient_norm == pytest.approx(wanted.gradient_norm, rel=1e-5)
        assert furthest(replica, reference) < 1e-4
    assert furthest(reference, make_trainer(tiny_model, kind)) > 0.5  # it was a step


@pytest.mark.parametrize("kind", KINDS)
def test_a_mean_of_means_would_fail_the_test_above(kind: Denominator, tiny_model: Path) -> None:
    reference, wanted = alone(tiny_model, kind, BATCH)
    replicas, done = shared(tiny_model, kind, SHARES, exchange=MeanOfMeans)
    assert done[0].parameter_hash == done[1].parameter_hash
    assert done[0].gradient_norm != pytest.approx(wanted.gradient_norm, rel=1e-2)
    assert furthest(replicas[0], reference) > 0.1


def test_the_denominator_may_be_reported_by_one_replica(tiny_model: Path) -> None:
    """As the controller does it, and with a replica that has no sample at all."""
    reference, wanted = alone(tiny_model, "tokens", BATCH)
    replicas = [make_trainer(tiny_model) for _ in range(2)]
    regroup(replicas, 1, free_port())
    whole = order(BATCH)
    done = at_once(
        lambda: replicas[0].train(Train(1, BATCH, whole.sequences, whole.tokens, -1)),
        lambda: replicas[1].train(Train(1, [], 0, 0, -1)),
    )
    assert done[0].parameter_hash == done[1].parameter_hash == wanted.parameter_hash
    assert furthest(replicas[0], reference) == 0


def test_trajectories_without_signal_count_in_the_denominator(tiny_model: Path) -> None:
    few, many = make_trainer(tiny_model), make_trainer(tiny_model)
    norms = [t.train(Train(1, BATCH[:2], 4, tokens, -1)).gradient_norm for t, tokens in ((few, 5), (many, 50))]
    assert norms[0] == pytest.approx(10 * norms[1], rel=1e-4)


def test_a_batch_without_signal_changes_nothing_and_says_so(tiny_model: Path) -> None:
    trainer = make_trainer(tiny_model)
    before = trainer.parameter_hash()
    done = trainer.train(Train(7, [], 4, 50, 1))
    assert (done.version, done.parameter_hash, done.gradient_norm) == (7, before, 0.0)
    assert (done.forward_tokens, done.generated_tokens) == (0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_do_not_change_the_step(kind: Denominator, tiny_model: Path) -> None:
    """Up to the rounding of bfloat16, which depends on who is padded with whom."""
    _, wanted = alone(tiny_model, kind, BATCH)
    done = make_trainer(tiny_model, kind, micro_batch=80).train(order(BATCH))
    assert done.forward_tokens > sum(len(s.tokens) for s in BATCH)  # it was padded
    assert done.gradient_norm == pytest.approx(wanted.gradient_norm, rel=0.02)
    assert (done.generated_tokens, done.clipped) == (wanted.generated_tokens, wanted.clipped)
    assert done.behaviour_weight == pytest.approx(wanted.behaviour_weight, rel=0.02)


def test_the_gradient_norm_is_that_before_clipping(tiny_model: Path) -> None:
    trainer = make_trainer(tiny_model, "constant")
    loud = [sample(0, 4, 20, 100.0), sample(1, 4, 20, -50.0)]
    assert trainer.train(order(loud)).gradient_norm > 1.0


def test_a_fresh_replica_takes_over_everything(tiny_model: Path) -> None:
    core, port = make_trainer(tiny_model), free_port()
    for version in (1, 2):
        core.train(order(BATCH, version))
    joiner = make_trainer(tiny_model, seed=1)
    assert joiner.parameter_hash() != core.parameter_hash()
    before = core.parameter_hash()
    regroup([core, joiner], 1, port, share_state=True)
    assert joiner.parameter_hash() == core.parameter_hash() == before
    # The moments came too: the next step, made together, is that of a replica that was never joined.
    never_joined = make_trainer(tiny_model)
    for version in (1, 2, 3):
        never_joined.train(order(BATCH, version))
    done = at_once(lambda: core.train(order(SHARES[0], 3)), lambda: joiner.train(order(SHARES[1], 3)))
    assert done[0].parameter_hash == done[1].parameter_hash
    assert furthest(core, never_joined) < 1e-3
    # And when it leaves, the core goes on alone.
    core.regroup(Regroup(2, 0, 1, port, False))
    assert core.train(order(BATCH, 4)).exchange_seconds == 0.0


def test_a_saved_replica_goes_on_as_if_nothing_had_happened(tiny_model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(tiny_model)
    trainer.train(order(BATCH, 1))
    trainer.save(tmp_path / "checkpoint", optimiser=True)
    saved = trainer.parameter_hash()
    wanted = trainer.train(order(BATCH[:3], 2)).parameter_hash
    for other in (make_trainer(tiny_model, seed=1), make_trainer(tmp_path / "checkpoint", seed=1)):
        other.load(tmp_path / "checkpoint")
        assert other.parameter_hash() == saved
        assert other.train(order(BATCH[:3], 2)).parameter_hash == wanted
    assert not list((tmp_path / "checkpoint").glob("*.part"))


def test_a_model_saved_without_its_optimiser_is_just_the_model(tiny_model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(tiny_model)
    trainer.train(order(BATCH, 1))
    trainer.save(tmp_path / "model", optimiser=False)
    assert sorted(path.name for path in (tmp_path / "model").glob("*.safetensors")) == ["model.safetensors"]
    assert make_trainer(tmp_path / "model", seed=1).parameter_hash() == trainer.parameter_hash()


def test_the_seed_makes_the_weights(tiny_model: Path) -> None:
    assert make_trainer(tiny_model).parameter_hash() == make_trainer(tiny_model).parameter_hash()


def test_publishing_writes_the_buffer_that_was_named(tiny_model: Path) -> None:
    trainer = make_trainer(tiny_model)
    checksum = trainer.train(order(BATCH, 1, publish_to=1)).checksum
    buffer: WeightBuffer = trainer._buffer
    named = trainer._named_parameters()
    for name, tensor in buffer.read(1, trainer.layout, checksum):
        assert torch.equal(tensor, named[name].to(torch.bfloat16)), name
    assert buffer.checksum(0) != checksum
    assert trainer.train(order(BATCH, 2)).checksum == 0


def test_measuring_puts_everything_back(tiny_model: Path) -> None:
    trainer, untouched = make_trainer(tiny_model), make_trainer(tiny_model)
    for t in (trainer, untouched):
        t.train(order(BATCH, 1))
    measured = trainer.measure(MeasureTraining([[6, 9], [12]], 2))
    assert [tokens for tokens, _ in measured.batches] == [15, 12, 15, 12]
    assert trainer.parameter_hash() == untouched.parameter_hash()
    assert trainer.train(order(BATCH, 2)).parameter_hash == untouched.train(order(BATCH, 2)).parameter_hash


def test_scores_are_log_probabilities_of_the_tokens_after_the_first(tiny_model: Path) -> None:
    trainer = make_trainer(tiny_model)
    tokens = BATCH[0].tokens
    [scores, first] = trainer.score([tokens, tokens[:2]])
    assert (len(scores), len(first)) == (len(tokens) - 1, 1)
    assert all(score < 0 for score in scores)
    assert first[0] == pytest.approx(scores[0], abs=0.02)  # later tokens do not matter


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
