"""Training steps that were measured on a GPU, beside their prices: seconds of a step, and peak memory.

Invariant: a step is priced as it ran, eagerly and on one device in one micro-batch; the constants of that price are in
`libra.cost.sources.rates`, and nothing is fitted here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from benchmarks.fidelity.fields import Fields
from benchmarks.fidelity.gpu_data import document, files
from benchmarks.rows import Row, at_most, none
from libra.config.recipe import TrainingBytes
from libra.config.yaml_file import ConfigError, refusal
from libra.cost.sources.rates import training_rates
from libra.cost.train_batch import Batch
from libra.cost.train_memory import training_memory
from libra.cost.train_passes import Work
from libra.cost.train_step import train_step
from libra.cost.transfer import fabric
from libra.hardware.cluster import GPU, NodeClass
from libra.hardware.model_file import load_model
from libra.hardware.parallel import ParallelLayout, Recompute

TIME, MEMORY = 0.10, 0.08  # mean over the sizes; each
_BYTES = {  # AdamW's moments have the parameters' type
    "torch.float32": TrainingBytes(4, 4, 8, compute=2),
    "torch.bfloat16": TrainingBytes(2, 2, 4),
}
_LARGEST = "torch.float32"


@dataclass(frozen=True, slots=True)
class Step:
    """One size. Seconds are of forward, backward and update; without them it ran out of memory."""

    name: str
    measured: float | None
    predicted: float
    peak: float  # bytes
    predicted_peak: float  # without what a margin is for: the CUDA context, fragmentation
    possible: bool  # by the price, margin included


def price_steps(folder: Path, gpu: GPU) -> tuple[tuple[Step, ...], tuple[ConfigError, ...]]:
    """Priced steps of the folder's files that are lists, such as `training.json`, and the reasons for refused rows:
    not of the format, or of a model or a type that is not known."""
    steps: list[Step] = []
    refused: list[ConfigError] = []
    for path in files(folder):
        try:
            found = document(path)
        except ConfigError as error:
            refused.append(error)
            continue
        if not isinstance(found, list):
            continue
        rows = [Fields(row if isinstance(row, dict) else {}, f"[{place}]") for place, row in enumerate(found)]
        # Of a step that ran out of memory the type was not written: that of the model's others.
        types = {row.data.get("model"): row for row in rows if row.given("param_dtype")}
        for row in rows:
            try:
                steps.append(_step(row, gpu, _state(types.get(row.data.get("model")))))
            except ValueError as error:
                refused.append(refusal(path, str(error)))
    return tuple(steps), tuple(refused)


def _state(row: Fields | None) -> TrainingBytes:
    dtype = _LARGEST if row is None else row.text("param_dtype")
    if row is not None and dtype not in _BYTES:
        raise row.refusal("param_dtype", f"is {dtype}, none of {', '.join(_BYTES)}")
    return _BYTES[dtype]


def rows(steps: Sequence[Step]) -> list[Row]:
    """In percent."""
    done = [step for step in steps if step.measured is not None]
    if not done:
        return []
    times = [_relative(step.predicted, step.measured) for step in done]
    peaks = [_relative(step.predicted_peak, step.peak) for step in done]
    wrong = sum(step.possible for step in steps if step.measured is None)
    missed = sum(not step.possible for step in done)
    return [
        at_most("training", "mean error of seconds", 100 * fmean(map(abs, times)), "%", 100 * TIME),
        at_most("training", "largest error of peak memory", 100 * max(map(abs, peaks)), "%", 100 * MEMORY),
        none("training", "called possible, ran out of memory", wrong),
        Row("training", "called impossible, ran", missed, ""),
    ]


def show(steps: Sequence[Step], gpu: GPU, console: Console) -> None:
    if not steps:
        return
    table = Table(title=f"training steps, eager, {gpu.name}")
    for column in ("step", "seconds", "predicted", "error", "peak, GB", "predicted", "error", "possible"):
        table.add_column(column, justify="left" if column == "step" else "right")
    for step in steps:
        ran = step.measured is not None
        table.add_row(
            step.name,
            f"{step.measured:.3f}" if step.measured is not None else "out of memory",
            f"{step.predicted:.3f}",
            f"{100 * _relative(step.predicted, step.measured):+.1f} %" if ran else "",
            f"{step.peak / 1e9:.1f}",
            f"{step.predicted_peak / 1e9:.1f}",
            f"{100 * _relative(step.predicted_peak, step.peak):+.1f} %" if ran else "",
            "yes" if step.possible else "no",
        )
    console.print(table)


def _step(row: Fields, gpu: GPU, state: TrainingBytes) -> Step:
    name, length, count = row.text("model"), row.count("seq"), row.count("batch")
    try:
        model = load_model(name)
    except ConfigError as error:
        raise ValueError(f"{row.name}.model: {error}") from None
    recompute: Recompute = "full" if row.flag("recompute") else "none"
    layout = ParallelLayout(1, 1, 1, 1, 1, length * count, recompute, "zero1", True)
    nodes = NodeClass("node", 1, 1, gpu, gpu.link, 25e9)
    batch = Batch((float(length),), (float(count),))
    work = Work(model, batch, state, "none", gpu, training_rates(gpu, "bf16", "eager"), fabric(nodes))
    step = train_step(work, layout)
    memory = training_memory(model, layout, length * count, gpu.memory, state, "none", "eager", accumulated=False)
    return Step(
        f"{name}, {count} x {length:,}, recomputation {recompute}",
        None if row.given("error") else row.positive("forward_backward") + row.number("optimizer"),
        step.total - step.forwards,
        row.positive("peak_bytes"),
        memory.total - memory.margin,
        memory.total <= gpu.memory,
    )


def _relative(predicted: float, measured: float | None) -> float:
    assert measured is not None
    return predicted / measured - 1
