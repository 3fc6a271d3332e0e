"""A task that does what tasks should not: its tool breaks, hangs and returns nonsense, and its episodes change length.

Invariant: what it asks and what an answer is worth are functions of the text alone; only the tool and the longest
episode depend on the moment.
"""

from __future__ import annotations

import asyncio
import random
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from libra.environments.calculator import Calculator
from libra.environments.protocol import Prompt, Span, Tool, ToolCall, ToolError


@dataclass(frozen=True)
class Unruly:
    """`trouble` is the share of calls that go wrong; every `phase` seconds episodes become short, or long again."""

    trouble: float = 0.15
    phase: float = 20.0

    name: str = "unruly"
    deadline: float = 0.15
    timeout_text: str = "=T;"
    error_text: str = "=?;"
    turn_tokens: int = 16
    _task: Calculator = field(default_factory=Calculator)

    @property
    def alphabet(self) -> str:
        return self._task.alphabet

    @property
    def stop(self) -> str:
        return self._task.stop

    @property
    def tools(self) -> Mapping[str, Tool]:
        return {"calculator": self.calculate}

    @property
    def max_turns(self) -> int:
        return 2 if int(time.monotonic() / self.phase) % 2 else 9

    async def calculate(self, argument: str) -> str:
        await asyncio.sleep(random.expovariate(100.0))
        return await self._go_wrong() if random.random() < self.trouble else f"={zlib.crc32(argument.encode()) % 100};"

    async def _go_wrong(self) -> Any:
        match random.randrange(8):
            case 0:
                raise RuntimeError("the calculator broke")
            case 1:
                raise ToolError("=!;")
            case 2:
                await asyncio.Event().wait()  # hangs
            case 3:
                await _refuse_to_end()
            case 4:
                return random.choice([None, 7, b"=1;", ["=1;"]])
            case 5:
                return "\N{SNOWMAN}\x00 no such character;" * random.randrange(3)
            case 6:
                return "9" * 10_000
            case _:
                time.sleep(0.05)  # holds everything up
                return "=0;"

    def prompts(self, split: str, count: int, seed: int) -> list[Prompt]:
        return self._task.prompts(split, count, seed)

    def parse(self, text: str) -> ToolCall | None:
        digest = zlib.crc32(text.encode())
        return None if digest % 8 == 0 else ToolCall("calculator" if digest % 64 else "abacus", text)

    def reward(self, prompt: Prompt, text: str) -> float:
        return float(zlib.crc32(f"{prompt.id} {text}".encode()) % 2)

    def demonstration(self, rng: random.Random) -> list[Span]:
        return self._task.demonstration(rng)


async def _refuse_to_end() -> None:
    """Goes on for a while although it is cancelled."""
    ends = time.monotonic() + 2.0
    while time.monotonic() < ends:
        try:
            await asyncio.sleep(ends - time.monotonic())
        except asyncio.CancelledError:
            pass
