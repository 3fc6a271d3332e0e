"""Arithmetic with a calculator that does one operation per call: an expression of n operands needs n - 1 calls.

Invariant: the right answer is the calculator's result after correct calls, also for a division by zero. Operations
apply from left to right, and `/` is floor division.

    Q12+34-5;   the prompt
    >12+34;     a call                    =46;  its result
    >46-5;      the next call             =41;
    A41;        the answer

Other returns: `=!;` division by zero (the right answer is then `A!;`), `=?;` a malformed call, `=T;` a time-out (the
tool's service exceeded the deadline: call again).
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass

from libra.environments.protocol import Prompt, Span, Tool, ToolCall, ToolError

_CALL = re.compile(r"(-?\d{1,6})([+\-*/])(\d{1,3})")
_TERM = re.compile(r"([+\-*/])(\d+)")


def apply(left: int, operator: str, right: int) -> int:
    """Result of one operation. Raises ZeroDivisionError like Python."""
    match operator:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
        case "/":
            return left // right
    raise ValueError(f"operator {operator!r}: expected one of + - * /")


@dataclass(frozen=True, slots=True)
class Calculator:
    """The environment.

    `operands` is the range of expression lengths; `long_tail` is the chance of one more operand, applied repeatedly.
    `latency` and `spread` are the median seconds and the log-normal sigma of the tool's service. `skill` is the share
    of demonstrations that make every needed call.
    """

    operands: tuple[int, int] = (2, 7)
    long_tail: float = 0.6
    latency: float = 0.01
    spread: float = 1.0
    deadline: float = 0.15
    skill: float = 0.46
    turn_tokens: int = 16
    max_turns: int = 10

    name: str = "calculator"
    alphabet: str = "0123456789+-*/QA>=;?!T"
    stop: str = ";"
    timeout_text: str = "=T;"
    error_text: str = "=?;"

    @property
    def tools(self) -> Mapping[str, Tool]:
        return {"calculator": self.calculate}

    async def calculate(self, argument: str) -> str:
        """Answer a call such as `12+34` with `=46;`, after the time that the service takes."""
        await asyncio.sleep(self.latency * random.lognormvariate(0.0, self.spread))
        return self._evaluate(argument)

    def _evaluate(self, argument: str) -> str:
        call = _CALL.fullmatch(argument)
        if call is None:
            raise ToolError(self.error_text)
        try:
            return f"={apply(int(call[1]), call[2], int(call[3]))};"
        except ZeroDivisionError:
            raise ToolError("=!;") from None

    def prompts(self, split: str, count: int, seed: int) -> list[Prompt]:
        rng = random.Random(f"{split}:{seed}")
        found: dict[str, Prompt] = {}
        while len(found) < count:
            expression = self._expression(rng)
            # A digest of the prompt chooses its split, whatever the seed, so no prompt is in both splits.
            held_out = hashlib.blake2b(expression.encode(), digest_size=1).digest()[0] < 64
            if held_out == (split == "heldout"):
                found[expression] = Prompt(id=expression, text=f"Q{expression};", answer=self._answer(expression))
        return list(found.values())

    def parse(self, text: str) -> ToolCall | None:
        if text.startswith(">") and text.endswith(";"):
            return ToolCall("calculator", text[1:-1])
        return None

    def reward(self, prompt: Prompt, text: str) -> float:
        return float(text == f"A{prompt.answer};")

    def demonstration(self, rng: random.Random) -> list[Span]:
        expression = self._expression(rng)
        solution = self._solution(expression, rng)
        draw = rng.random()
        calls = [span for span in solution if span.generated and span.text[0] == ">"]
        if draw < self.skill:
            turns = solution
        elif draw < self.skill + 0.3 or len(calls) < 2:
            turns = [Span(f"A{rng.randint(-99, 198)};", True)]  # a guess without a call
        else:
            # The agent stops early and gives an intermediate result as the answer.
            cut = next(i for i, span in enumerate(solution) if not span.generated) + 1
            returned = solution[cut - 1].text
            turns = [*solution[:cut], Span(f"A{returned[1:]}", True)]
        return [Span(f"Q{expression};", False), *turns]

    def _expression(self, rng: random.Random) -> str:
        fewest, most = self.operands
        count = fewest
        while count < most and rng.random() < self.long_tail:
            count += 1
        expression = str(rng.randint(1, 99))
        for _ in range(count - 1):
            operator = rng.choices("+-*/", (9, 9, 1, 2))[0]
            right = rng.randint(0, 9) if operator in "*/" else rng.randint(1, 99)
            expression += f"{operator}{right}"
        return expression

    def _answer(self, expression: str) -> str:
        value = int(re.match(r"\d+", expression)[0])  # type: ignore[index]
        for operator, right in _TERM.findall(expression):
            try:
                value = apply(value, operator, int(right))
            except ZeroDivisionError:
                return "!"
        return str(value)

    def _solution(self, expression: str, rng: random.Random) -> list[Span]:
        """The episode of an agent that makes every call, makes occasional mistakes, and calls again after a
        time-out."""
        value = re.match(r"\d+", expression)[0]  # type: ignore[index]
        spans: list[Span] = []
        for operator, right in _TERM.findall(expression):
            call = f">{value}{operator}{right};"
            if rng.random() < 0.04:
                spans += [Span(f">{value}{operator};", True), Span("=?;", False)]
            if rng.random() < 0.04:
                spans += [Span(call, True), Span(self.timeout_text, False)]
            try:
                value = str(apply(int(value), operator, int(right)))
            except ZeroDivisionError:
                return [*spans, Span(call, True), Span("=!;", False), Span("A!;", True)]
            spans += [Span(call, True), Span(f"={value};", False)]
        return [*spans, Span(f"A{value};", True)]
