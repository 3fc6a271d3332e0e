"""Workers that the parts start and orders to them, how far an engine is from a trainer, and the same turns of vLLM
by itself."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.gpu.setting import Setting, generated, lost
from libra.backends.launch.fork_server import GPU_WORKER_ENVIRONMENT, WORKER_ENVIRONMENT
from libra.backends.launch.handle import Handle
from libra.backends.launch.launcher import LocalLauncher
from libra.backends.machine import served_dtype
from libra.backends.transport.engine_messages import Generate, LoadWeights, Piece, StartEngine
from libra.backends.transport.messages import Acknowledged, Ready
from libra.backends.transport.shared_memory import BUFFERS
from libra.backends.transport.trainer_messages import (
    Commit,
    Publish,
    Published,
    Reduced,
    SaveCheckpoint,
    Score,
    Scored,
    Train,
    Trained,
)
from libra.backends.vllm.engine_handle import EngineHandle

HALF = 0.45  # of the device, for each of two workers
_PATIENCE = 600.0  # seconds


@dataclass(frozen=True, slots=True)
class Stage:
    """Two slots of the devices, and a model for the workers that are started there."""

    setting: Setting
    launcher: LocalLauncher
    model: Path

    @classmethod
    @asynccontextmanager
    async def open(cls, setting: Setting, directory: Path, name: str, *, both: bool = False) -> AsyncIterator[Stage]:
        model = setting.write(directory / "model", name)
        async with LocalLauncher.open(directory / "logs", setting.slots(both)) as launcher:
            await launcher.ready()
            yield cls(setting, launcher, model)

    async def trainer(
        self, name: str, share: float = HALF, *, slot: int = 0, processes: int = 1
    ) -> tuple[Handle, Ready]:
        """A trainer that is ready."""
        trainer = Handle(await self.launcher.spawn(name, slot), lost)
        return trainer, await trainer.start(self.setting.train_order(self.model, trainer.link, share, processes))

    async def first(self, name: str) -> tuple[Handle, Ready, int]:
        """A trainer whose weights are the model's, and published as version 0; their checksum."""
        trainer, ready = await self.trainer(name)
        published = await trainer.ask(Publish(0, 0), Published)
        await trainer.ask(SaveCheckpoint(str(self.model), optimiser=False), Acknowledged)
        return trainer, ready, published.checksum

    async def engine(self, name: str, ready: Ready, *, sleeps: bool = False) -> tuple[EngineHandle, StartEngine]:
        """An engine in the second slot, which has no weights yet."""
        engine = EngineHandle(await self.launcher.spawn(name, 1), lost)
        order = self.setting.engine_order(self.model, ready, engine.link, HALF)
        await engine.start(msgspec.structs.replace(order, sleeps=sleeps))
        return engine, order


async def step(trainer: Handle, setting: Setting, version: int) -> tuple[Trained, float]:
    """One step of one replica, and its seconds."""
    samples, began = setting.samples(), time.monotonic()
    await trainer.ask(Train(version, samples, len(samples), generated(samples), _PATIENCE), Reduced)
    done = await trainer.ask(Commit(version, version % BUFFERS), Trained)
    return done, time.monotonic() - began


async def update(trainer: Handle, engine: EngineHandle, setting: Setting, version: int) -> float:
    """A step whose weights the engine takes; returns the seconds for which it stood still."""
    done, _ = await step(trainer, setting, version)
    return await engine.load(LoadWeights(version, version % BUFFERS, done.checksum))


def turn(name: str, tokens: int, number: int, salt: str | None = None) -> Generate:
    prompt = [4 + (number + 3 * place) % 8 for place in range(16)]
    return Generate(name, prompt, tokens, 1.0, -1, 0, salt=salt)


async def gap(engine: EngineHandle, trainer: Handle, request: Generate) -> tuple[float, list[int]]:
    """Largest distance of a turn's log-probs to those of the trainer, and the version of each token."""
    pieces: list[Piece] = []
    await engine.generate(request, pieces.append)
    tokens = [token for piece in pieces for token in piece.tokens]
    scored = await trainer.ask(Score([request.tokens + tokens]), Scored)
    own = [value for piece in pieces for value in piece.logprobs]
    wanted = scored.logprobs[0][len(request.tokens) - 1 :]
    versions = [piece.version for piece in pieces for _ in piece.tokens]
    return max(abs(one - other) for one, other in zip(own, wanted, strict=True)), versions


def plain_rate(setting: Setting, model: Path, kv_cache_bytes: int, turns: int) -> float:
    """Tokens a second with `turns` turns at once. The calling process cannot be used for anything else afterwards."""
    on_gpu = setting.gpu is not None
    os.environ |= {**(GPU_WORKER_ENVIRONMENT if on_gpu else WORKER_ENVIRONMENT), **setting.environment}
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=str(model),
        skip_tokenizer_init=True,
        max_model_len=setting.context,
        max_num_seqs=turns,
        dtype=served_dtype(setting.precision),
        kv_cache_memory_bytes=kv_cache_bytes,
        gpu_memory_utilization=HALF,
        enforce_eager=not on_gpu,
        logprobs_mode="processed_logprobs",
        seed=0,
    )
    sampling = SamplingParams(max_tokens=setting.tokens, ignore_eos=True, logprobs=0, detokenize=False)
    prompts = [{"prompt_token_ids": turn("", 0, number).tokens} for number in range(turns)]
    engine.generate(prompts[:1], sampling, use_tqdm=False)  # what is set up at the first use
    began = time.monotonic()
    made = engine.generate(prompts, sampling, use_tqdm=False)
    seconds = time.monotonic() - began
    return sum(len(each.outputs[0].token_ids) for each in made) / seconds
