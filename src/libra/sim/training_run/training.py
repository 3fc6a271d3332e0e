"""Seconds of an optimiser step over the very trajectories that are in its batch.

Invariant: the trainer's price is the planner's (`libra.cost.train_step`); only the lengths are the batch's own instead
of those that were expected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from libra.config.recipe import Recipe
from libra.cost.collectives import fabric
from libra.cost.sources.train_rates import training_rates
from libra.cost.train_batch import Batch
from libra.cost.train_passes import Work
from libra.cost.train_step import train_step
from libra.hardware.cluster import NodeClass
from libra.hardware.model import ModelSpec
from libra.hardware.parallel import ParallelLayout

_BINS_PER_OCTAVE = 8  # lengths that are as near are priced as their mean: the sum of tokens stays the same


@dataclass(frozen=True, slots=True)
class TrainingPrice:
    """What training costs on one class of nodes."""

    model: ModelSpec
    recipe: Recipe
    nodes: NodeClass

    def seconds(self, lengths: Sequence[int], layout: ParallelLayout, *, update: bool = True) -> float:
        """Of one step over trajectories of these final contexts, in tokens; without `update` only of their gradients,
        to which others are added."""
        work = Work(
            model=self.model,
            batch=batch_of_lengths(lengths),
            state=self.recipe.training_bytes,
            reference=self.recipe.reference,
            gpu=self.nodes.gpu,
            rates=training_rates(self.nodes.gpu, self.recipe.dtype),
            fabric=fabric(self.nodes),
        )
        step = train_step(work, layout)
        return step.total if update else step.total - step.optimiser


def batch_of_lengths(lengths: Sequence[int]) -> Batch:
    """Trajectories of these lengths, neighbouring ones as their mean. Raises ValueError for none, or an empty one."""
    if not lengths or min(lengths) < 1:
        raise ValueError(f"{len(lengths)} lengths, shortest {min(lengths, default=0)}: give trajectories with tokens")
    sizes = np.asarray(lengths, dtype=float)
    bins = np.floor(np.log2(sizes) * _BINS_PER_OCTAVE).astype(int)
    kinds, at = np.unique(bins, return_inverse=True)
    counts = np.bincount(at, minlength=len(kinds))
    means = np.bincount(at, weights=sizes, minlength=len(kinds)) / counts
    return Batch(tuple(means[::-1].tolist()), tuple(counts[::-1].astype(float).tolist()))
