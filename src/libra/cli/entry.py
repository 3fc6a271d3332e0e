"""Entry point of the `libra` command. An interruption ends it with one line, also while it loads libraries.

Invariant: Ctrl-C and SIGTERM have the same effect. A command may print its own message about its interruption.
"""

from __future__ import annotations

import signal
import sys
from typing import NoReturn

_INTERRUPTED = 130  # exit status, as in a shell


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        from libra.cli.app import main as run_command

        run_command()
    except KeyboardInterrupt:
        end_interrupted()


def end_interrupted() -> NoReturn:
    sys.stderr.write("libra: interrupted\n")
    sys.exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
