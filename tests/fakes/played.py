"""Episodes that an environment plays, with a model whose turns are written down."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fakes.chats import write_chat_model
from fakes.engines import Script, ScriptedEngine, turn
from fakes.far_end import PATIENCE
from fakes.scripted import FirstInstance, Unwatched, make_fleet

from libra.backends.chat_format import ChatFormat
from libra.environments.served import ServedEnvironment
from libra.loop.episode import Episode, EpisodeRequest
from libra.loop.episode_server import EpisodeServer
from libra.loop.served_rollout import ServedRollout
from libra.loop.turn_maker import TurnMaker


class _Forgetting(FirstInstance):
    def forget(self, trajectory_id: str) -> None: ...


def play(
    environment: ServedEnvironment,
    folder: Path,
    *texts: str,
    calls: bool = False,
    episodes: int = 1,
    longest: int = 100,
) -> list[Episode]:
    """Episodes of the first task that is held out, all at once. `folder`: of the model, which calls its calculator by
    `>` with `calls`."""
    write_chat_model(folder, calls=calls)
    chat = ChatFormat(folder)
    script = Script(*(turn(chat.encode(text)) for text in texts))
    [prompt] = environment.prompts("heldout", 1, 0)

    async def run() -> list[Episode]:
        fleet = make_fleet(_Forgetting(), ScriptedEngine("rollout-0", script))
        turns = TurnMaker(environment.name, chat.stop_token, fleet, Unwatched())
        async with EpisodeServer.open() as server, environment.opened(folder):
            rollout = ServedRollout(environment, chat, server, turns, longest, lambda: 0.0)
            return await asyncio.gather(
                *(rollout.episode(EpisodeRequest(f"e{it}", prompt, 0.0, 1.0)) for it in range(episodes))
            )

    return asyncio.run(asyncio.wait_for(run(), PATIENCE))


def text(episode: Episode, folder: Path) -> str:
    return ChatFormat(folder).decode(episode.tokens)
