"""The weights of an engine behind an agent: what a run publishes, followed for it.

Invariant: the engine is told only of versions that lie whole and checked in its memory, one at a time, and nobody
writes to what it was last told of before it has answered. Who follows another run begins from nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from libra.backends.transport.engine_messages import LoadWeights, WeightsPlace
from libra.backends.weights.grid import Grid
from libra.backends.weights.processes import WeightsFollower, WeightsProcessError
from libra.exec.background import background
from libra.records.files import DiskError


class EngineWeights:
    """`memory` is the descriptor of the memory that engines load from. `load` has the engine that is there take a
    version, and returns when it has, or is gone; `lost` is told why nothing more comes."""

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
        """From now on what is published there."""
        await self.close()
        self._source = place, grid
        self._task = background(self._keep_up(place, grid), "follow weights")

    async def bring(self) -> None:
        """Have an engine that came since take the version that is here, if there is one."""
        async with self._loading:
            if self._latest is not None:
                await self._load(self._latest)

    async def close(self) -> None:
        """Follow nobody. The engine has answered when this returns."""
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
            self._task = self._source = None  # whoever asks next has it begun anew
            self._lost(str(error))
        finally:
            if follower is not None:
                await follower.close()
