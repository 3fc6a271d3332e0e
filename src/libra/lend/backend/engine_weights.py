"""The weights of an agent's engine, for which the agent follows a run's publications.

Invariant: the engine gets only complete, checked versions, one at a time. The last version is not overwritten before
the engine has answered. When the agent follows another run, it begins without weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from libra.backends.transport.engine_messages import LoadWeights, WeightsPlace
from libra.backends.weights.grid import Grid
from libra.exec.background import background
from libra.lend.weights.processes import WeightsFollower, WeightsProcessError
from libra.records.files import DiskError


class EngineWeights:
    """Follows publications for an agent's engine. `memory` is the descriptor of the memory that engines load from.
    `load` makes the present engine load a version, and returns when the engine has loaded it or has ended. `lost` is
    called with the reason when no further versions will arrive."""

    def __init__(
        self,
        memory: int,
        log: Path,
        load: Callable[[LoadWeights], Awaitable[None]],
        lost: Callable[[str], None],
    ) -> None:
        self._memory, self._log, self._load, self._lost = memory, log, load, lost
        self._source: tuple[WeightsPlace, Grid] | None = None
        self._latest: LoadWeights | None = None
        self._loading = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    def follows(self, place: WeightsPlace, grid: Grid) -> bool:
        return self._source == (place, grid)

    async def follow(self, place: WeightsPlace, grid: Grid) -> None:
        """Follow the publications at this address from now on."""
        await self.close()
        self._source = place, grid
        self._task = background(self._keep_up(place, grid), "follow weights")

    async def bring(self) -> None:
        """Have a newly started engine load the latest version, unless none has arrived."""
        async with self._loading:
            if self._latest is not None:
                await self._load(self._latest)

    async def close(self) -> None:
        """Stop following. Returns after the engine has answered."""
        async with self._loading:
            task, self._task, self._source, self._latest = self._task, None, None, None
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def _keep_up(self, place: WeightsPlace, grid: Grid) -> None:
        follower: WeightsFollower | None = None
        try:
            follower = await WeightsFollower.open(grid, self._memory, place, self._log)
            while True:
                order = await follower.next()
                async with self._loading:
                    self._latest = order
                    await self._load(order)
                follower.loaded()
        except (WeightsProcessError, DiskError) as error:
            self._task = self._source = None  # the next run starts another follower
            self._lost(str(error))
        finally:
            if follower is not None:
                await follower.close()
