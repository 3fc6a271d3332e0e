"""Eager execution is never faster than fused kernels, which do the same products with fewer passes over memory."""

from __future__ import annotations

from typing import get_args

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from libra.config.recipe import Execution, TrainingBytes
from libra.cost.sources.rates import training_rates
from libra.cost.train_batch import Batch
from libra.cost.train_memory import Reference, memory_columns
from libra.cost.train_passes import Work
from libra.cost.train_step import step_table
from libra.cost.transfer import fabric
from libra.hardware.cluster import GPUS, NodeClass
from libra.hardware.model_file import load_model
from libra.plan.options.layout_space import families_of, members_of

NAMES = ("Qwen3-0.6B", "Qwen3-8B", "Llama-3.3-70B-Instruct", "Qwen3-30B-A3B", "Mixtral-8x7B-v0.1", "DeepSeek-V2-Lite")
MODELS = {name: load_model(name) for name in NAMES}


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(NAMES),
    st.sampled_from(sorted(GPUS)),
    st.sampled_from([1, 4, 8]),
    st.sampled_from([1, 2, 6]),
    st.lists(st.floats(64, 32_768), min_size=1, max_size=4, unique=True),
    st.sampled_from([TrainingBytes(2, 2, 4), TrainingBytes(2, 4, 12), TrainingBytes(4, 4, 8, compute=2)]),
    st.sampled_from(get_args(Reference)),
)
@example("Qwen3-0.6B", "H200", 8, 2, [17271.0], TrainingBytes(4, 4, 8, compute=2), "none")  # two exchanges, one pass
def test_no_layout_is_faster_or_smaller_eagerly(
    name: str, gpu: str, gpus: int, count: int, lengths: list[float], state: TrainingBytes, reference: Reference
) -> None:
    model, nodes = MODELS[name], NodeClass("n", count, gpus, GPUS[gpu], GPUS[gpu].link, 25e9)
    batch = Batch(tuple(sorted(lengths, reverse=True)), tuple(32.0 for _ in lengths))
    _, table = members_of(families_of(model, nodes, 32_768), [gpus * count], 64)
    table = table.take(np.arange(0, len(table), max(1, len(table) // 400)))

    def seconds_and_bytes(execution: Execution) -> tuple[np.ndarray, np.ndarray]:
        rates = training_rates(nodes.gpu, "bf16", execution)
        steps = step_table(Work(model, batch, state, reference, nodes.gpu, rates, fabric(nodes)), table)
        memory = memory_columns(model, table, 32_768, nodes.gpu.memory, state, reference, execution)
        return steps.total, np.sum(list(memory.values()), axis=0)

    (eager, more), (fused, less) = seconds_and_bytes("eager"), seconds_and_bytes("fused")
    assert (eager >= fused * (1 - 1e-9)).all(), table.layout(int(np.argmin(eager / fused))).name
    assert (more >= less * (1 - 1e-9)).all()
