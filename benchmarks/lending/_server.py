"""A serving engine in a process of its own, with a few requests always under way.

    python -m benchmarks.lending._server DIRECTORY LIVE

Prints "ready", then serves until its standard input closes, and prints a JSON object: what it waited for the token.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.lending._engines import ask, serving_engine
from libra.lend.backend.scheduler import SynchronousLending


def _run_delay() -> float:
    """Seconds in which this process could have run and others had the core."""
    return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9


class WatchedScheduler(SynchronousLending):
    """Tells how long it waited for the token, less what the machine made it wait for a core; and how much of the grant
    was left as it asked, which is what it has to wait."""

    waits: list[tuple[float, float]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.waits = []
        acquire = self._token.acquire

        def watched() -> bool:
            began, delayed = time.monotonic(), _run_delay()
            have = acquire()
            waited = time.monotonic() - began
            left = self._token.expires - began if self._token.lent else 0.0
            self.waits.append((max(0.0, waited - (_run_delay() - delayed)), left))
            return have

        self._token.acquire = watched  # type: ignore[method-assign]


def main(directory: Path, live: int) -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    engine = serving_engine(directory, WatchedScheduler)
    scheduler = engine.engine_core.engine_core.scheduler
    print("ready", flush=True)
    number, tokens, began = 0, 0, time.monotonic()
    while not select.select([sys.stdin], [], [], 0)[0]:
        while len(scheduler.requests) < live:
            ask(engine, f"s{number}", 30 + number % 200, 40 + number % 30, number)
            number += 1
        tokens += sum(len(it.outputs[0].token_ids) for it in engine.step())
    seconds = time.monotonic() - began
    said = {"waits": scheduler.waits, "fenced": scheduler._token.fenced, "tokens": tokens, "seconds": seconds}
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
