"""Episodes that an environment plays itself: it requests turns over HTTP and returns the reward.

Invariant: an episode that fails because of its environment is played again from its start. After the third failure the
run ends with the error. An episode that exceeds the longest context is a failure of the model: if the environment then
raises an error, the reward is 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from libra.backends.chat_format import ChatFormat
from libra.environments.protocol import Prompt
from libra.environments.served import EpisodeFailedError, Seat, ServedEnvironment, as_reward
from libra.loop.conversation import Conversation
from libra.loop.episode import Episode, EpisodeRequest
from libra.loop.episode_server import EpisodeServer
from libra.loop.running_turn import Draft
from libra.loop.turn_maker import TurnMaker

_ATTEMPTS = 3


class ServedRollout:
    """Has one environment play episodes on a fleet."""

    def __init__(
        self,
        environment: ServedEnvironment,
        chat: ChatFormat,
        server: EpisodeServer,
        turns: TurnMaker,
        longest_context: int,
        now: Callable[[], float],
    ) -> None:
        self._environment, self._chat, self._server = environment, chat, server
        self._turns, self._longest_context, self._now = turns, longest_context, now

    @property
    def generated_tokens(self) -> int:
        return self._turns.generated_tokens

    async def episode(self, asked: EpisodeRequest) -> Episode:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return await self._play(asked)
            except EpisodeFailedError as error:
                if attempt == _ATTEMPTS:
                    raise EpisodeFailedError(
                        f"episode {asked.id} of {asked.prompt.id} failed {attempt} times: {error}"
                    ) from None
        raise AssertionError("unreachable")

    async def _play(self, asked: EpisodeRequest) -> Episode:
        def begin(number: int) -> Draft:
            return Draft(replace(asked, id=f"{asked.id}~{number}") if number else asked, self._now())

        conversation = Conversation(
            begin, self._chat, self._turns, self._environment.turn_tokens, self._longest_context
        )
        try:
            with self._server.seated(asked.id, conversation) as seat:
                reward = await self._reward(asked.prompt, seat, conversation)
            episode = await conversation.finish(reward)
        except BaseException:
            await conversation.abandon()
            raise
        if episode is None:
            raise EpisodeFailedError("its environment made no request to the model")
        return episode

    async def _reward(self, prompt: Prompt, seat: Seat, conversation: Conversation) -> float:
        try:
            given = await self._environment.play(prompt, seat)
        except Exception as error:
            said = str(error) if isinstance(error, EpisodeFailedError) else f"{type(error).__name__}: {error}"
            if conversation.broken is not None:
                raise conversation.broken from None
            if conversation.outgrown:
                return 0.0
            raise EpisodeFailedError(said) from error
        return as_reward(given, self._environment.name, prompt.id)
