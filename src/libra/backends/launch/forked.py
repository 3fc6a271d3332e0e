"""The life of a forked process, from its first moment to its last.

Invariant: it dies with the process that forked it, and never returns into that one's code.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn, Protocol

from libra.backends.transport.messages import Failure, Message

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class _Sender(Protocol):
    def send(self, message: Message) -> None: ...


def die_with(parent: int) -> None:
    """From now on this process is killed when its parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os._exit(1)


def serve_and_leave(serve: Callable[[], None], channel: _Sender) -> NoReturn:
    """Serve, tell the other end of the channel of an error, and end without the clean-up handlers of the parent."""
    status = 0
    try:
        serve()
    except ConnectionError:
        pass  # the other end went away: nothing is left to serve
    except Exception as error:  # noqa: BLE001 - the process boundary: everything becomes a message and a log entry
        traceback.print_exc()
        status = 1
        try:
            channel.send(Failure(f"{type(error).__name__}: {error}"))
        except OSError:
            pass
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
