"""Arguments of an engine by device, as a table; draining against a core that counts."""

from __future__ import annotations

from collections import deque
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest

from libra.backends.transport.engine_messages import StartEngine
from libra.backends.transport.messages import Tensor
from libra.backends.vllm.adapter import drained, engine_arguments

LAYOUT = (Tensor("w", (2,), 0, "bfloat16"),)


def start(**settings: Any) -> StartEngine:
    fixed: dict[str, Any] = {"buffer_bytes": 64, "seed": 3, "share": 1.0, "cores": (0,), "refresh_kv": False}
    return StartEngine("model", 512, 8, "bfloat16", 1 << 20, LAYOUT, **fixed, **settings)


@pytest.mark.parametrize(
    ("order", "wanted", "absent"),
    [
        (
            start(),
            {"enforce_eager": True, "async_scheduling": False, "kv_cache_memory_bytes": 1 << 20},
            {"gpu_memory_utilization", "load_format", "tensor_parallel_size", "enable_sleep_mode"},
        ),
        (
            start(device="cuda", memory=0.25, graphs=True, asynchronous=True, max_num_batched_tokens=4096),
            {
                "gpu_memory_utilization": 0.225,
                "load_format": "dummy",
                "enforce_eager": False,
                "async_scheduling": True,
                "max_num_batched_tokens": 4096,
            },
            {"tensor_parallel_size"},
        ),
        (start(device="cuda", gpus=4), {"tensor_parallel_size": 4, "gpu_memory_utilization": 0.9}, set()),
        (start(device="cuda", sleeps=True), {"enable_sleep_mode": True}, {"tensor_parallel_size"}),
    ],
)
def test_arguments_follow_from_the_order(order: StartEngine, wanted: dict[str, Any], absent: set[str]) -> None:
    found = engine_arguments(order)
    assert {name: found[name] for name in wanted} == wanted
    assert not absent & set(found)


@pytest.mark.integration
def test_the_vllm_that_is_installed_knows_all_arguments() -> None:
    from vllm import EngineArgs

    known = {field.name for field in fields(EngineArgs)}
    order = start(device="cuda", gpus=2, max_num_batched_tokens=64, sleeps=True)
    assert set(engine_arguments(order)) <= known
    assert {"worker_extension_cls", "distributed_executor_backend", "weight_transfer_config"} <= known


@pytest.mark.integration
def test_batches_in_flight_are_finished_and_none_is_scheduled() -> None:
    states: list[str] = []
    core = SimpleNamespace(
        batch_queue=deque(["first", "second"]),
        scheduler=SimpleNamespace(set_pause_state=lambda state: states.append(state.name)),
    )
    assert list(drained(core, core.batch_queue.popleft)) == ["first", "second"]
    assert states == ["PAUSED_ALL", "UNPAUSED"]
    assert list(drained(SimpleNamespace(batch_queue=None), lambda: "")) == []
