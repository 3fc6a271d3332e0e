"""Parts of a run on its devices, each with checks of its own: engines under updates, training, weights, joins."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from benchmarks.command import apart
from benchmarks.gpu.orders import Stage, gap, plain_rate, step, turn, update
from benchmarks.gpu.setting import Setting, generated, lost, parameters
from benchmarks.rows import Row, at_least, at_most, none
from libra.backends.grpo.trainers import Trainers
from libra.backends.launch.handle import Handle
from libra.backends.transport.engine_messages import LoadWeights, Piece

_UPDATES = 5
_STATE_BYTES = 16  # a parameter: weights, two moments and a gradient in float32
_JOINS_AFTER = 3  # steps
_OF_PLAIN = 0.95  # of the tokens a second of vLLM by itself
_PRODUCT = 8192  # rows and columns of a large product on a GPU


async def engines(setting: Setting, directory: Path) -> list[Row]:
    """Updates under turns that go on: none is lost, and log-probs are the trainer's."""
    async with Stage.open(setting, directory, setting.model) as stage:
        trainer, ready, checksum = await stage.first("trainer")
        began = time.monotonic()
        engine, order = await stage.engine("engine", ready)
        started = time.monotonic() - began
        await engine.load(LoadWeights(0, 0, checksum))
        made: dict[str, list[Piece]] = {f"turn-{number}": [] for number in range(setting.turns)}
        turns = [
            asyncio.create_task(engine.generate(turn(name, setting.tokens, number), pieces.append))
            for number, (name, pieces) in enumerate(made.items())
        ]
        loads = [await update(trainer, engine, setting, version) for version in range(1, _UPDATES + 1)]
        await asyncio.gather(*turns)
        lengths = [sum(len(piece.tokens) for piece in pieces) for pieces in made.values()]
        off, versions = await gap(engine, trainer, turn("fresh", setting.tokens, 0, salt="fresh"))
        began = time.monotonic()
        many = [turn(f"many-{number}", setting.tokens, number) for number in range(2 * setting.turns)]
        await asyncio.gather(*(engine.generate(each, lambda piece: None) for each in many))
        rate = len(many) * setting.tokens / (time.monotonic() - began)
        await asyncio.gather(engine.stop(), trainer.stop())
    plain = apart(plain_rate, setting, stage.model, order.kv_cache_bytes, len(many))
    case = f"{setting.turns} turns, {_UPDATES} updates"
    return [
        Row(case, "start of an engine", started, "s"),
        none(case, "turns that lack tokens", sum(length != setting.tokens for length in lengths)),
        none(case, "tokens of the last version that say another", sum(version != _UPDATES for version in versions)),
        at_most(case, "log-prob off the trainer's", off, "", setting.gap),
        Row(case, "engine stood still for an update, median", median(loads), "s"),
        Row(case, f"tokens a second of {len(many)} turns", rate, "tokens/s"),
        Row(case, "the same of vLLM by itself", plain, "tokens/s"),
        at_least(case, "tokens a second / vLLM's", rate / plain, "", _OF_PLAIN if setting.gpu is not None else None),
    ]


async def train(setting: Setting, directory: Path) -> list[Row]:
    """Steps of one trainer: seconds, and memory that shows where its state is."""
    async with Stage.open(setting, directory, setting.trained) as stage:
        idle = Handle(await stage.launcher.spawn("idle", 1), lost)
        before = setting.memory_used(idle)
        trainer, _ = await stage.trainer("trainer", 1.0)
        steps, exchanged, published = [], [], []
        for version in range(1, 4):
            done, seconds = await step(trainer, setting, version)
            steps.append(seconds)
            exchanged.append(done.gradient_norm)
            published.append(done.publish_seconds)
        used = setting.memory_used(trainer) - (before if setting.gpu is not None else 0)
        await trainer.stop()
        idle.close()
    tokens, size = sum(len(sample.tokens) for sample in setting.samples()), parameters(stage.model)
    flops = 6 * size * tokens / min(steps)
    case = f"{size / 1e9:.3g} B parameters, {tokens} tokens a step"
    return [
        Row(case, "step, the best", min(steps), "s"),
        Row(case, "training", flops / 1e12, "TFLOP/s"),
        Row(case, "training / a large product's FLOP/s (MFU)", flops / apart(product_flops, setting), ""),
        Row(case, "publication, the best", min(published), "s"),
        none(case, "norms of gradients that are no number above 0", sum(not norm > 0 for norm in exchanged)),
        at_least(case, "memory of the device", used / 2**30, "GiB", _STATE_BYTES * size / 2**30),
    ]


def product_flops(setting: Setting) -> float:
    """FLOP/s of a large matrix product in the arithmetic of training, on the device: the best of a few."""
    import torch

    os.environ |= setting.environment
    on_gpu = setting.gpu is not None
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    torch.set_num_threads(1)  # as a CPU slot has
    size, seconds = _PRODUCT if on_gpu else _PRODUCT // 16, []
    one = torch.randn(size, size, device=device, dtype=dtype)
    for _ in range(10):
        began = time.monotonic()
        _ = one @ one
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.monotonic() - began)
    return 2 * size**3 / min(seconds)


def weights(setting: Setting, directory: Path) -> list[Row]:
    """Copies of weights to and from pinned shared memory, and their hash."""
    return apart(_weights, setting)


def _weights(setting: Setting) -> list[Row]:
    import torch

    from libra.backends.transport.shared_memory import WeightBuffer, create_buffer, device_hash, make_layout

    os.environ |= setting.environment
    on_gpu = setting.gpu is not None
    device = torch.device("cuda" if on_gpu else "cpu")
    layout, size = make_layout([("w", (setting.buffer // 2,))], "bfloat16")
    buffer = WeightBuffer(create_buffer(), size)
    if on_gpu:
        buffer.pin()
    made = {"w": torch.ones(setting.buffer // 2, dtype=torch.bfloat16, device=device)}

    def seconds(call: Callable[[], object]) -> float:
        found = []
        for _ in range(3):
            began = time.monotonic()
            call()
            if on_gpu:
                torch.cuda.synchronize()
            found.append(time.monotonic() - began)
        return min(found)

    up = seconds(lambda: buffer.write(0, layout, made, hashed=True))
    checksum = buffer.write(0, layout, made, hashed=True)
    down = seconds(lambda: made["w"].copy_(dict(buffer.read(0, layout, checksum))["w"]))
    hashed = seconds(lambda: device_hash(made["w"]))
    case = f"{size / 2**30:.3g} GiB"
    return [
        Row(case, "publication", up, "s"),
        Row(case, "load", down, "s"),
        at_most(case, "hash / publication", hashed / up, "", 0.1 if on_gpu else None),
    ]


async def join(setting: Setting, directory: Path) -> list[Row]:
    """A replica that joins another on the same device, while that makes steps."""
    samples = setting.samples()
    async with Stage.open(setting, directory, setting.model) as stage:
        core, _ = await stage.trainer("core-0")
        follower, _ = await stage.trainer("hybrid-0")
        trainers = Trainers(core, lambda replica: stage.launcher.kill(replica.link))
        version, replicas, began = 0, 1, 0.0
        joining: asyncio.Task[float] | None = None
        together = 0
        while together < 2:
            version += 1
            if version == _JOINS_AFTER:
                began, joining = time.monotonic(), asyncio.create_task(trainers.join(follower))
            result = await trainers.step(version, samples, len(samples), generated(samples))
            replicas = result.replicas
            together += replicas == 2  # a step of replicas with different parameters raises
        assert joining is not None
        held, took = await joining, time.monotonic() - began
        await asyncio.gather(core.stop(), follower.stop())
    case = f"{version} steps"
    return [
        Row(case, "from the order to two steps together", took, "s"),
        Row(case, "a step waited for it", held, "s"),
        at_least(case, "replicas of the last step", replicas, "", 2),
    ]
