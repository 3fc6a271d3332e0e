"""Episodes that their environment plays: it asks for turns over HTTP, and says the reward.

Invariant: an episode that fails for a reason of its environment is played again from its beginning, a few times, before
the run ends for it. One that outgrew the longest context is the model's doing: it has no reward if its environment
gives none.
"""

from __future__ import annotations

from collections.abc import Callable

from libra.backends.chat_format import ChatFormat
from libra.environments.protocol import Prompt
from libra.environments.served import EpisodeFailedError, Seat, ServedEnvironment, as_reward
from libra.loop.conversation import Conversation
from libra.loop.episode import Episode
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

    async def episode(
        self,
        id: str,
        prompt: Prompt,
        due: float,
        temperature: float,
        fresh: bool = False,
        seed: int | None = None,
        version: int = -1,
    ) -> Episode:
        def begin(number: int) -> Draft:
            name = f"{id}~{number}" if number else id
            return Draft(name, prompt, due, temperature, fresh, self._now(), seed=seed, version=version)

        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return await self._play(id, prompt, begin)
            except EpisodeFailedError as error:
                if attempt == _ATTEMPTS:
                    raise EpisodeFailedError(f"episode {id} of {prompt.id} failed {attempt} times: {error}") from None
        raise AssertionError("unreachable")

    async def _play(self, id: str, prompt: Prompt, begin: Callable[[int], Draft]) -> Episode:
        conversation = Conversation(
            begin, self._chat, self._turns, self._environment.turn_tokens, self._longest_context
        )
        try:
            with self._server.seated(id, conversation) as seat:
                reward = await self._reward(prompt, seat, conversation)
            episode = await conversation.finish(reward)
        except BaseException:
            await conversation.abandon()
            raise
        if episode is None:
            raise EpisodeFailedError("its environment asked the model for nothing")
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
        return as_reward(given)
