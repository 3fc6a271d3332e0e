"""What an interrupted run left, and where it is gone on from.

Invariant: reading changes nothing but what a kill cut off; the workers begin with what they did last, not with what the
configuration starts with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from libra.exec.allocation import bucket_limits, current_allocation
from libra.exec.journal import JournalReplay, read_journal, replay
from libra.exec.pool import Worker
from libra.loop.checkpoint import RunState, latest_checkpoint
from libra.loop.episode_file import History, read_history
from libra.loop.recorder import Recorded, cut_back
from libra.plan.problem import Allocation


@dataclass(frozen=True, slots=True)
class Interrupted:
    checkpoint: Path
    state: RunState
    history: History  # since the checkpoint
    journal: JournalReplay
    recorded: Recorded

    @property
    def seconds(self) -> float:
        """Of reinforcement learning so far."""
        return max(self.state.seconds, self.recorded.time)


def read_interrupted(directory: Path) -> Interrupted:
    """Raises `ConfigError`, `EpisodeFileError` or `JournalError` where the run cannot be resumed from."""
    checkpoint, state = latest_checkpoint(directory)
    history = read_history(directory, state.step)
    found = replay(read_journal(directory / "journal.jsonl"))
    return Interrupted(checkpoint, state, history, found, cut_back(directory, history.version))


def allocation_in_force(
    before: JournalReplay, workers: Sequence[Worker], holds: Mapping[str, int]
) -> Allocation | None:
    """What the workers did last, in the buckets that were in force; `holds` are the tokens that each shape holds.

    A slot that was lost does again what it did. An engine whose shape has no bucket any more is one for the longest
    contexts. None where there are other workers or engines by now, or none that hold the longest contexts."""
    engines = {duty.shape for duty in before.worked.values() if duty.shape is not None}
    if {worker.id for worker in workers} != set(before.worked) or not engines <= set(holds):
        return None
    longest = max(holds.values())
    holding = sorted(shape for shape in engines if holds[shape] == longest)
    if not holding:
        return None
    # While nobody held the longest contexts, others served them; and who was lost may have left the plans.
    limits = [(shape, min(up_to, holds[shape])) for shape, up_to in bucket_limits(before.plans) if shape in engines]
    found = current_allocation(before.worked.values(), [*limits, (holding[0], longest)], longest)
    if found is None:
        return None
    *shorter, last = found.buckets
    others = len(workers) - found.replicas - found.engines
    return replace(found, buckets=(*shorter, replace(last, engines=last.engines + others)))
