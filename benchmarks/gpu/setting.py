"""Devices, models and limits of the benchmark: those of a GPU, or of a dry run on CPU slots."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import psutil

from libra.backends.devices import SlotDevice
from libra.backends.grpo.trainers import start_order
from libra.backends.launch.handle import Handle
from libra.backends.launch.launcher import WorkerLink
from libra.backends.machine import served_dtype
from libra.backends.tiny_model import kv_bytes_per_token, write_tiny_model
from libra.backends.transport.engine_messages import StartEngine
from libra.backends.transport.messages import Precision, Ready
from libra.backends.transport.trainer_messages import Sample, StartTrainer
from libra.config.run import ModelConfig, TrainingConfig
from libra.hardware.model_file import load_model


@dataclass(frozen=True, slots=True)
class Setting:
    gpu: str | None  # index of the GPU; None: a dry run on CPU slots
    model: str  # that engines serve and joiners train, in the library of shapes
    trained: str  # that is trained alone
    context: int  # tokens of the longest context
    turns: int
    tokens: int  # of a turn
    batch: tuple[int, int]  # samples of a step, and tokens of each
    buffer: int  # bytes of weights that are copied
    gap: float  # largest distance of an engine's log-probs from the trainer's
    second: str | None = None  # index of another GPU, among which and the first a model is divided

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of a process that computes on the GPU, and sees no other."""
        return {} if self.gpu is None else {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": self.gpu}

    @property
    def precision(self) -> Precision:
        return "fp32" if self.gpu is None else "bf16"

    def write(self, directory: Path, name: str) -> Path:
        """The directory of a model without weights: trainers make them."""
        if self.gpu is None:
            write_tiny_model(directory, ModelConfig(hidden_size=64, layers=2), "0123456789", self.context)
        else:
            directory.mkdir(parents=True, exist_ok=True)
            shape = files("libra.hardware") / "models" / f"{name.replace('/', '--')}.json"
            (directory / "config.json").write_text(shape.read_text())
        return directory

    def slots(self, both: bool) -> tuple[SlotDevice, ...]:
        """Two halves of the GPU; with `both`, the second has both GPUs. None is given for two cores."""
        if self.gpu is None:
            return ()
        one, two = SlotDevice("cuda", (self.gpu,)), SlotDevice("cuda", (self.gpu, self.second or self.gpu))
        return one, two if both else one

    def train_order(self, model: Path, link: WorkerLink, share: float, processes: int = 1) -> StartTrainer:
        training = TrainingConfig(
            steps=1,
            micro_batch_tokens=4 * self.context,  # beyond, logits of a large vocabulary take most of half a GPU
            processes=processes,
            sharding="none" if processes == 1 else "fsdp2",
        )
        return start_order(
            model, training, learning_rate=1e-3, precision=self.precision, seed=0, share=share, link=link, hashed=True
        )

    def engine_order(self, model: Path, ready: Ready, link: WorkerLink, share: float) -> StartEngine:
        on_gpu, dtype = self.gpu is not None, served_dtype(self.precision)
        return StartEngine(
            model_directory=str(model),
            max_model_len=self.context,
            max_num_seqs=2 * self.turns,
            dtype=dtype,
            kv_cache_bytes=2 * self.turns * self.context * kv_bytes_per_token(model, dtype),
            layout=ready.layout,
            buffer_bytes=ready.buffer_bytes,
            seed=0,
            share=1.0,
            cores=link.own_cores,
            refresh_kv=False,
            device=link.device.kind,
            memory=share,
            graphs=on_gpu,
            asynchronous=on_gpu,
        )

    def memory_used(self, worker: Handle) -> int:
        """Bytes of the GPU that are in use, or of the worker where there is none."""
        if self.gpu is None:
            return int(psutil.Process(worker.link.pid).memory_info().rss)
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", f"--id={self.gpu}"]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) << 20

    def samples(self) -> list[Sample]:
        count, length = self.batch
        return [sample(number, length) for number in range(count)]


def parameters(model: Path) -> int:
    """Parameters of the model of a directory, by the formula of its shape."""
    return load_model(model / "config.json").parameters


def sample(number: int, length: int, ids: int = 8) -> Sample:
    tokens = [4 + (7 * number + 3 * place) % ids for place in range(length)]
    own = [place >= length // 4 for place in range(length)]
    return Sample(str(number), tokens, own, [-2.5] * length, [0] * length, 1.0 if number % 2 else -1.0)


def on_gpu(index: str, second: str | None = None) -> Setting:
    return Setting(index, "Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B", 2048, 32, 512, (16, 2048), 16 << 30, 0.25, second)


DRY = Setting(None, "tiny", "tiny", 256, 4, 48, (4, 64), 1 << 20, 1e-3)


def lost(name: str, why: str) -> None:
    raise RuntimeError(f"worker {name} is lost: {why}")


def generated(samples: Sequence[Sample]) -> int:
    return sum(sum(sample.generated) for sample in samples)
