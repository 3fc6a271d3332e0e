"""The part of the model that one process of a replica holds: all of it, or a shard of every parameter. Files contain
the whole model, in Hugging Face layout, and the processes of a replica read and write them together.

Invariant: the parameters here are plain tensors, and the process steps only them. The parts of all processes together
are the model. Gradients are summed over the processes, never averaged. A file with its final name is whole.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors import safe_open
from safetensors.torch import save_file
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from libra.backends.transport.messages import DeviceKind, Sharding


@dataclass(frozen=True, slots=True)
class Inside:
    """The rank of this process in its replica, and collectives of the replica's processes. For a single process (size
    1), every method returns at once.

    Every process takes part in each of these collectives, in the same order. If a process is lost, they fail for the
    others, which then end, too: a replica has all its processes or does not exist.
    """

    rank: int
    size: int

    @property
    def leads(self) -> bool:
        """Whether this process communicates with the controller, and writes the replica's publications and files."""
        return self.rank == 0

    def largest(self, number: int) -> int:
        return int(self._reduced(torch.tensor(number), distributed.ReduceOp.MAX))

    def total(self, number: float) -> float:
        return float(self._reduced(torch.tensor(number, dtype=torch.float64), distributed.ReduceOp.SUM))

    def _reduced(self, tensor: torch.Tensor, operation: distributed.ReduceOp) -> torch.Tensor:
        if self.size > 1:
            distributed.all_reduce(tensor, operation)
        return tensor


ALONE = Inside(0, 1)


def meet(rank: int, size: int, store: distributed.Store, device: DeviceKind = "cpu") -> Inside:
    """Join the replica's process group. It is torch's default group in this process, which accelerate uses, too."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    distributed.init_process_group(backend, store=store, rank=rank, world_size=size)
    return Inside(rank, size)


Tensors = Mapping[str, torch.Tensor]


class ModelPart:
    """A process's part of the model. In this class every process has the whole model, and `DistributedDataParallel`
    sums the gradients of several processes."""

    model: torch.nn.Module  # for calls
    parameters: dict[str, torch.nn.Parameter]  # by their names in the whole model
    shapes: dict[str, tuple[int, ...]]  # of the whole parameters, by name

    def __init__(self, model: torch.nn.Module, accelerator: Accelerator, inside: Inside) -> None:
        self.parameters = dict(model.named_parameters())
        self.shapes = {name: tuple(parameter.shape) for name, parameter in self.parameters.items()}
        self._several = inside.size > 1
        if accelerator.device.type == "cpu":
            self.model = accelerator.prepare(model)
        else:  # `prepare` would have it convert whole logits to float32
            self.model = DistributedDataParallel(model) if self._several else model
        if self._several:
            self.model.register_comm_hook(None, lambda state, bucket: _sum(bucket))

    def use_memory(self) -> None:
        """Make the model use the memory to which the parameters were moved."""

    def use_gradients(self) -> None:
        """Make the next backward add to the parameters' gradients."""

    def accumulating(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Context for forward and backward of one micro-batch. `last` tells whether it is the last of its step."""
        return self.model.no_sync() if self._several and not last else contextlib.nullcontext()

    def norm(self, own: float) -> float:
        """Norm of the whole gradient, from `own`, the norm of this part."""
        return own

    def whole(self, name: str, own: torch.Tensor) -> torch.Tensor:
        """The whole parameter `name`, or its whole moment `name/moment`, from `own`, the part of this process. A scalar
        is equal in all processes. All processes call this method together."""
        return own

    def own(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """The part of `whole` that belongs to this process."""
        return whole


class ShardedModel(ModelPart):
    """Every process has a shard of each parameter; layers are gathered for use (FSDP2, `fully_shard`).

    FSDP's shards are views of the plain parameters' memory, so a shard must fill this memory exactly. Each parameter is
    therefore divided evenly, along its first dimension that allows it. (accelerate's plugin would choose the dimension
    itself, pad, and keep the padded copy.)
    """

    def __init__(self, model: torch.nn.Module, accelerator: Accelerator, inside: Inside) -> None:
        self._inside = inside
        kind = accelerator.device.type
        self._mesh = init_device_mesh(kind, (inside.size,))
        policy = MixedPrecisionPolicy()
        if kind == "cuda" and accelerator.mixed_precision == "bf16":  # gathering bf16 halves the transferred bytes
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        self.shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        self._places = {name: Shard(_divided(name, shape, inside.size)) for name, shape in self.shapes.items()}
        # Keyed by id, since a reference would keep whole parameters on the device until all are divided.
        place_of = {id(parameter): self._places[name] for name, parameter in model.named_parameters()}
        layers = set(model._no_split_modules or ())
        for module in [*(each for each in model.modules() if type(each).__name__ in layers), model]:
            # This includes the model itself: parameters that stay gathered after a forward would miss the next change.
            fully_shard(
                module,
                mesh=self._mesh,
                reshard_after_forward=True,
                shard_placement_fn=lambda parameter: place_of[id(parameter)],
                mp_policy=policy,
            )
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no mean
                module.set_gradient_divide_factor(1.0)
        self.model = model
        self.parameters = {
            name: torch.nn.Parameter(parameter.to_local().detach()) for name, parameter in model.named_parameters()
        }

    def use_memory(self) -> None:
        shards = {name: self._distributed(name, parameter.data) for name, parameter in self.parameters.items()}
        self.model.load_state_dict(shards, strict=False, assign=True)
        self._shards = dict(self.model.named_parameters())

    def use_gradients(self) -> None:
        for name, parameter in self.parameters.items():
            assert parameter.grad is not None
            self._shards[name].grad = self._distributed(name, parameter.grad)

    def accumulating(self, last: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # shards are summed after every backward, since no whole gradient is kept

    def norm(self, own: float) -> float:
        return float(self._inside.total(own**2) ** 0.5)

    def whole(self, name: str, own: torch.Tensor) -> torch.Tensor:
        return self._distributed(name, own).full_tensor() if own.ndim else own

    def own(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        return whole.chunk(self._inside.size, self._place(name).dim)[self._inside.rank] if whole.ndim else whole

    def _distributed(self, name: str, own: torch.Tensor) -> DTensor:
        return DTensor.from_local(own, self._mesh, [self._place(name)], run_check=False)

    def _place(self, name: str) -> Shard:
        return self._places[name.partition("/")[0]]


class Gathered(Mapping[str, torch.Tensor]):
    """Whole tensors, each gathered when it is read, and not stored. All processes read them in the same order."""

    def __init__(self, part: ModelPart, own: Tensors) -> None:
        self._part, self._own = part, own

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._part.whole(name, self._own[name].detach())

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)


def part_of(model: torch.nn.Module, sharding: Sharding, accelerator: Accelerator, inside: Inside) -> ModelPart:
    """The part of the model for this process. Raises `ValueError` if the model cannot be divided evenly."""
    return (ModelPart if sharding == "none" else ShardedModel)(model, accelerator, inside)


def _divided(name: str, shape: tuple[int, ...], parts: int) -> int:
    """The dimension along which a parameter is divided."""
    for dimension, size in enumerate(shape):
        if size and size % parts == 0:
            return dimension
    raise ValueError(
        f"parameter {name} of shape {list(shape)} cannot be divided evenly among {parts} processes; choose"
        " training.processes so that it divides one side of every parameter, or training.sharding none"
    )


def _sum(bucket: distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Reduce DDP's bucket of gradients without the division by the number of processes."""
    work = distributed.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


# --- files -----------------------------------------------------------------------------------------------------------

MODEL, OPTIMISER = "model.safetensors", "optimizer.safetensors"


def load_or_make(directory: Path, dtype: torch.dtype) -> torch.nn.Module:
    """The model of a directory, in `dtype`; with random weights if the directory has none yet."""
    if any(directory.glob("*.safetensors")):
        return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    config = AutoConfig.from_pretrained(directory)
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def save_files(
    directory: Path,
    part: ModelPart,
    files: Mapping[str, Mapping[str, torch.Tensor]],
    config: PretrainedConfig | None,
) -> None:
    """Write `files`, which map file names to this process's tensors by name. The one process with a `config` writes;
    the others contribute their parts."""
    if config is not None:
        directory.mkdir(parents=True, exist_ok=True)
        config.save_pretrained(directory)
    for name, own in files.items():
        whole = Gathered(part, own)
        if config is not None:
            unfinished = directory / f"{name}.part"
            tensors = {key: tensor.cpu().contiguous() for key, tensor in whole.items()}
            save_file(tensors, unfinished, metadata={"format": "pt"})
            _read_back(unfinished, tensors)
            unfinished.rename(directory / name)
        else:
            for key in whole:
                whole[key]


def _read_back(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise `OSError` if the file on disk does not contain these tensors."""
    with open(file, "rb") as written:
        os.fsync(written.fileno())
        os.posix_fadvise(written.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with safe_open(file, framework="pt") as saved:
        for name, tensor in tensors.items():
            if not torch.equal(saved.get_tensor(name), tensor):
                raise OSError(f"{file.name}: {name} cannot be read back as it was written; check the disk")


def load_file(file: Path, part: ModelPart, own: Mapping[str, torch.Tensor]) -> None:
    """Load this process's part of each tensor in the file, one tensor at a time."""
    with torch.no_grad(), safe_open(file, framework="pt") as saved:
        for name, tensor in own.items():
            tensor.copy_(part.own(name, saved.get_tensor(name)))
