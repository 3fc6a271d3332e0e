"""How the trainer and the engines of a tiny model start, in processes."""

from __future__ import annotations

from pathlib import Path

from arithmetic import PRECISION

from libra.backends.launch.handle import Handle
from libra.backends.launch.launcher import LocalLauncher
from libra.backends.machine import served_dtype
from libra.backends.tiny_model import kv_bytes_per_token, write_tiny_model
from libra.backends.transport.engine_messages import KVBufferPlace, StartEngine
from libra.backends.transport.messages import Acknowledged, Ready
from libra.backends.transport.trainer_messages import SaveCheckpoint, StartTrainer
from libra.config.run import ModelConfig


async def trained_model(launcher: LocalLauncher, directory: Path, longest: int) -> tuple[Path, Handle, Ready]:
    """A model with the weights that engines start from, and its trainer."""
    model = directory / "model"
    write_tiny_model(model, ModelConfig(hidden_size=64, layers=2, heads=2, kv_heads=1), "0123456789+;", longest)
    trainer = Handle(await launcher.spawn("trainer", 0), lambda name, why: None)
    ready = await trainer.start(start_trainer(model, 0))
    await trainer.ask(SaveCheckpoint(str(model), optimiser=False), Acknowledged)
    return model, trainer, ready


def start_trainer(model: Path, replica: int, temperature: float = 1.0) -> StartTrainer:
    return StartTrainer(
        model_directory=str(model),
        learning_rate=1e-2,
        clip=(0.8, 1.28),
        denominator="constant",
        token_constant=12.0,
        temperature=temperature,
        micro_batch_tokens=256,
        precision=PRECISION,
        seed=replica,  # replicas start from different optimiser noise; joining must make them equal
        share=0.9,
        cores=(0,),
    )


def start_engine(
    model: Path,
    ready: Ready,
    longest: int = 256,
    kv_tokens: int = 1024,
    refresh_kv: bool = False,
    kv: KVBufferPlace | None = None,
) -> StartEngine:
    dtype = served_dtype(PRECISION)
    return StartEngine(
        model_directory=str(model),
        max_model_len=longest,
        max_num_seqs=4,
        dtype=dtype,
        kv_cache_bytes=kv_tokens * kv_bytes_per_token(model, dtype),
        layout=ready.layout,
        buffer_bytes=ready.buffer_bytes,
        seed=0,
        share=0.9,
        cores=(0,),
        refresh_kv=refresh_kv,
        kv=kv,
    )
