"""The agent loop: generate a turn, call the tool that it requests, route the next turn by the tool's return.

Invariant: tokens in, tokens out. Generated tokens enter the sample as the sampled ids, with their log-probs and weight
versions; no code decodes and encodes them again. A tool is called once for each turn that requests it, even if engines
are lost.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from statistics import fmean
from typing import Protocol, TypeVar

from libra.backends.protocols import Trainer
from libra.environments.protocol import Environment, Prompt, ToolCall, ToolError
from libra.environments.served import EpisodeFailedError, as_reward
from libra.loop.episode import Episode, EpisodeMaker, EpisodeRequest
from libra.loop.fleet import ServingFleet
from libra.loop.running_turn import Draft
from libra.loop.turn_maker import RolloutObserver, TurnMaker
from libra.records.schema import Evaluation
from libra.route.policy import ToolReturn
from libra.trajectory import ToolStatus, Turn

T = TypeVar("T")


class Codec(Protocol):
    """Text to token ids and back."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: Sequence[int]) -> str: ...


class Rollout:
    """Runs episodes of one environment on a fleet."""

    def __init__(
        self,
        environment: Environment,
        tools: Sequence[str],
        codec: Codec,
        fleet: ServingFleet,
        longest_context: int,
        observer: RolloutObserver,
        now: Callable[[], float],
    ) -> None:
        self._environment = environment
        self._tools = {name: environment.tools[name] for name in tools}
        self._codec = codec
        self._longest_context = longest_context
        self._observer, self._now = observer, now
        stop = codec.encode(environment.stop)
        if len(stop) != 1:
            raise ValueError(f"the stop text {environment.stop!r} must be one token of the model, not {len(stop)}")
        self._turns = TurnMaker(environment.name, stop[0], fleet, observer)

    @property
    def generated_tokens(self) -> int:
        return self._turns.generated_tokens

    async def episode(self, asked: EpisodeRequest) -> Episode:
        draft = Draft(asked, self._now())
        draft.given(self._codec.encode(asked.prompt.text))
        draft.prompt_tokens = len(draft.tokens)
        returned: ToolReturn | None = None
        while True:
            turn = await self._turns.make(draft, self._environment.turn_tokens, returned)
            text = self._codec.decode(turn)
            call = self._environment.parse(text)
            last_chance = len(draft.turns) + 1 >= self._environment.max_turns
            if call is None or last_chance:
                return self._finish(draft, turn, text)
            began = time.monotonic()
            self._observer.tools(draft.engine, 1)
            try:
                status, reply = await self._call(call)
            finally:
                self._observer.tools(draft.engine, -1)
            seconds = time.monotonic() - began
            back = self._codec.encode(reply)
            if len(draft.tokens) + len(back) + self._environment.turn_tokens > self._longest_context:
                return self._finish(draft, turn, text)
            draft.given(back)
            draft.turns.append(Turn(len(turn), call.tool, status, len(back), seconds))
            returned = ToolReturn(call.tool, status, len(back))

    async def _call(self, call: ToolCall) -> tuple[ToolStatus, str]:
        """Call the tool; returns its status and reply. The status follows from the end of the call, never from the
        text."""
        environment = self._environment
        tool = self._tools.get(call.tool)
        if tool is None:
            return "error", environment.error_text
        try:
            reply = await _within(environment.deadline, tool(call.argument))
        except TimeoutError:
            return "timeout", environment.timeout_text
        except ToolError as error:
            return "error", str(error)
        except Exception:  # noqa: BLE001 - a tool is a user's code: the agent sees an error, and the run continues
            return "error", environment.error_text
        return ("ok", reply) if isinstance(reply, str) else ("error", environment.error_text)

    def _finish(self, draft: Draft, turn: list[int], text: str) -> Episode:
        draft.turns.append(Turn(len(turn), None, None, 0))
        return self._turns.finish(draft, self._reward(draft.asked.prompt, text))

    def _reward(self, prompt: Prompt, text: str) -> float:
        try:
            given = self._environment.reward(prompt, text)
        except Exception as error:
            where = f"environment {self._environment.name}: the reward of {prompt.id}"
            raise EpisodeFailedError(f"{where} raised {type(error).__name__}: {error}") from error
        return as_reward(given, self._environment.name, prompt.id)


async def _within(deadline: float, call: Awaitable[T]) -> T:
    """Result of `call` within `deadline` seconds; raises `TimeoutError` otherwise. A call that ignores its cancellation
    continues in the background. A call that cancels itself raises `RuntimeError` here, which does not end the episode.
    """
    task = asyncio.ensure_future(call)
    task.add_done_callback(_let_go)
    try:
        await asyncio.wait([task], timeout=deadline)
    finally:
        in_time = task.done()
        task.cancel()
    if not in_time:
        raise TimeoutError(f"no reply in {deadline} s")
    if task.cancelled():
        raise RuntimeError("the tool cancelled itself")
    return task.result()


def _let_go(task: asyncio.Future[T]) -> None:
    """Retrieve an exception that came after the caller stopped waiting, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()


_AT_ONCE = 64  # episodes of an evaluation in progress
_NOW = 0.0  # deadline of evaluation episodes, earlier than that of all training episodes
_CHECKED = 12  # episodes of a comparison of log-probs


async def evaluate(
    rollout: EpisodeMaker, prompts: Sequence[Prompt], name: str, step: int, temperature: float
) -> tuple[Evaluation, list[Episode]]:
    """Accuracy of the weights after `step` over `prompts`, sampled at `temperature` and greedy; also returns the
    sampled episodes.

    A question has the same seed in every evaluation, so two evaluations differ by their policies rather than by chance
    (common random numbers).
    """
    under_way = asyncio.Semaphore(_AT_ONCE)

    async def one(kind: str, index: int, prompt: Prompt, heat: float) -> Episode:
        async with under_way:
            asked = EpisodeRequest(f"{name}-{kind}-{index}", prompt, _NOW, heat, seed=index, version=step)
            return await rollout.episode(asked)

    sampled = await asyncio.gather(*(one("sampled", i, p, temperature) for i, p in enumerate(prompts)))
    greedy = await asyncio.gather(*(one("greedy", i, p, 0.0) for i, p in enumerate(prompts)))
    return Evaluation(
        name=name,
        step=step,
        questions=len(prompts),
        sampled_accuracy=fmean(episode.reward for episode in sampled),
        greedy_accuracy=fmean(episode.reward for episode in greedy),
        turns_mean=fmean(len(episode.trajectory.turns) for episode in sampled),
    ), list(sampled)


async def logprob_gap(
    rollout: EpisodeMaker, trainers: Trainer, prompts: Sequence[Prompt], label: str, version: int, temperature: float
) -> float:
    """Largest difference of a generated token's log-prob between engine and trainer. It covers fresh episodes, sampled
    at `temperature` with the weights of `version`, which the trainer has too."""
    episodes = await asyncio.gather(
        *(
            rollout.episode(EpisodeRequest(f"{label}-{index}", prompt, _NOW, temperature, fresh=True, version=version))
            for index, prompt in enumerate(prompts[:_CHECKED])
        )
    )
    scored = await trainers.logprobs([episode.tokens for episode in episodes])
    return max(
        abs(engine - trainer)
        for episode, logprobs in zip(episodes, scored, strict=True)
        for engine, trainer, own in zip(episode.logprobs[1:], logprobs, episode.generated[1:], strict=True)
        if own
    )
