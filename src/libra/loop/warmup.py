"""The supervised warm-up: trains an initial policy on imperfect demonstrations.

Invariant: the warm model depends only on its configuration, the environment and the seed, so it can be cached and
reused. For example, three runs that differ in their learning rate start from the same weights.
"""

from __future__ import annotations

import inspect
import math
import os
import random
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from libra.backends.grpo.trainers import require_sound, start_order
from libra.backends.launch.handle import Handle
from libra.backends.launch.launcher import WorkerLauncher
from libra.backends.tiny_model import TokenizerCodec, write_tiny_model
from libra.backends.transport.messages import Acknowledged, Precision
from libra.backends.transport.trainer_messages import SaveCheckpoint, WarmedUp, WarmUp
from libra.config.cache import cache_directory, cache_key
from libra.config.run import ConfigError, RunConfig
from libra.environments.protocol import Environment
from libra.environments.served import ServedEnvironment
from libra.loop.rollout import Codec
from libra.plan.options.slots import longest_context

_RECIPE = 2  # increase it when the training procedure changes, so that older warm models are not used
_RAMP_STEPS = 50  # steps in which the learning rate rises linearly to its full value
_FINAL_RATE = 0.05  # share of the learning rate at the end; it falls linearly


async def warm_model(
    config: RunConfig,
    environment: Environment | ServedEnvironment,
    launcher: WorkerLauncher,
    precision: Precision,
    progress: Callable[[int, int, float], None],
) -> Path:
    """Directory of the model from which reinforcement learning starts; cached or trained now. `progress` is called
    after every step with the step, the number of steps, and the loss."""
    if config.model.directory is not None and config.warm_up.steps == 0:
        return config.model.directory
    if isinstance(environment, ServedEnvironment):
        raise ConfigError(no_demonstrations(config.environment.kind))
    target = cache_directory() / "warm" / _key(config, environment, precision)
    if target.is_dir():
        return target
    work = target.with_name(f"{target.name}.part{os.getpid()}")
    try:
        if config.model.directory is not None:
            shutil.copytree(config.model.directory, work)
        else:
            longest = longest_context(config.engines)
            write_tiny_model(work, config.model, environment.alphabet, longest)
        await _train(config, environment, launcher, precision, work, progress)
        work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def no_demonstrations(kind: str) -> str:
    """The error for an environment that plays its episodes itself, and so cannot warm up a model."""
    return (
        f"environment.kind: {kind} has no demonstrations for a warm-up: set model.directory to a model with a chat"
        " template, and warm_up.steps to 0"
    )


async def _train(
    config: RunConfig,
    environment: Environment,
    launcher: WorkerLauncher,
    precision: Precision,
    directory: Path,
    progress: Callable[[int, int, float], None],
) -> None:
    """Make supervised steps with the whole machine; nothing else runs yet."""
    settings = config.warm_up
    codec = TokenizerCodec(directory)
    rng = random.Random(f"warm-up:{config.seed}")
    trainer = Handle(await launcher.spawn("warm-up", 0), lambda name, why: None)
    cores = trainer.link.cores
    await trainer.start(
        start_order(
            directory,
            config.training,
            learning_rate=settings.learning_rate,
            precision=precision,
            seed=config.seed,
            share=float(len(cores)),
            link=trainer.link,
            cores=cores,
        )
    )
    for step in range(settings.steps):
        ramp = min(1.0, (step + 1) / _RAMP_STEPS) * max(_FINAL_RATE, 1 - step / settings.steps)
        batch = [_encode(environment, codec, rng) for _ in range(settings.batch)]
        done = await trainer.ask(WarmUp(batch, settings.learning_rate * ramp), WarmedUp)
        if not math.isfinite(done.loss):
            require_sound(f"warm-up step {step + 1}", "warm_up.learning_rate", f"its loss is {done.loss}")
        progress(step + 1, settings.steps, done.loss)
    await trainer.ask(SaveCheckpoint(str(directory), optimiser=False), Acknowledged)
    await trainer.stop()
    await launcher.gone(trainer.link)  # its GPU memory is free for the next worker only after its end


def _encode(environment: Environment, codec: Codec, rng: random.Random) -> tuple[list[int], list[bool]]:
    tokens: list[int] = []
    generated: list[bool] = []
    for span in environment.demonstration(rng):
        ids = codec.encode(span.text)
        tokens += ids
        generated += [span.generated] * len(ids)
    return tokens, generated


def _key(config: RunConfig, environment: Environment, precision: Precision) -> str:
    source = inspect.getsource(inspect.getmodule(type(environment)) or type(environment))
    parts = {
        "recipe": _RECIPE,
        "seed": config.seed,
        "model": config.model.model_dump(mode="json"),
        "warm_up": config.warm_up.model_dump(),
        "precision": precision,
        "processes": config.training.processes,
        "sharding": config.training.sharding,
        "environment": {"kind": config.environment.kind, "options": config.environment.options, "source": source},
        "torch": version("torch"),
    }
    return cache_key(parts)
