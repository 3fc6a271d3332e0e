"""The command line: which parts, on which GPU, and where the rows go."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Coroutine, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import benchmarks.gpu
from benchmarks.command import command_line
from benchmarks.gpu.calibrated import calibrated
from benchmarks.gpu.parts import engines, join, train, weights
from benchmarks.gpu.roles import roles
from benchmarks.gpu.setting import DRY, Setting, on_gpu
from benchmarks.gpu.sharded import sharded
from benchmarks.gpu.whole_run import run
from benchmarks.rows import Row, never, report, write_rows
from libra.backends.devices import gpu_names, inventory
from libra.backends.machine import hardware_name

Made = list[Row]
PARTS: dict[str, Callable[[Setting, Path], Made | Coroutine[Any, Any, Made]]] = {
    "engines": engines,
    "run": run,
    "train": train,
    "weights": weights,
    "join": join,
    "roles": roles,
    "sharded": sharded,
    "calibrate": calibrated,
}


_LINES = 30  # of each log of a part that failed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line("gpu", benchmarks.gpu.__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all, in this order)")
    parser.add_argument(
        "--gpu", default="0", metavar="INDEX", help="the GPU, as nvidia-smi counts (default: 0); 0,1 for `sharded`"
    )
    parser.add_argument("--dry-run", action="store_true", help="a tiny model on CPU slots: whether all commands work")
    options = parser.parse_args(arguments)
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown:
        parser.error(f"{unknown[0]} is no part: choose from {', '.join(PARTS)}")
    gpus = () if options.dry_run else inventory()
    asked = options.gpu.split(",")
    missing = [index for index in asked if index not in [str(gpu.index) for gpu in gpus]]
    if missing and not options.dry_run:
        parser.error(f"GPU {missing[0]} is not there: give one that nvidia-smi lists, or --dry-run")
    if len(asked) > 2:
        parser.error(f"--gpu {options.gpu}: give one GPU, or two")
    setting = DRY if options.dry_run else on_gpu(*asked)
    hardware = f"{hardware_name()}, {gpu_names(gpus)}" if gpus else hardware_name()
    date = datetime.now(UTC).date().isoformat()
    print(f"{date}, {hardware}", flush=True)
    rows = [Row(f"{date}, {hardware}", "parts", len(options.parts or PARTS), "")]
    for part in options.parts or PARTS:
        began = time.monotonic()
        found = _made(part, setting)
        report(found, None)
        print(f"{part}: {time.monotonic() - began:.0f} s", flush=True)
        rows += found
        if options.json is not None:
            write_rows(rows, options.json)  # after each part: the machine may be taken back in the next one
    return int(any(row.met is False for row in rows))


def _made(part: str, setting: Setting) -> list[Row]:
    """The rows of a part. One that fails shows the end of its workers' logs, and does not keep others from theirs."""
    with tempfile.TemporaryDirectory(prefix=f"libra-gpu-{part}-") as directory:
        try:
            found = PARTS[part](setting, Path(directory))
            return found if isinstance(found, list) else asyncio.run(found)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this part's result
            traceback.print_exc()
            for log in sorted(Path(directory).rglob("*.log")):
                last = log.read_text(errors="replace").splitlines()[-_LINES:]
                print(f"--- {log.name}", *last, sep="\n", file=sys.stderr)
            return [never(part, "errors", [f"{type(error).__name__}: {error}"], "none is expected")]


if __name__ == "__main__":
    sys.exit(main())
