"""One process of a training replica, by default its only process. It trains on the samples that it receives.

Invariant: the optimiser steps only after a verdict, when the gradients of all replicas have been summed and divided
once. Every replica then has the same parameters, and proves it by their hash. Before the verdict the state does not
change.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import torch
from accelerate import Accelerator
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from libra.backends.grpo.elastic import ElasticReplica, PeerLostError
from libra.backends.grpo.grpo import (
    IDLE,
    collate,
    denominator,
    loss_sum,
    made_up_sample,
    micro_batches,
)
from libra.backends.grpo.logprobs import chosen_logprobs
from libra.backends.grpo.model_part import (
    ALONE,
    MODEL,
    OPTIMISER,
    Gathered,
    Inside,
    load_file,
    load_or_make,
    part_of,
    save_files,
)
from libra.backends.grpo.train_state import TrainState
from libra.backends.launch.worker import Pacer
from libra.backends.machine import served_dtype
from libra.backends.transport.messages import Tensor
from libra.backends.transport.shared_memory import WeightBuffer, make_layout
from libra.backends.transport.trainer_messages import (
    Commit,
    MeasureTraining,
    Reduced,
    Sample,
    StartTrainer,
    TokenSums,
    Train,
    Trained,
    TrainingMeasured,
    WarmedUp,
    WarmUp,
)

_GRADIENT_NORM = 1.0  # gradients are clipped to it
_LARGEST = math.sqrt(torch.finfo(torch.float32).max)  # the largest weight whose square is finite in engines
_MEASURING_PATIENCE = 60.0  # seconds; during measurements the duration of a step is unknown
_ARITHMETIC = {"bf16": (torch.float32, "bf16"), "fp32": (torch.float32, "no"), "fp64": (torch.float64, "no")}


class TrainerProcess:
    """A training process: its part of the model, the optimiser, and the gradient exchange."""

    def __init__(self, start: StartTrainer, descriptor: int, pacer: Pacer, inside: Inside = ALONE) -> None:
        self._settings = start
        self._pacer = pacer
        self._inside = inside
        torch.manual_seed(start.seed)
        self._dtype, mixed = _ARITHMETIC[start.precision]
        if start.device == "cuda":
            torch.cuda.set_device(inside.rank)
            torch.cuda.set_per_process_memory_fraction(start.memory)
        self._accelerator = Accelerator(cpu=start.device == "cpu", mixed_precision=mixed)
        self._device = self._accelerator.device
        model = load_or_make(Path(start.model_directory), self._dtype).train()
        if start.sharding == "none":  # otherwise each layer goes to the device alone, before it is divided
            model = model.to(self._device)
        if start.device == "cuda":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self._config = model.config
        self.part = part_of(model, start.sharding, self._accelerator, inside)
        named = self.part.parameters
        optimiser = torch.optim.AdamW(named.values(), lr=start.learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
        self.state = TrainState(named, optimiser)
        self.part.use_memory()
        self.elastic = ElasticReplica(self.state, pacer, inside.rank)
        self._reduced: tuple[int, torch.Tensor] | None = None  # version and summed gradient, before the verdict
        self.layout: tuple[Tensor, ...]
        self.layout, self.buffer_bytes = make_layout(self.part.shapes.items(), served_dtype(start.precision))
        self._buffer = WeightBuffer(descriptor, self.buffer_bytes)
        if start.device == "cuda" and inside.leads:
            self._buffer.pin()
            torch.cuda.empty_cache()  # memory in which the model was before it moved to the board

    def reduce(self, order: Train) -> Reduced:
        """Back-propagate this share, and sum the gradients of all replicas. The state does not change.

        In a replica of several processes, each process has a part of the replica's samples. After back-propagation it
        has its part of the replica's gradient, or all of it, and sums it with its counterparts in other replicas.
        """
        if self._reduced is not None:
            raise RuntimeError(f"the gradient of version {self._reduced[0]} still awaits its verdict")
        began = time.monotonic()
        gradient = self._open_gradient()
        sums = self._backward(order.samples)
        if self._device.type == "cuda":
            torch.cuda.synchronize()  # the last backward pass may still be running
        compute_seconds = time.monotonic() - began
        gradient[-1] = denominator(
            self._settings.denominator, order.sequences, order.tokens, self._settings.token_constant
        )
        failure, exchange_seconds = "", 0.0
        try:
            exchange_seconds = self.elastic.exchange.all_reduce(gradient, order.patience)
        except PeerLostError as error:
            failure = str(error)
        else:
            self._reduced = order.version, gradient
        return Reduced(order.version, failure, compute_seconds, exchange_seconds, sums)

    def commit(self, order: Commit) -> Trained:
        """Step the optimiser with the summed gradient of this version."""
        if self._reduced is None or self._reduced[0] != order.version:
            raise RuntimeError(f"no gradient of version {order.version} awaits a verdict")
        _, gradient = self._reduced
        self._reduced = None
        norm = self._step(gradient)
        published = time.monotonic()
        checksum = self.publish(order.publish_to) if order.publish_to >= 0 else 0
        publish_seconds = time.monotonic() - published
        self._pacer.pace()
        diverged = self.diverged() if math.isfinite(norm) else f"the norm of its gradient is {norm}"
        return Trained(order.version, checksum, self.state.checksum, publish_seconds, norm, diverged)

    def discard(self) -> None:
        """Discard the gradient, since the step was not committed."""
        self._reduced = None

    def warm_up(self, order: WarmUp) -> WarmedUp:
        """Make one supervised step on the mean cross-entropy over the demonstrated agent's own tokens. The answer has
        this process's part of the loss."""
        samples = [
            Sample(str(i), tokens, generated, [0.0] * len(tokens), [], 0.0)
            for i, (tokens, generated) in enumerate(order.batch)
        ]
        gradient = self._open_gradient()
        gradient[-1] = self._inside.total(sum(sum(sample.generated[1:]) for sample in samples))
        total = 0.0
        for batch, last in self._micro_batches(samples):
            ids, mask, _, _ = collate(batch, self._device)
            with self.part.accumulating(last):
                loss = -(self._logprobs(ids, temperature=1.0) * mask).sum()
                self._accelerator.backward(loss)
            total += loss.item()
        demonstrated = float(gradient[-1])
        self.state.learning_rate = order.learning_rate
        self._step(gradient)
        self._pacer.pace()
        return WarmedUp(total / demonstrated)

    def publish(self, buffer: int) -> int:
        """Write the whole weights for the engines; returns their checksum, or 0 if this process does not lead."""
        weights = Gathered(self.part, self.part.parameters)
        if self._inside.leads:
            return self._buffer.write(buffer, self.layout, weights, hashed=self._settings.hashed)
        for tensor in self.layout:
            weights[tensor.name]
        return 0

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """Log-prob of each token after the first, at the sampling temperature."""
        scores = []
        for tokens in sequences:
            with torch.no_grad():
                ids = torch.tensor([tokens], device=self._device)
                scores.append(self._logprobs(ids, self._settings.temperature)[0].tolist())
            self._pacer.pace()
        return scores

    def diverged(self) -> str:
        """Reason why the weights of this part are unusable; empty if they are sound."""
        largest = self.state.largest
        if largest <= _LARGEST:
            return ""
        return f"its largest weight is {largest:.3g}, and products of such weights are not finite"

    def save(self, directory: Path, optimiser: bool) -> None:
        """Write the model, if wanted with its optimiser; see `save_files`. Raises `ValueError` if it has diverged."""
        why = self.diverged()
        if self._inside.largest(bool(why)):  # either all processes of the replica write, or none
            raise ValueError(f"the model has diverged: {why or 'another process of the replica reported it'}")
        tensors = {MODEL: self.part.parameters}
        if optimiser:
            tensors[OPTIMISER] = self.state.optimiser_tensors()
        save_files(directory, self.part, tensors, self._config if self._inside.leads else None)

    def load(self, directory: Path) -> None:
        """Load the model and its optimiser from a directory."""
        with self.state.change():
            load_file(directory / MODEL, self.part, self.part.parameters)
            load_file(directory / OPTIMISER, self.part, self.state.optimiser_tensors())

    def measure(self, order: MeasureTraining) -> TrainingMeasured:
        """Measure the times of training steps on this device. Restores parameters and optimiser state, also after an
        error."""
        kept = self.state.keep()
        batches, steps, exchanges = list[tuple[int, float]](), list[float](), list[float]()
        try:
            for repeat in range(order.repeats + 1):
                for lengths in order.batches:
                    batch = [made_up_sample(index, length) for index, length in enumerate(lengths)]
                    began = time.monotonic()
                    vote = self.reduce(Train(0, batch, len(batch), sum(lengths), _MEASURING_PATIENCE))
                    # Either all processes of the replica continue, or none, since they meet again in the step.
                    if self._inside.largest(bool(vote.failure)):
                        self.discard()
                        self.elastic.exchange.abort()  # so that no other replica waits in the next sum
                        failure = vote.failure or "the gradient exchange of another process failed"
                        return TrainingMeasured([], 0.0, 0.0, failure)
                    self.commit(Commit(0, -1))
                    whole = time.monotonic() - began
                    if repeat > 0:  # the first repeat includes the set-up of kernels
                        batches.append((vote.sums.forward_tokens, vote.compute_seconds))
                        exchanges.append(vote.exchange_seconds)
                        steps.append(whole - vote.compute_seconds - vote.exchange_seconds)
        finally:
            self.state.put_back(kept)
        return TrainingMeasured(batches, fmean(steps), fmean(exchanges))

    def _backward(self, samples: list[Sample]) -> TokenSums:
        """Add the gradient of the summed loss to the open gradient."""
        settings, sums = self._settings, TokenSums()
        for batch, last in self._micro_batches(samples):
            ids, mask, behaviour, advantages = collate(batch, self._device)
            with self.part.accumulating(last):
                logprobs = self._logprobs(ids, settings.temperature)
                # With one step per batch, the proximal policy is the policy at the start of the step.
                prox = logprobs.detach()
                loss, found = loss_sum(logprobs, prox, behaviour, advantages, mask, settings.clip, settings.denominator)
                self._accelerator.backward(loss)
            sums += found
            self._pacer.pace()
        return sums

    def _micro_batches(self, samples: list[Sample]) -> Iterator[tuple[list[Sample], bool]]:
        """Micro-batches, and whether each is the last. All processes of the replica yield the same number, since they
        meet in each; a process without further samples adds nothing."""
        batches = list(micro_batches(samples, self._settings.micro_batch_tokens))
        rounds = self._inside.largest(len(batches))
        for number in range(rounds):
            yield batches[number] if number < len(batches) else [IDLE], number == rounds - 1

    def _open_gradient(self) -> torch.Tensor:
        gradient = self.state.gradient()
        self.part.use_gradients()
        return gradient

    def _step(self, gradient: torch.Tensor) -> float:
        """Divide the summed gradient once, clip it, and step the optimiser; returns the norm before clipping."""
        total = float(gradient[-1])
        gradient[:-1] /= max(total, 1.0)
        parameters = self.part.parameters.values()
        norm = self.part.norm(float(get_total_norm([parameter.grad for parameter in parameters])))
        clip_grads_with_norm_(parameters, _GRADIENT_NORM, torch.tensor(norm, dtype=gradient.dtype))
        self.state.step(total, norm)
        return norm

    def _logprobs(self, ids: torch.Tensor, temperature: float) -> torch.Tensor:
        """Log-probs [samples, tokens - 1] of every token after the first, under the policy softmax(logits /
        temperature)."""
        with self._accelerator.autocast():
            logits = self.part.model(input_ids=ids, use_cache=False).logits
        return chosen_logprobs(logits, ids[:, 1:], temperature, self._dtype)
