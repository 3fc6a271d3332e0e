"""A replica whose model is divided among two GPUs, beside one that has it whole."""

from __future__ import annotations

from pathlib import Path

from benchmarks.gpu.orders import Stage, step, turn
from benchmarks.gpu.setting import Setting
from benchmarks.rows import Row, at_most
from libra.backends.launch.handle import Handle
from libra.backends.transport.messages import Acknowledged
from libra.backends.transport.trainer_messages import SaveCheckpoint, Score, Scored

_STEPS = 3
_NORMS = 0.02  # relative; sums of bf16 gradients are made in another order


async def sharded(setting: Setting, directory: Path) -> list[Row]:
    """The same steps by one process and by two (FSDP2): gradients and weights agree. On GPUs it needs two."""
    if setting.gpu is not None and setting.second is None:
        return [Row("two GPUs", "of which one is given, as --gpu 0,1", 1, "")]
    scored, norms, seconds, published = [], [], [], []
    async with Stage.open(setting, directory, setting.model, both=True) as stage:
        for processes in (1, 2):
            trainer, _ = await stage.trainer(f"trainer-{processes}", 1.0, slot=processes - 1, processes=processes)
            if processes == 1:  # both begin with the same weights
                await trainer.ask(SaveCheckpoint(str(stage.model), optimiser=False), Acknowledged)
            made = [await step(trainer, setting, version) for version in range(1, _STEPS + 1)]
            norms.append([done.gradient_norm for done, _ in made])
            seconds.append(min(spent for _, spent in made))
            published.append(min(done.publish_seconds for done, _ in made))
            scored.append(await _scores(trainer, setting))
            await trainer.stop()
            await stage.launcher.gone(trainer.link)
    case = f"{_STEPS} steps by one process, and by two"
    off = max(abs(one / other - 1) for one, other in zip(*norms, strict=True))
    apart = max(abs(one - other) for one, other in zip(*scored, strict=True))
    return [
        Row(case, "step of two / of one, the best", seconds[1] / seconds[0], ""),
        Row(case, "publication of two, the best", published[1], "s"),
        at_most(case, "norms of gradients differ by", off, "", _NORMS),
        at_most(case, "log-probs differ by", apart, "", setting.gap),
    ]


async def _scores(trainer: Handle, setting: Setting) -> list[float]:
    sequences = [turn(str(number), 0, number).tokens for number in range(4)]
    found = await trainer.ask(Score(sequences), Scored)
    return [value for row in found.logprobs for value in row]
