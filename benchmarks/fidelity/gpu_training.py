"""Training steps that were measured on a GPU, beside their prices: seconds of a step, and peak memory.

Invariant: a step is priced as it ran, eagerly and on one device in one micro-batch; the constants of that price are in
`libra.cost.sources.rates`, and nothing is fitted here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from benchmarks.fidelity.gpu_data import ModelName, Part, documents
from benchmarks.rows import Row, at_most, none
from libra.config.recipe import TrainingBytes
from libra.config.yaml_file import ConfigError, refusal, valid
from libra.cost.sources.rates import training_rates
from libra.cost.train_batch import Batch
from libra.cost.train_memory import training_memory
from libra.cost.train_passes import Work
from libra.cost.train_step import train_step
from libra.cost.transfer import fabric
from libra.hardware.cluster import GPU, NodeClass
from libra.hardware.model_file import load_model
from libra.hardware.parallel import ParallelLayout, Recompute

TIME, MEMORY = 10.0, 8.0  # percent: mean over the sizes; each
_BYTES = {"torch.float32": TrainingBytes(4, 4, 8, compute=2), "torch.bfloat16": TrainingBytes(2, 2, 4)}


class _Step(Part):
    """One size. Seconds are of forward, backward and update; with an `error` it ran out of memory. AdamW's moments have
    the parameters' type; of a step that failed it was not written, and is that of the model's others."""

    model: ModelName
    recompute: bool
    seq: PositiveInt
    batch: PositiveInt
    param_dtype: Literal["torch.float32", "torch.bfloat16"] | None = None
    error: str | None = None
    forward_backward: PositiveFloat = 0
    optimizer: NonNegativeFloat = 0
    peak_bytes: PositiveFloat


def training_rows(folder: Path, gpu: GPU) -> tuple[list[Row], list[ConfigError]]:
    """Errors of the steps of the folder's files that are lists, such as `training.json`, in percent; and the reasons
    for refused files and rows."""
    steps, refused = list[_Step](), list[ConfigError]()
    for path, document in documents(folder):
        if isinstance(document, ConfigError):
            refused.append(document)
        for place, row in enumerate(document if isinstance(document, list) else ()):
            try:
                steps.append(valid(_Step, row, f"[{place}]"))
            except ValueError as error:
                refused.append(refusal(path, str(error)))
    return list(_rows(steps, gpu)), refused


def _rows(steps: list[_Step], gpu: GPU) -> Iterator[Row]:
    dtypes = {it.model: it.param_dtype for it in steps if it.param_dtype is not None}
    times, peaks, wrong, missed = list[float](), list[float](), 0, 0
    for it in steps:
        seconds, peak, whole = priced(it, gpu, _BYTES[dtypes.get(it.model, "torch.float32")])
        if it.error is not None:
            wrong += whole <= gpu.memory
            continue
        missed += whole > gpu.memory
        times.append(100 * (seconds / (it.forward_backward + it.optimizer) - 1))
        peaks.append(100 * (peak / it.peak_bytes - 1))
        case = f"{it.model}, {it.batch} x {it.seq:,}, recomputation {'full' if it.recompute else 'none'}"
        yield Row(case, "error of seconds", times[-1], "%")
        yield Row(case, "error of peak memory", peaks[-1], "%")
    if times:
        yield at_most("training", "mean error of seconds", fmean(map(abs, times)), "%", TIME)
        yield at_most("training", "largest error of peak memory", max(map(abs, peaks)), "%", MEMORY)
        yield none("training", "called possible, ran out of memory", wrong)
        yield Row("training", "called impossible, ran", missed, "")


def priced(step: _Step, gpu: GPU, state: TrainingBytes) -> tuple[float, float, float]:
    """Seconds, and bytes at the peak: without what a margin is for (the CUDA context, fragmentation), and with it."""
    model, tokens = load_model(step.model), step.seq * step.batch
    recompute: Recompute = "full" if step.recompute else "none"
    layout = ParallelLayout(1, 1, 1, 1, 1, tokens, recompute, "zero1", True)
    nodes = NodeClass("node", 1, 1, gpu, gpu.link, 25e9)
    batch = Batch((float(step.seq),), (float(step.batch),))
    work = Work(model, batch, state, "none", gpu, training_rates(gpu, "bf16", "eager"), fabric(nodes))
    found = train_step(work, layout)
    memory = training_memory(model, layout, tokens, gpu.memory, state, "none", "eager", accumulated=False)
    return found.total - found.forwards, memory.total - memory.margin, memory.total
