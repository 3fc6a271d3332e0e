"""One training replica: an accelerate trainer that takes optimiser steps on samples it is sent.

Invariant: the optimiser steps only on a verdict, after the gradients of all replicas have been added up and divided
once; every replica then holds the same parameters, and says so by their hash. Until the verdict the state is untouched.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from libra.exec.launch.pace import Pacer
from libra.exec.train.elastic import GradientExchange, PeerLostError
from libra.exec.train.grpo import denominator, loss_sum
from libra.exec.train.micro_batches import collate, made_up_sample, micro_batches
from libra.exec.train.train_state import TrainState
from libra.exec.wire.messages import (
    Commit,
    MeasureTraining,
    Reduced,
    Sample,
    StartTrainer,
    Tensor,
    Train,
    Trained,
    TrainingMeasured,
    WarmedUp,
    WarmUp,
)
from libra.exec.wire.weights import WeightBuffer, make_layout

_MODEL, _OPTIMISER = "model.safetensors", "optimizer.safetensors"
_GRADIENT_NORM = 1.0  # clip
_MEASURING_PATIENCE = 60.0  # seconds; while measuring nobody knows yet how long a step takes
_ARITHMETIC = {"bf16": (torch.float32, "bf16"), "fp32": (torch.float32, "no"), "fp64": (torch.float64, "no")}


@dataclass(slots=True)
class _Sums:
    """Over the generated tokens of a share, and the tokens that went through the model."""

    forward_tokens: int = 0
    generated_tokens: int = 0
    clipped: float = 0.0
    behaviour_weight: float = 0.0
    prox_gap: float = 0.0


class Trainer:
    """Model, optimiser and gradient exchange of one replica."""

    def __init__(self, start: StartTrainer, descriptor: int, pacer: Pacer) -> None:
        self._settings = start
        self._pacer = pacer
        torch.manual_seed(start.seed)
        self._dtype, mixed = _ARITHMETIC[start.precision]
        self._accelerator = Accelerator(cpu=not torch.cuda.is_available(), mixed_precision=mixed)
        model = _load_or_make(Path(start.model_directory), self._dtype)
        optimiser = torch.optim.AdamW(model.parameters(), lr=start.learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
        self._model, prepared = self._accelerator.prepare(model, optimiser)
        self._model.train()
        named = self._named_parameters()
        self.state = TrainState(named, prepared.optimizer)
        self.exchange = GradientExchange()
        self._reduced: tuple[int, torch.Tensor] | None = None  # version and summed gradient, awaiting the verdict
        self.layout: tuple[Tensor, ...]
        self.layout, self.buffer_bytes = make_layout((name, tuple(p.shape)) for name, p in named.items())
        self._buffer = WeightBuffer(descriptor, self.buffer_bytes)

    def reduce(self, order: Train) -> Reduced:
        """Back-propagate this share and add the gradients of all replicas up. The state stays what it was."""
        if self._reduced is not None:
            raise RuntimeError(f"the gradient of version {self._reduced[0]} still awaits its verdict")
        began = time.monotonic()
        gradient = self.state.gradient()
        sums = self._backward(order.samples)
        compute_seconds = time.monotonic() - began
        gradient[-1] = denominator(
            self._settings.denominator,  # type: ignore[arg-type]
            order.sequences,
            order.tokens,
            self._settings.token_constant,
        )
        failure, exchange_seconds = "", 0.0
        try:
            exchange_seconds = self.exchange.add_up(gradient, order.patience)
        except PeerLostError as error:
            failure = str(error)
        else:
            self._reduced = order.version, gradient
        return Reduced(
            order.version,
            failure,
            compute_seconds,
            exchange_seconds,
            sums.forward_tokens,
            sums.generated_tokens,
            sums.clipped,
            sums.behaviour_weight,
            sums.prox_gap,
        )

    def commit(self, order: Commit) -> Trained:
        """The optimiser step, with the gradient that was summed for this version."""
        if self._reduced is None or self._reduced[0] != order.version:
            raise RuntimeError(f"no gradient of version {order.version} awaits a verdict")
        _, gradient = self._reduced
        self._reduced = None
        norm = self._step(gradient)
        published = time.monotonic()
        checksum = self.publish(order.publish_to) if order.publish_to >= 0 else 0
        publish_seconds = time.monotonic() - published
        self._pacer.pace()
        return Trained(order.version, checksum, self.state.checksum, publish_seconds, norm)

    def discard(self) -> None:
        """The verdict is no: the gradient is forgotten."""
        self._reduced = None

    def warm_up(self, order: WarmUp) -> WarmedUp:
        """One supervised step: mean cross-entropy over the demonstrated agent's own tokens."""
        samples = [
            Sample(str(i), tokens, generated, [0.0] * len(tokens), [], 0.0)
            for i, (tokens, generated) in enumerate(order.batch)
        ]
        gradient = self.state.gradient()
        gradient[-1] = sum(sum(sample.generated[1:]) for sample in samples)
        total, forward = 0.0, 0
        for batch in micro_batches(samples, self._settings.micro_batch_tokens):
            ids, mask, _, _ = collate(batch)
            loss = -(self._logprobs(ids, temperature=1.0) * mask).sum()
            self._accelerator.backward(loss)
            total, forward = total + loss.item(), forward + ids.numel()
        demonstrated = float(gradient[-1])
        self.state.learning_rate = order.learning_rate
        self._step(gradient)
        self._pacer.pace()
        return WarmedUp(total / demonstrated, forward)

    def publish(self, buffer: int) -> int:
        return self._buffer.write(buffer, self.layout, self._named_parameters())

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """Log-prob of each token after the first, at the temperature of sampling."""
        scores = []
        for tokens in sequences:
            with torch.no_grad():
                scores.append(self._logprobs(torch.tensor([tokens]), self._settings.temperature)[0].tolist())
            self._pacer.pace()
        return scores

    def save(self, directory: Path, optimiser: bool) -> None:
        """`model.safetensors` and `optimizer.safetensors`, each written whole before it takes its name."""
        directory.mkdir(parents=True, exist_ok=True)
        self._accelerator.unwrap_model(self._model).config.save_pretrained(directory)
        named = {name: value.detach() for name, value in self._named_parameters().items()}
        files = {_MODEL: named, **({_OPTIMISER: self.state.optimiser_tensors()} if optimiser else {})}
        for name, tensors in files.items():
            part = directory / f"{name}.part"
            save_file(tensors, part, metadata={"format": "pt"})
            part.rename(directory / name)

    def load(self, directory: Path) -> None:
        saved = load_file(directory / _MODEL)
        moments = load_file(directory / _OPTIMISER) if (directory / _OPTIMISER).exists() else {}
        with torch.no_grad(), self.state.change():
            for name, parameter in self._named_parameters().items():
                parameter.copy_(saved[name])
            if moments:
                for key, tensor in self.state.optimiser_tensors().items():
                    tensor.copy_(moments[key])

    def measure(self, order: MeasureTraining) -> TrainingMeasured:
        """Time training at this device's pace. Parameters and optimiser state are put back, however it ends."""
        kept = self.state.keep()
        try:
            return self._measure(order)
        except PeerLostError as error:
            return TrainingMeasured([], 0.0, 0.0, str(error))
        finally:
            self.state.put_back(kept)

    def pace(self) -> None:
        """Sleep what this device owes."""
        self._pacer.pace()

    def _measure(self, order: MeasureTraining) -> TrainingMeasured:
        batches: list[tuple[int, float]] = []
        steps: list[float] = []
        exchanges: list[float] = []
        for repeat in range(order.repeats + 1):
            for lengths in order.batches:
                batch = [made_up_sample(index, length) for index, length in enumerate(lengths)]
                began = time.monotonic()
                vote = self.reduce(Train(0, batch, len(batch), sum(lengths), _MEASURING_PATIENCE))
                if vote.failure:
                    raise PeerLostError(vote.failure)
                self.commit(Commit(0, -1))
                whole = time.monotonic() - began
                if repeat > 0:  # the first time pays for kernels that are set up when they are first met
                    batches.append((vote.forward_tokens, vote.compute_seconds))
                    exchanges.append(vote.exchange_seconds)
                    steps.append(whole - vote.compute_seconds - vote.exchange_seconds)
        return TrainingMeasured(batches, fmean(steps), fmean(exchanges))

    def _backward(self, samples: list[Sample]) -> _Sums:
        """Add the gradient of the summed loss to the gradient that is open."""
        sums = _Sums()
        for batch in micro_batches(samples, self._settings.micro_batch_tokens):
            ids, mask, behaviour, advantages = collate(batch)
            logprobs = self._logprobs(ids, self._settings.temperature)
            # One step per batch: the proximal policy is the policy that enters the step.
            found = loss_sum(
                logprobs,
                logprobs.detach(),
                behaviour,
                advantages,
                mask,
                self._settings.clip,
                self._settings.denominator,  # type: ignore[arg-type]
            )
            self._accelerator.backward(found.loss)
            sums.forward_tokens += ids.numel()
            sums.generated_tokens += found.tokens
            sums.clipped += found.clipped
            sums.behaviour_weight += found.behaviour_weight
            sums.prox_gap += found.prox_gap
            self._pacer.pace()
        return sums

    def _step(self, gradient: torch.Tensor) -> float:
        """Divide the summed gradient once, clip it, and step; returns its norm before clipping."""
        total = float(gradient[-1])
        gradient[:-1] /= max(total, 1.0)
        norm = float(self._accelerator.clip_grad_norm_(self._model.parameters(), _GRADIENT_NORM))
        self.state.step(total, norm)
        return norm

    def _logprobs(self, ids: torch.Tensor, temperature: float) -> torch.Tensor:
        """[samples, tokens - 1]: log-prob of every token after the first, where the policy is softmax(logits /
        temperature)."""
        with self._accelerator.autocast():
            logits = self._model(input_ids=ids, use_cache=False).logits[:, :-1].to(self._dtype)
        return torch.log_softmax(logits / temperature, dim=-1).gather(2, ids[:, 1:, None])[..., 0]

    def _named_parameters(self) -> dict[str, torch.Tensor]:
        return dict(self._accelerator.unwrap_model(self._model).named_parameters())


def _load_or_make(directory: Path, dtype: torch.dtype) -> torch.nn.Module:
    """The model of a directory, in this type; with random weights where the directory holds none yet."""
    if any(directory.glob("*.safetensors")):
        return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    config = AutoConfig.from_pretrained(directory)
    return AutoModelForCausalLM.from_config(config, dtype=dtype)
