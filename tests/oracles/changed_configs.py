"""Configurations of models with something deleted or replaced at random."""

from __future__ import annotations

import copy
import random
from typing import Any

ODD: list[object] = [
    None,
    -1,
    0,
    1,
    7,
    2**50,
    1.5,
    True,
    "",
    "x",
    [],
    [1],
    ["a"] * 4,
    {},
    {"a": 1},
    [None] * 4,
    [[1]] * 4,
]


def changed(draw: random.Random, data: Any) -> Any:
    """The value with a random place deleted or replaced."""
    data = copy.deepcopy(data)
    for _ in range(draw.randint(1, 3)):
        place = data
        while True:
            key = draw.choice(list(place)) if isinstance(place, dict) and place else None
            if key is None:
                break
            if isinstance(place[key], dict) and draw.random() < 0.6:
                place = place[key]
                continue
            if isinstance(place[key], list) and place[key] and draw.random() < 0.5:
                place[key] = [*place[key][: draw.randrange(len(place[key]))], draw.choice(ODD)]
            elif draw.random() < 0.3:
                del place[key]
            else:
                place[key] = draw.choice(ODD)
            break
    return data
