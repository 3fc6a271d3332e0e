"""Looking up keys in a store where a key may lead to another key, or be missing: a task plugged in from outside.

Invariant: the answer of a prompt is what the agent reads when it follows the store to the end. Following always ends:
an entry leads only to keys that were made before it.

    Qbead;     the prompt: what is at bead?
    >bead;     a call                 =@fade;   look at fade instead
    >fade;     the next call          =42;      a value
    A42;       the answer

Other returns: `=-;` nothing is there (the right answer is then `A-;`), `=?;` a malformed call, `=T;` a time-out (ask
again). How long an episode becomes shows only once the store answers, so turns are what the router has to go by.

The configuration beside this file names the class: `kind: lookup:Lookup`. Libra needs nothing else to train on it.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product

from libra.environments.protocol import Prompt, Span, Tool, ToolCall, ToolError

_LETTERS = "abcdef"
_KEYS = tuple("".join(letters) for letters in product(_LETTERS, repeat=4))
_KEY = re.compile(f"[{_LETTERS}]{{4}}")
_LEADS = "@"  # opens an entry that is a key to go on with
_NOTHING = "-"


@cache
def make_store(missing: float, leads: float, hops: int) -> Mapping[str, str]:
    """Entries by key. A share `missing` of all keys has none; of the others a share `leads` names another key (at most
    `hops` times in a row, and now and then a missing one), and the rest hold a value."""
    rng = random.Random("store")
    keys = rng.sample(_KEYS, len(_KEYS))
    absent, present = keys[: round(missing * len(keys))], keys[round(missing * len(keys)) :]
    store: dict[str, str] = {}
    depth = dict.fromkeys(absent, 0)  # hops from a key to the end
    for number, key in enumerate(present):
        targets = absent if rng.random() < missing else present[:number]
        target = rng.choice(targets) if targets else None
        if target is not None and depth[target] < hops and rng.random() < leads:
            store[key], depth[key] = _LEADS + target, depth[target] + 1
        else:
            store[key], depth[key] = str(rng.randint(0, 99)), 0
    return store


@dataclass(frozen=True, slots=True)
class Lookup:
    """The environment.

    `missing`, `leads` and `hops` shape the store (see `make_store`); `latency` and `spread` are the median seconds and
    the log-normal sigma of the service behind the tool; `skill` is the share of demonstrations that follow the store
    to the end.
    """

    missing: float = 0.15
    leads: float = 0.7
    hops: int = 5
    latency: float = 0.01
    spread: float = 1.2
    deadline: float = 0.1  # about 3 % of calls take longer
    skill: float = 0.4
    turn_tokens: int = 8
    max_turns: int = 9

    name: str = "lookup"
    alphabet: str = _LETTERS + "0123456789QA>=;@-?T"
    stop: str = ";"
    timeout_text: str = "=T;"
    error_text: str = "=?;"

    @property
    def tools(self) -> Mapping[str, Tool]:
        return {"lookup": self.look_up}

    @property
    def store(self) -> Mapping[str, str]:
        return make_store(self.missing, self.leads, self.hops)

    async def look_up(self, argument: str) -> str:
        """`bead` -> `=@fade;` or `=42;`. Takes as long as the service behind it takes."""
        await asyncio.sleep(self.latency * random.lognormvariate(0.0, self.spread))
        if _KEY.fullmatch(argument) is None:
            raise ToolError(self.error_text)
        if argument not in self.store:
            raise ToolError(f"={_NOTHING};")
        return f"={self.store[argument]};"

    def prompts(self, split: str, count: int, seed: int) -> list[Prompt]:
        # A digest, not the seed, divides the splits: a prompt is never in both.
        held_out = split == "heldout"
        keys = [key for key in _KEYS if (hashlib.blake2b(key.encode(), digest_size=1).digest()[0] < 64) == held_out]
        if count > len(keys):
            raise ValueError(f"there are {len(keys)} different {split} prompts, not {count}: ask for fewer")
        chosen = random.Random(f"{split}:{seed}").sample(keys, count)
        return [Prompt(id=key, text=f"Q{key};", answer=self._answer(key)) for key in chosen]

    def parse(self, text: str) -> ToolCall | None:
        if text.startswith(">") and text.endswith(";"):
            return ToolCall("lookup", text[1:-1])
        return None

    def reward(self, prompt: Prompt, text: str) -> float:
        return float(text == f"A{prompt.answer};")

    def demonstration(self, rng: random.Random) -> list[Span]:
        key = rng.choice(_KEYS)
        draw = rng.random()
        if draw < self.skill:
            turns = self._solution(key, rng)
        elif draw < self.skill + 0.3:
            turns = [Span(f"A{rng.choice((_NOTHING, str(rng.randint(0, 99))))};", True)]  # a guess without asking
        else:
            # Asks once and takes the end of what it reads for the answer, also where that leads on.
            returned = self._returned(key)
            turns = [Span(f">{key};", True), Span(returned, False), Span(f"A{returned[1:]}", True)]
        return [Span(f"Q{key};", False), *turns]

    def _returned(self, key: str) -> str:
        return f"={self.store.get(key, _NOTHING)};"

    def _answer(self, key: str) -> str:
        entry = self.store.get(key, _NOTHING)
        return self._answer(entry.removeprefix(_LEADS)) if entry.startswith(_LEADS) else entry

    def _solution(self, key: str, rng: random.Random) -> list[Span]:
        """The episode of an agent that follows the store, slips now and then, and asks again after a time-out."""
        spans: list[Span] = []
        while True:
            if rng.random() < 0.04:
                spans += [Span(f">{key[:3]};", True), Span(self.error_text, False)]
            if rng.random() < 0.04:
                spans += [Span(f">{key};", True), Span(self.timeout_text, False)]
            returned = self._returned(key)
            spans += [Span(f">{key};", True), Span(returned, False)]
            if not returned.startswith(f"={_LEADS}"):
                return [*spans, Span(f"A{returned[1:]}", True)]
            key = returned[2:-1]
