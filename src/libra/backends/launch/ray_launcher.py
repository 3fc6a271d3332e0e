"""Workers on a Ray cluster.

Invariant: every node sees the directories of the run as the controller does, or the run is refused.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

from libra.backends.launch.cluster import ClusterLauncher
from libra.backends.launch.ray_nodes import connected
from libra.config.cache import cache_directory
from libra.config.run import ClusterConfig
from libra.records.disk import writing


@contextlib.asynccontextmanager
async def open_on_ray(cluster: ClusterConfig, logs: Path) -> AsyncIterator[ClusterLauncher]:
    """A launcher that is starting; closed on the way out. Raises `LaunchError`, `DiskError`."""
    with _marks((logs, cache_directory())) as marks:
        async with (
            connected(cluster.ray_address, cluster.slots, cluster.share, cluster.slots_per_node, logs) as (
                nodes,
                seats,
            ),
            ClusterLauncher.open(nodes, seats, marks, cluster.losses_per_hour) as launcher,
        ):
            yield launcher


@contextlib.contextmanager
def _marks(directories: Sequence[Path]) -> Iterator[dict[str, str]]:
    """A file in each directory, and what is in it."""
    mark = secrets.token_hex(8)
    made: dict[str, str] = {}
    try:
        for directory in directories:
            path = directory.absolute() / f"seen-by-all-nodes-{mark}"
            with writing(path):
                directory.mkdir(parents=True, exist_ok=True)
                path.write_text(mark)
            made[str(path)] = mark
        yield made
    finally:
        for made_path in made:
            Path(made_path).unlink(missing_ok=True)
