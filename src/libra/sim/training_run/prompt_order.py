"""In which order the prompts of a data set come up.

Invariant: every prompt comes up once in each pass over the data set, and each pass has an order of its own, which
depends on nothing but the seed and the pass.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_STREAM = 0x6F72646572  # sets these draws apart from others of the same seed


def prompt_at(number: int, prompts: int, seed: int) -> int:
    """Index of the prompt of the `number`-th group, from 0, where each pass over `prompts` of them is shuffled."""
    if number < 0:
        raise ValueError(f"number is {number}; groups are counted from 0")
    if prompts < 1:
        raise ValueError(f"prompts is {prompts}; a data set has 1 or more")
    if seed < 0:
        raise ValueError(f"seed is {seed}; give 0 or more")
    epoch, position = divmod(number, prompts)
    return int(_order(epoch, prompts, seed)[position])


@lru_cache(maxsize=4)  # a run is in one pass at a time; the order is the same whether it is kept or made again
def _order(epoch: int, prompts: int, seed: int) -> NDArray[np.int64]:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, _STREAM, epoch)))).permutation(prompts)
