"""Replicas in processes of their own, one or several each, that join, leave, are killed and are stopped train what one
process alone trains."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from fakes.samples import LIMITS, STEPS, batch, counts, distance
from fakes.stage import ONE_PROCESS, Division, Stage, Tensors, cpu_nanoseconds, is_gone, open_stage, step, steps_beside
from msgspec.structs import replace

from libra.backends.grpo.membership import Patience
from libra.backends.grpo.trainers import Trainers
from libra.backends.launch.handle import Handle
from libra.backends.transport.messages import Acknowledged, Precision
from libra.backends.transport.trainer_messages import (
    Identify,
    LoadCheckpoint,
    MeasureTraining,
    Publish,
    Published,
    SaveCheckpoint,
    Score,
    Scored,
    StateDigest,
    TrainingMeasured,
    WarmedUp,
    WarmUp,
)
from libra.exec.protocols import WorkerFailedError

pytestmark = pytest.mark.integration

SHARDED, WHOLE = Division(2, "fsdp2"), Division(2, "none")
SLOW = 0.05  # share of a core: it sleeps long between its backward pass and the exchange


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with open_stage(tmp_path_factory.mktemp("replicas")) as stage:
        yield stage


def on_stage(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Let a test run on the event loop that the stage's fork server belongs to."""

    @wraps(test)
    def run(stage: Stage, **arguments: Any) -> None:
        stage.runner.run(test(stage, **arguments))

    return run


def peers(replica: Handle) -> list[int]:
    return [child.pid for child in psutil.Process(replica.link.pid).children()]


async def alone(replica: Handle, stage: Stage, versions: range) -> None:
    trainers = Trainers(replica, stage.kill)
    for version in versions:
        await step(trainers, version)


@pytest.mark.parametrize(
    ("division", "precision", "elsewhere"),
    [
        (ONE_PROCESS, "fp64", False),
        (ONE_PROCESS, "fp64", True),
        (ONE_PROCESS, "fp32", False),
        (ONE_PROCESS, "fp32", True),
        (SHARDED, "fp64", True),
        (SHARDED, "fp32", False),
        (WHOLE, "fp64", False),
    ],
)
@on_stage
async def test_a_replica_joins_at_step_7_and_leaves_at_step_13(
    stage: Stage, division: Division, precision: Precision, elsewhere: bool
) -> None:
    trainers = await stage.two_cores(precision, division=division)
    hybrid = await stage.hire("hybrid-0", precision, seed=2, division=division, elsewhere=elsewhere)
    assert [await step(trainers, version) for version in range(1, 5)] == [2] * 4
    await steps_beside(trainers, range(5, 7), asyncio.create_task(trainers.join(hybrid)))
    connections = psutil.Process(hybrid.link.pid).net_connections()
    assert any(connection.laddr.ip == "127.0.0.2" for connection in connections) == elsewhere
    assert [await step(trainers, version) for version in range(7, 13)] == [3] * 6
    others = peers(hybrid)
    assert len(others) == division.processes - 1
    await (await trainers.leave("hybrid-0")).stop()
    assert all(is_gone(pid) for pid in others)
    assert [await step(trainers, version) for version in range(13, STEPS + 1)] == [2] * 8
    await stage.end(trainers, precision)


@pytest.mark.parametrize(
    ("division", "precision", "process"),
    [
        (ONE_PROCESS, "fp64", 0),
        (ONE_PROCESS, "fp32", 0),
        (SHARDED, "fp64", 1),
        (SHARDED, "fp32", 0),
        (WHOLE, "fp32", 1),
    ],
)
@on_stage
async def test_a_process_is_killed_in_the_middle_of_step_17(
    stage: Stage, division: Division, precision: Precision, process: int
) -> None:
    trainers = await stage.two_cores(precision, division=division)
    hybrid = await stage.hire("hybrid-0", precision, seed=2, share=SLOW, division=division)
    assert [await step(trainers, version) for version in range(1, 13)] == [2] * 12
    await steps_beside(trainers, range(13, 15), asyncio.create_task(trainers.join(hybrid)))
    assert [await step(trainers, version) for version in range(15, 17)] == [3] * 2

    processes = [hybrid.link.pid, *peers(hybrid)]
    idle = cpu_nanoseconds(trainers.core)
    os.kill(processes[process], signal.SIGSTOP)  # so that it has not given its share before it is killed
    stepping = asyncio.create_task(step(trainers, 17))
    while cpu_nanoseconds(trainers.core) == idle:  # until the step has begun
        await asyncio.sleep(0.001)
    os.kill(processes[process], signal.SIGKILL)
    assert await stepping == 2  # its share was made by the others, in this step
    assert trainers.names() == ("core-0", "core-1") and all(is_gone(pid) for pid in processes)
    # The leader knows whom it misses, whatever it was about when that one left.
    killed = "BrokenReplicaError: process 1 of the replica has ended: killed by signal 9"
    assert stage.lost["hybrid-0"].endswith(killed if process else "the worker closed the connection")
    assert [await step(trainers, version) for version in range(18, STEPS + 1)] == [2] * 3
    await stage.end(trainers, precision)


@pytest.mark.parametrize(
    ("division", "precision", "process"), [(ONE_PROCESS, "fp64", 0), (ONE_PROCESS, "fp32", 0), (SHARDED, "fp32", 1)]
)
@on_stage
async def test_a_process_that_is_stopped_is_found_and_its_share_made_by_the_others(
    stage: Stage, division: Division, precision: Precision, process: int
) -> None:
    trainers = await stage.two_cores(precision, Patience(floor=2.0, grace=1.0), division)
    hybrid = await stage.hire("hybrid-0", precision, seed=2, division=division)
    await trainers.join(hybrid)
    assert await step(trainers, 1) == 3
    processes = [hybrid.link.pid, *peers(hybrid)]
    os.kill(processes[process], signal.SIGSTOP)
    assert [await step(trainers, version) for version in range(2, 7)] == [2] * 5
    assert hybrid.lost and all(is_gone(pid) for pid in processes)
    await stage.end(trainers, precision, steps=6)


@on_stage
async def test_a_joiner_of_another_node_whose_relay_is_killed_gets_another_one(stage: Stage) -> None:
    trainers = await stage.two_cores("fp32")
    hybrid = await stage.hire("hybrid-0", "fp32", seed=2, elsewhere=True)
    core = psutil.Process(trainers.core.link.pid)
    joining = asyncio.create_task(trainers.join(hybrid))
    while not core.children():
        await asyncio.sleep(0.001)
    [relay] = core.children()
    relay.kill()
    await steps_beside(trainers, range(1, 11), joining)
    assert relay not in core.children()
    assert [await step(trainers, version) for version in range(11, STEPS + 1)] == [3] * 10
    await stage.end(trainers, "fp32")


@on_stage
async def test_when_the_first_core_is_killed_the_second_goes_on(stage: Stage) -> None:
    trainers = await stage.two_cores("fp32")
    await trainers.join(await stage.hire("hybrid-0", "fp32", seed=2))
    assert [await step(trainers, version) for version in range(1, 11)] == [3] * 10
    os.kill(trainers.core.link.pid, signal.SIGKILL)
    assert [await step(trainers, version) for version in range(11, 14)] == [2] * 3
    assert trainers.names() == ("core-1", "hybrid-0")
    await trainers.join(await stage.hire("hybrid-1", "fp32", seed=3))
    assert [await step(trainers, version) for version in range(14, STEPS + 1)] == [3] * 7
    await stage.end(trainers, "fp32")


@on_stage
async def test_a_process_that_dies_while_nothing_is_to_be_done_takes_its_replica_along(stage: Stage) -> None:
    replica = await stage.hire("idle", "fp32", division=SHARDED)
    processes = [replica.link.pid, *peers(replica)]
    os.kill(processes[1], signal.SIGKILL)
    while not replica.lost:
        await asyncio.sleep(0.01)
    assert all(is_gone(pid) for pid in processes)
    assert stage.lost["idle"].endswith("BrokenReplicaError: process 1 of the replica has ended: killed by signal 9")


@pytest.mark.parametrize(("before", "after"), [(SHARDED, ONE_PROCESS), (ONE_PROCESS, SHARDED), (WHOLE, SHARDED)])
@on_stage
async def test_a_checkpoint_is_gone_on_with_by_another_number_of_processes(
    stage: Stage, before: Division, after: Division, tmp_path: Path
) -> None:
    start, wanted = await stage.reference("fp64", steps=6)
    first = await stage.hire("first", "fp64", division=before)
    await alone(first, stage, range(1, 4))
    await first.ask(SaveCheckpoint(str(tmp_path), optimiser=True), Acknowledged)
    await first.stop()
    second = await stage.hire("second", "fp64", seed=3, division=after)
    await second.ask(LoadCheckpoint(str(tmp_path)), Acknowledged)
    await alone(second, stage, range(4, 7))
    assert distance(await stage.parameters(second), wanted, start) <= LIMITS["fp64"]
    await second.stop()


@on_stage
async def test_what_a_sharded_replica_publishes_scores_and_measures(stage: Stage) -> None:
    one = await stage.hire("one", "fp32")
    two = await stage.hire("two", "fp32", division=SHARDED)
    samples = [sample.tokens for sample in batch(1)]
    found, wanted = [(await replica.ask(Score(samples), Scored)).logprobs for replica in (two, one)]
    for there, here in zip(found, wanted, strict=True):
        assert there == pytest.approx(here, abs=1e-5)

    before = await stage.parameters(two)
    measured = await two.ask(MeasureTraining([[6, 9, 20], [12]], 2), TrainingMeasured)
    assert not measured.failure and len(measured.batches) == 4
    assert all(tokens >= least for (tokens, _), least in zip(measured.batches, [35, 12, 35, 12], strict=True))
    after = await stage.parameters(two)
    assert all(torch.equal(before[name], after[name]) for name in before)

    # The same model in the same layout.
    published = [(await replica.ask(Publish(0, 0), Published)).checksum for replica in (two, one)]
    assert published[0] == published[1]
    sizes = [(await replica.ask(Identify(), StateDigest)).size for replica in (two, one)]
    assert sizes[0] <= 1.02 * sizes[1]  # of both processes together
    for replica in (one, two):
        await replica.stop()


@pytest.mark.parametrize("division", [SHARDED, WHOLE])
@on_stage
async def test_the_gradient_is_clipped_by_the_norm_of_all_of_it(stage: Stage, division: Division) -> None:
    results = []
    for name, kind in (("one", ONE_PROCESS), ("two", division)):
        replica = await stage.hire(name, "fp64", division=kind)
        start = await stage.parameters(replica)
        trainers = Trainers(replica, stage.kill)
        norms = []
        # AdamW does not see the scale of one step alone.
        for version, loudness in ((1, 100.0), (2, 1.0), (3, 1000.0)):
            samples = [replace(sample, advantage=loudness * sample.advantage) for sample in batch(version)]
            norms.append((await trainers.step(version, samples, *counts(samples))).gradient_norm)
        results.append((norms, await stage.parameters(replica)))
        await replica.stop()
    (norms, wanted), (found_norms, found) = results
    assert norms[0] > 1 > norms[1]
    assert found_norms == pytest.approx(norms, rel=1e-9)
    assert distance(found, wanted, start) <= LIMITS["fp64"]


@pytest.mark.parametrize("division", [SHARDED, WHOLE])
@on_stage
async def test_warming_up_is_that_of_one_process(stage: Stage, division: Division) -> None:
    demonstrated = [(sample.tokens, sample.generated) for sample in batch(1)]
    results = []
    for number, kind in enumerate((ONE_PROCESS, division)):
        replica = await stage.hire(f"warm-{number}", "fp64", division=kind)
        start = await stage.parameters(replica)
        losses = [(await replica.ask(WarmUp(demonstrated, 1e-3), WarmedUp)).loss for _ in range(3)]
        results.append((losses, await stage.parameters(replica)))
        await replica.stop()
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-12)
    assert distance(results[1][1], results[0][1], start) <= LIMITS["fp64"]


@on_stage
async def test_a_model_that_cannot_be_divided_is_refused(stage: Stage) -> None:
    with pytest.raises(WorkerFailedError, match=r"parameter transformer.wte.weight of shape \[32, 32\] cannot be"):
        await stage.hire("three", "fp32", division=Division(3, "fsdp2"))


def test_a_sharded_model_keeps_its_ties(tmp_path: Path) -> None:
    async def trained(stage: Stage, name: str, division: Division) -> Tensors:
        replica = await stage.hire(name, "fp64", division=division)
        await alone(replica, stage, range(1, 4))
        return await stage.parameters(replica)

    async def both(stage: Stage) -> tuple[Tensors, Tensors]:
        return await trained(stage, "whole", ONE_PROCESS), await trained(stage, "sharded", SHARDED)

    with open_stage(tmp_path) as stage:
        file = stage.directory / "model" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": True}))
        whole, sharded = stage.runner.run(both(stage))
    assert whole.keys() == sharded.keys() and "lm_head.weight" not in whole
    for name, tensor in whole.items():
        assert torch.allclose(tensor, sharded[name], rtol=1e-9, atol=1e-12), name
