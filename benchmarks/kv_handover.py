"""A context goes on at another engine: its KV handed over against computing it again.

Invariant: both ways end with the first token from the same engine, and alternate on the same two processes, so that
whatever the machine does meanwhile happens to both.

    python -m benchmarks.kv_handover [--quick] [--json FILE]

Two engines of one Qwen3 with random weights (10 layers, hidden size 768, 10 kB of KV a token), each on a core of its
own and as fast as it can be. One has computed a context and the other has not. "Computed" is the time of a request for
one token to the other engine; "handed over" begins with the order to the first engine to save the KV, and ends with
that token. Processor time is that of both engines, and mostly free of what the neighbours do. Then: what is left of the
speed of a turn on the first engine while it saves, and what the hooks of vLLM's connector cost an iteration where
nothing is handed over, with a model as small as that of the example.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psutil

from benchmarks.rows import Row, report
from libra.backends.launch.handle import Handle
from libra.backends.launch.launcher import LocalLauncher
from libra.backends.tiny_model import kv_bytes_per_token, write_tiny_model
from libra.backends.transport.engine_messages import Generate, KVBufferPlace, KVTransfer, Piece, Save, StartEngine
from libra.backends.transport.messages import Acknowledged, Ready
from libra.backends.transport.trainer_messages import SaveCheckpoint, StartTrainer
from libra.backends.vllm.engine_handle import EngineHandle
from libra.backends.vllm.kv_handover import KVHandover
from libra.config.run import ModelConfig
from libra.cost.device import DeviceProfile, EngineCost, HandoverCost, SwitchCost, TrainCost
from libra.cost.engine_memory import BLOCK_TOKENS

_QUIET = 0.05  # share of the machine that others may use while this measures
_TINY = ModelConfig(hidden_size=128, layers=3, heads=4, kv_heads=2, head_dim=32)
# Everything is handed over: what is cheaper is what this measures.
_ALWAYS = DeviceProfile(
    "", "", EngineCost(0, 0, 0, 1, 0), TrainCost(0, 0, 0), SwitchCost(0, 0, 0), 0.0, HandoverCost(0, 0)
)


@dataclass(frozen=True, slots=True)
class Size:
    model: ModelConfig
    contexts: tuple[int, ...]  # tokens
    repeats: int
    rounds: int  # of the iterations with and without hooks


FULL = Size(
    ModelConfig(hidden_size=768, layers=10, heads=12, kv_heads=4, head_dim=64),
    (48, 80, 144, 272, 528, 1040, 2064),
    repeats=5,
    rounds=6,
)
QUICK = Size(ModelConfig(hidden_size=256, layers=4, heads=4, kv_heads=2, head_dim=64), (48, 144, 528), 3, 2)


@dataclass(slots=True)
class Timed:
    """Seconds of one way with one context length."""

    wall: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)  # of both engines

    @contextmanager
    def once(self, *engines: EngineHandle) -> Iterator[None]:
        began, before = time.monotonic(), _processor(engines)
        yield
        self.wall.append(time.monotonic() - began)
        self.processor.append(_processor(engines) - before)


@dataclass(slots=True)
class Context:
    computed: Timed = field(default_factory=Timed)
    handed: Timed = field(default_factory=Timed)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kv_handover", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--quick", action="store_true", help="a smaller model and few repeats: a first look")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to FILE, a JSON line each")
    options = parser.parse_args(arguments)
    size = QUICK if options.quick else FULL
    cores = sorted(os.sched_getaffinity(0))
    taken = psutil.cpu_percent(interval=1.0) / 100
    with tempfile.TemporaryDirectory() as directory:
        rows = asyncio.run(_contexts(size, Path(directory) / "wide", cores))
        rows += asyncio.run(_hooks(size, Path(directory) / "tiny", cores))
    report(rows, options.json)
    if len(cores) < 2:
        print("the machine has one core: the two engines share it")
    if taken > _QUIET:
        print(f"other processes took {taken:.0%} of the machine before the start: measure again when it is quiet")
    return 0


class Engines:
    """Engines of one model with random weights."""

    def __init__(self, launcher: LocalLauncher, model: Path, longest: int) -> None:
        self._launcher, self._model, self._longest = launcher, model, longest
        self._ready: Ready

    async def write_model(self, shape: ModelConfig) -> None:
        write_tiny_model(self._model, shape, "0123456789+-*/", self._longest)
        await self._launcher.ready()
        trainer = Handle(await self._launcher.spawn("trainer", 0), lambda name, why: None)
        self._ready = await trainer.start(
            StartTrainer(str(self._model), 1e-3, (0.8, 1.28), "tokens", 1.0, 1.0, 256, "bf16", 0, 1.0, (0,))
        )
        await trainer.ask(SaveCheckpoint(str(self._model), optimiser=False), Acknowledged)
        await trainer.stop()

    async def start(self, name: str, core: int, place: KVBufferPlace | None) -> EngineHandle:
        engine = EngineHandle(await self._launcher.spawn(name, 0), lambda name, why: None)
        await engine.start(
            StartEngine(
                model_directory=str(self._model),
                max_model_len=self._longest,
                max_num_seqs=8,
                dtype="bfloat16",
                kv_cache_bytes=3 * self._longest * kv_bytes_per_token(self._model, "bfloat16"),
                layout=self._ready.layout,
                buffer_bytes=self._ready.buffer_bytes,
                seed=0,
                share=1.0,
                cores=(core,),
                refresh_kv=False,
                kv=place,
            )
        )
        return engine


async def _contexts(size: Size, directory: Path, cores: Sequence[int]) -> list[Row]:
    longest = size.contexts[-1] + 512
    async with LocalLauncher.open(directory / "logs") as launcher:
        engines = Engines(launcher, directory / "model", longest)
        await engines.write_model(size.model)
        kv_bytes = kv_bytes_per_token(directory / "model", "bfloat16")
        handover = KVHandover(kv_bytes, 2 * longest)
        handover.price_by(_ALWAYS)
        first, other = [
            await engines.start(name, core, handover.memory.place) for name, core in (("a", cores[0]), ("b", cores[-1]))
        ]
        measured = {tokens: Context() for tokens in size.contexts}
        for tokens in measured:
            await _compare(Context(), tokens, -1, handover, first, other)  # pays for what is set up once
        for repeat in range(size.repeats):
            for tokens, context in measured.items():
                await _compare(context, tokens, repeat, handover, first, other)
        slowed = await _while_saving(handover, first, size.contexts[-1], size.repeats)
    rows: list[Row] = []
    for tokens, context in measured.items():
        computed, handed = context.computed, context.handed
        case = f"{tokens} tokens, {tokens * kv_bytes / 2**20:.2f} MiB"
        rows += [
            Row(case, "computed, median", median(computed.wall) * 1e3, "ms"),
            Row(case, "handed over, median", median(handed.wall) * 1e3, "ms"),
            Row(case, "handed over / computed", median(handed.wall) / median(computed.wall), "ratio"),
            Row(case, "computed, processor time, median", median(computed.processor) * 1e3, "ms"),
            Row(case, "handed over, processor time of both engines, median", median(handed.processor) * 1e3, "ms"),
        ]
    wall = [tokens for tokens, c in measured.items() if median(c.handed.wall) < median(c.computed.wall)]
    processor = [tokens for tokens, c in measured.items() if median(c.handed.processor) < median(c.computed.processor)]
    shortest, longest_measured = size.contexts[0], size.contexts[-1]
    added = median(measured[longest_measured].handed.processor) - median(measured[shortest].handed.processor)
    case = "in all"
    return [
        *rows,
        Row(case, "shortest context that is better handed over", min(wall, default=float("inf")), "tokens"),
        Row(case, "the same in processor time", min(processor, default=float("inf")), "tokens"),
        Row(case, "KV handed over in processor time", (longest_measured - shortest) * kv_bytes / 1e9 / added, "GB/s"),
        Row(case, "speed of a turn at the first engine while it saves all the time", slowed, "ratio"),
    ]


async def _compare(
    context: Context, tokens: int, repeat: int, handover: KVHandover, first: EngineHandle, other: EngineHandle
) -> None:
    """Both ways once, with contexts that have nothing in common."""
    prompt = [4 + (tokens + repeat + 7 * place) % 12 for place in range(tokens)]
    computed, handed = f"computed-{tokens}-{repeat}", f"handed-{tokens}-{repeat}"
    with context.computed.once(first, other):
        await _first_token(other, prompt, computed)
    await _first_token(first, prompt, handed)
    with context.handed.once(first, other):
        transfer, change = await handover.bring(prompt, handed, first, other)
        await _first_token(other, prompt, handed, transfer)
    expected = (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    if change.handed_tokens != expected:
        raise RuntimeError(f"{change.handed_tokens} of {expected} tokens were handed over: {change.why}")


async def _first_token(engine: EngineHandle, prompt: list[int], salt: str, transfer: KVTransfer | None = None) -> None:
    await engine.generate(Generate(salt, prompt, 1, 0.0, -1, 0, salt, transfer), lambda piece: None)


def _processor(engines: Sequence[EngineHandle]) -> float:
    """Seconds that their threads have been on a processor."""
    files = (file for engine in engines for file in Path(f"/proc/{engine.link.pid}/task").glob("*/schedstat"))
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


async def _while_saving(handover: KVHandover, engine: EngineHandle, tokens: int, repeats: int) -> float:
    """Tokens a second of a turn while the engine saves the longest context, over those while it does not."""
    prompt = [4 + (tokens + 7 * place) % 12 for place in range(tokens)]
    await _first_token(engine, prompt, "saved")
    arrived: list[tuple[float, int]] = []

    def take(piece: Piece) -> None:
        arrived.append((time.monotonic(), len(piece.tokens)))

    turn = asyncio.create_task(engine.generate(Generate("other", prompt[:16], 400, 0.0, -1, 0, "other"), take))
    while sum(count for _, count in arrived) < 20:
        await asyncio.sleep(0.01)
    idle: list[float] = []
    saving: list[float] = []
    parts = 0
    while not turn.done() and parts < 4 * repeats:
        parts += 1
        transfer = handover.leases.lease(tokens // BLOCK_TOKENS)
        assert transfer is not None
        began, before = time.monotonic(), engine.generated_tokens
        saves = 0
        while time.monotonic() - began < 0.5:
            if parts % 2:
                transfer = KVTransfer(transfer.number + 100_000, transfer.frames)
                await engine.save(Save(prompt, "saved", transfer))
                saves += 1
            else:
                await asyncio.sleep(0.05)
        rate = (engine.generated_tokens - before) / (time.monotonic() - began)
        (saving if parts % 2 else idle).append(rate)
        handover.leases.release(transfer)
    engine.interrupt("other")
    await turn
    return float(median(saving) / median(idle))


async def _hooks(size: Size, directory: Path, cores: Sequence[int]) -> list[Row]:
    """Iterations of an engine that could hand KV over, and of one that could not, in turn. In processor time, which is
    mostly free of what the neighbours do."""
    async with LocalLauncher.open(directory / "logs") as launcher:
        engines = Engines(launcher, directory / "model", 256)
        await engines.write_model(_TINY)
        handover = KVHandover(kv_bytes_per_token(directory / "model", "bfloat16"), 256)
        with_hooks = await engines.start("with", cores[0], handover.memory.place)
        without = await engines.start("without", cores[0], None)
        rows = []
        for sequences in (1, 8):
            seconds: dict[str, list[float]] = {"with": [], "without": []}
            for number in range(2 * size.rounds):
                for engine in (with_hooks, without) if number % 2 else (without, with_hooks):
                    seconds[engine.name].append(await _iteration(engine, sequences, f"{sequences}-{number}"))
            bare = median(seconds["without"])
            added = median(a - b for a, b in zip(seconds["with"], seconds["without"], strict=True))
            case = f"processor time of an iteration, {sequences} sequences, tiny model"
            rows += [
                Row(case, "without hooks, median", bare * 1e6, "us"),
                Row(case, "hooks, median of differences", added * 1e6, "us"),
                Row(case, "hooks / without", added / bare, "ratio"),
            ]
    return rows


async def _iteration(engine: EngineHandle, sequences: int, tag: str) -> float:
    """Mean seconds of processor time per iteration while `sequences` turns decode."""
    requests = [Generate(f"{tag}-{n}", [4 + n] * 16, 200, 0.0, -1, 0, f"{tag}-{n}") for n in range(sequences)]
    began, before = _processor([engine]), engine.iterations
    await asyncio.gather(*(engine.generate(request, lambda piece: None) for request in requests))
    return (_processor([engine]) - began) / (engine.iterations - before)


if __name__ == "__main__":
    sys.exit(main())
