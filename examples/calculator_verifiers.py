"""Libra's calculator as a taskset of verifiers, with a harness in this process that is the agent's loop."""

from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult

from libra.environments.calculator import Calculator
from libra.environments.protocol import Prompt, ToolError

__all__ = ["CalculatorHarness", "CalculatorTaskset"]
CALCULATOR = Calculator()


class CalculatorData(vf.TaskData):
    answer: str


class CalculatorTask(vf.Task[CalculatorData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return CALCULATOR.reward(Prompt("", "", self.data.answer), trace.last_reply + ";")


class CalculatorTaskset(vf.Taskset[CalculatorTask, vf.TasksetConfig]):
    def load(self) -> Any:
        for prompt in CALCULATOR.prompts("train", 1000, seed=0):
            yield CalculatorTask(CalculatorData(prompt=prompt.text, answer=prompt.answer), self.config.task)


class CalculatorHarness(vf.Harness[vf.HarnessConfig]):
    NEEDS_CONTAINER = EXECUTES_CODE = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, urls: Any, data: Any, *_: Any, **__: Any
    ) -> ProgramResult:
        messages = [{"role": "user", "content": data.prompt}]
        headers = {"Authorization": f"Bearer {secret}"}
        # The endpoint is here and without TLS, whose certificates would take longer to read than the episode takes.
        async with httpx.AsyncClient(headers=headers, timeout=None, verify=False) as client:
            for _ in range(CALCULATOR.max_turns):
                body = {"model": ctx.model, "messages": messages}
                answer = (await client.post(f"{endpoint}/chat/completions", json=body)).raise_for_status().json()
                messages.append(answer["choices"][0]["message"])
                call = CALCULATOR.parse(f"{messages[-1]['content']};")
                if call is None:
                    break
                try:
                    returned = await CALCULATOR.calculate(call.argument)
                except ToolError as error:
                    returned = str(error)
                messages.append({"role": "user", "content": returned})
        return ProgramResult(0, "", "")
