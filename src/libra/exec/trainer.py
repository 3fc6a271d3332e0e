"""One training replica: an accelerate trainer that takes optimiser steps on samples it is sent.

Invariant: the optimiser steps only after the gradients of all replicas have been added up and divided once; every
replica then holds the same parameters, and says so by their hash.
"""

from __future__ import annotations

import contextlib
import copy
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from libra.exec.channel import WorkerChannel
from libra.exec.elastic import GradientExchange, PeerLostError
from libra.exec.grpo import denominator, loss_sum
from libra.exec.messages import (
    Done,
    Failure,
    LoadCheckpoint,
    MeasureTraining,
    Publish,
    Published,
    Ready,
    Regroup,
    Regrouped,
    Sample,
    SaveCheckpoint,
    Score,
    Scored,
    StartTrainer,
    Stop,
    Tensor,
    Train,
    Trained,
    TrainingMeasured,
    WarmedUp,
    WarmUp,
)
from libra.exec.pace import Pacer
from libra.exec.weights import WeightBuffer, make_layout

_MODEL, _OPTIMISER = "model.safetensors", "optimizer.safetensors"
_GRADIENT_NORM = 1.0  # clip


class Trainer:
    """Model, optimiser and gradient exchange of one replica."""

    def __init__(self, start: StartTrainer, descriptor: int, pacer: Pacer) -> None:
        self._settings = start
        self._pacer = pacer
        torch.manual_seed(start.seed)
        self._accelerator = Accelerator(cpu=not torch.cuda.is_available(), mixed_precision="bf16")
        model = _load_or_make(Path(start.model_directory))
        optimiser = torch.optim.AdamW(model.parameters(), lr=start.learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
        self._model, self._optimiser = self._accelerator.prepare(model, optimiser)
        self._model.train()
        self._exchange = GradientExchange()
        named = self._named_parameters()
        self.layout: tuple[Tensor, ...]
        self.layout, self.buffer_bytes = make_layout((name, tuple(p.shape)) for name, p in named.items())
        self._buffer = WeightBuffer(descriptor, self.buffer_bytes)

    def train(self, order: Train) -> Trained:
        """One optimiser step. Raises `PeerLostError` before anything changed when another replica is lost."""
        began = time.monotonic()
        tokens = clipped = weight = gap = 0.0
        forward = 0
        for batch in micro_batches(order.samples, self._settings.micro_batch_tokens):
            ids, mask, behaviour, advantages = _collate(batch)
            forward += ids.numel()
            logprobs = self._logprobs(ids)
            # One step per batch: the proximal policy is the policy that enters the step.
            sums = loss_sum(
                logprobs,
                logprobs.detach(),
                behaviour,
                advantages,
                mask,
                self._settings.clip,
                self._settings.denominator,  # type: ignore[arg-type]
            )
            self._accelerator.backward(sums.loss)
            tokens, clipped = tokens + sums.tokens, clipped + sums.clipped
            weight, gap = weight + sums.behaviour_weight, gap + sums.prox_gap
            self._pacer.pace()
        compute_seconds = time.monotonic() - began
        share = denominator(
            self._settings.denominator,  # type: ignore[arg-type]
            order.sequences,
            order.tokens,
            self._settings.token_constant,
        )
        gradients = self._gradients()
        try:
            total, exchange_seconds = self._exchange.add_up(gradients, share)
        except PeerLostError:
            self._optimiser.zero_grad()
            raise
        for gradient in gradients:
            gradient /= max(total, 1.0)
        norm = float(self._accelerator.clip_grad_norm_(self._model.parameters(), _GRADIENT_NORM))
        self._optimiser.step()
        self._optimiser.zero_grad()
        published = time.monotonic()
        checksum = self.publish(order.publish_to) if order.publish_to >= 0 else 0
        self._pacer.pace()
        return Trained(
            version=order.version,
            checksum=checksum,
            parameter_hash=self.parameter_hash(),
            compute_seconds=compute_seconds,
            exchange_seconds=exchange_seconds,
            publish_seconds=time.monotonic() - published,
            forward_tokens=forward,
            generated_tokens=int(tokens),
            clipped=clipped,
            behaviour_weight=weight,
            prox_gap=gap,
            gradient_norm=norm,
        )

    def warm_up(self, order: WarmUp) -> WarmedUp:
        """One supervised step: mean cross-entropy over the demonstrated agent's own tokens."""
        samples = [
            Sample(str(i), tokens, generated, [0.0] * len(tokens), [], 0.0)
            for i, (tokens, generated) in enumerate(order.batch)
        ]
        demonstrated = sum(sum(sample.generated[1:]) for sample in samples)
        total, forward = 0.0, 0
        for batch in micro_batches(samples, self._settings.micro_batch_tokens):
            ids, mask, _, _ = _collate(batch)
            loss = -(self._logprobs(ids) * mask).sum() / demonstrated
            self._accelerator.backward(loss)
            total, forward = total + loss.item(), forward + ids.numel()
        self._accelerator.clip_grad_norm_(self._model.parameters(), _GRADIENT_NORM)
        for group in self._optimiser.param_groups:
            group["lr"] = order.learning_rate
        self._optimiser.step()
        self._optimiser.zero_grad()
        self._pacer.pace()
        return WarmedUp(total, forward)

    def publish(self, buffer: int) -> int:
        return self._buffer.write(buffer, self.layout, self._named_parameters())

    def regroup(self, order: Regroup) -> float:
        began = time.monotonic()
        self._exchange.regroup(order.generation, order.rank, order.size, order.port)
        if order.share_state and order.size > 1:
            with torch.no_grad():
                self._exchange.share(self._state())
        return time.monotonic() - began

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """Log-prob of each token after the first."""
        scores = []
        for tokens in sequences:
            with torch.no_grad():
                scores.append(self._logprobs(torch.tensor([tokens]))[0].tolist())
            self._pacer.pace()
        return scores

    def save(self, directory: Path, optimiser: bool) -> None:
        """`model.safetensors` and `optimizer.safetensors`, each written whole before it takes its name."""
        directory.mkdir(parents=True, exist_ok=True)
        self._accelerator.unwrap_model(self._model).config.save_pretrained(directory)
        named = {name: value.detach().contiguous() for name, value in self._named_parameters().items()}
        files = {_MODEL: named, **({_OPTIMISER: self._optimiser_tensors()} if optimiser else {})}
        for name, tensors in files.items():
            part = directory / f"{name}.part"
            save_file(tensors, part, metadata={"format": "pt"})
            part.rename(directory / name)

    def load(self, directory: Path) -> None:
        with torch.no_grad():
            saved = load_file(directory / _MODEL)
            for name, parameter in self._named_parameters().items():
                parameter.copy_(saved[name])
            if (directory / _OPTIMISER).exists():
                moments = load_file(directory / _OPTIMISER)
                for key, tensor in self._optimiser_tensors().items():
                    tensor.copy_(moments[key])

    def parameter_hash(self) -> int:
        """CRC-32 over all parameters: equal on replicas that agree to the last bit."""
        value = 0
        for parameter in self._model.parameters():
            value = zlib.crc32(parameter.detach().contiguous().view(-1).view(torch.uint8).numpy(), value)
        return value

    def measure(self, order: MeasureTraining) -> TrainingMeasured:
        """Time training at this device's pace. Parameters and optimiser state are put back afterwards."""
        saved = copy.deepcopy((self._model.state_dict(), self._optimiser.state_dict()))
        batches: list[tuple[int, float]] = []
        steps: list[float] = []
        exchanges: list[float] = []
        for repeat in range(order.repeats + 1):
            for lengths in order.batches:
                batch = [_made_up_sample(index, length) for index, length in enumerate(lengths)]
                began = time.monotonic()
                done = self.train(Train(0, batch, len(batch), sum(lengths), -1))
                whole = time.monotonic() - began
                if repeat > 0:  # the first time pays for kernels that are set up when they are first met
                    batches.append((done.forward_tokens, done.compute_seconds))
                    exchanges.append(done.exchange_seconds)
                    steps.append(whole - done.compute_seconds - done.exchange_seconds)
        self._model.load_state_dict(saved[0])
        self._optimiser.load_state_dict(saved[1])
        return TrainingMeasured(batches, fmean(steps), fmean(exchanges))

    def _logprobs(self, ids: torch.Tensor) -> torch.Tensor:
        """[samples, tokens - 1]: log-prob of every token after the first."""
        with self._accelerator.autocast():
            logits = self._model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        return torch.log_softmax(logits, dim=-1).gather(2, ids[:, 1:, None])[..., 0]

    def _named_parameters(self) -> dict[str, torch.Tensor]:
        return dict(self._accelerator.unwrap_model(self._model).named_parameters())

    def _gradients(self) -> list[torch.Tensor]:
        """The gradient of every parameter, zero where a batch without signal left none."""
        for parameter in self._model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [parameter.grad for parameter in self._model.parameters()]

    def _optimiser_tensors(self) -> dict[str, torch.Tensor]:
        """AdamW's moments by parameter name, made (zero) where no step has been taken yet."""
        tensors: dict[str, torch.Tensor] = {}
        state = self._optimiser.optimizer.state
        for name, parameter in self._named_parameters().items():
            if not state[parameter]:
                state[parameter] = {
                    "step": torch.zeros(()),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
            for key, tensor in state[parameter].items():
                tensors[f"{name}/{key}"] = tensor
        return tensors

    def _state(self) -> Iterator[torch.Tensor]:
        """Everything a joining replica takes over from rank 0, in one fixed order."""
        yield from (parameter.detach() for parameter in self._named_parameters().values())
        yield from self._optimiser_tensors().values()


def _load_or_make(directory: Path) -> torch.nn.Module:
    """The model of a directory, in float32; with random weights where the directory holds none yet."""
    if any(directory.glob("*.safetensors")):
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    config = AutoConfig.from_pretrained(directory)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def micro_batches(samples: list[Sample], most_tokens: int) -> Iterator[list[Sample]]:
    """Samples of similar length together, each batch at most `most_tokens` when padded (one sample may exceed it)."""
    batch: list[Sample] = []
    for sample in sorted(samples, key=lambda sample: len(sample.tokens)):
        if batch and (len(batch) + 1) * len(sample.tokens) > most_tokens:
            yield batch
            batch = []
        batch.append(sample)
    if batch:
        yield batch


def _collate(samples: list[Sample]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Padded ids [n, t]; mask and behaviour log-probs [n, t - 1] of the predicted tokens; advantages [n, 1]."""
    longest = max(len(sample.tokens) for sample in samples)

    def padded(values: list[list[float]]) -> torch.Tensor:
        return torch.tensor([row + [0] * (longest - len(row)) for row in values])

    ids = padded([sample.tokens for sample in samples])  # type: ignore[misc]
    mask = padded([[float(own) for own in sample.generated] for sample in samples])[:, 1:]
    behaviour = padded([sample.logprobs for sample in samples])[:, 1:]
    return ids, mask, behaviour, torch.tensor([[sample.advantage] for sample in samples])


def _made_up_sample(index: int, length: int) -> Sample:
    tokens = [4 + (index + 5 * position) % 16 for position in range(length)]
    return Sample(str(index), tokens, [True] * length, [-1.0] * length, [0] * length, 1.0)


def serve_trainer(channel: WorkerChannel, start: StartTrainer, descriptor: int, began: float) -> None:
    """The life of a training worker: until `Stop`, or until the controller goes away."""
    if len(start.cores) > 1:
        torch.set_num_threads(len(start.cores))
    trainer = Trainer(start, descriptor, Pacer(start.share, start.cores))
    channel.send(Ready(time.monotonic() - began, trainer.layout, trainer.buffer_bytes))
    while True:
        match message := channel.receive():
            case Train():
                with report_lost_peer(channel):
                    channel.send(trainer.train(message))
            case WarmUp():
                channel.send(trainer.warm_up(message))
            case Publish():
                channel.send(Published(message.version, trainer.publish(message.buffer)))
            case Regroup():
                with report_lost_peer(channel):
                    channel.send(Regrouped(message.generation, trainer.regroup(message)))
            case Score():
                channel.send(Scored(trainer.score(message.sequences)))
            case MeasureTraining():
                channel.send(trainer.measure(message))
            case SaveCheckpoint():
                trainer.save(Path(message.directory), message.optimiser)
                channel.send(Done())
            case LoadCheckpoint():
                trainer.load(Path(message.directory))
                channel.send(Done())
            case Stop():
                channel.send(Done())
                return
            case _:
                raise TypeError(f"{type(message).__name__} is not a message for a trainer")


@contextlib.contextmanager
def report_lost_peer(channel: WorkerChannel) -> Iterator[None]:
    try:
        yield
    except PeerLostError as error:
        channel.send(Failure(str(error), peer_lost=True))
