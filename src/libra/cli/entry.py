"""Start of the `libra` command: an interruption ends it in one line, also while its libraries are loaded.

Invariant: Ctrl-C and SIGTERM are the same. A command with more to say about its interruption says it itself.
"""

from __future__ import annotations

import signal
import sys
from typing import NoReturn

_INTERRUPTED = 130  # exit status, as of a shell


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
