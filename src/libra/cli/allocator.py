"""The C library's allocator for a command that runs for weeks.

Python's own allocator returns an arena to the system only when each of its objects is gone, so a rush of sessions
leaves most of its memory behind. The C library returns free pages from anywhere (`libra.serve.http` requests this after
a rush). An interpreter chooses its allocator at its start, so the process restarts, with the same id.
"""

from __future__ import annotations

import os
import sys

_CHOICE = "PYTHONMALLOC"
_LONG_RUNNING = ("route",)
_MARK = "LIBRA_ALLOCATOR_CHOSEN"  # what ends the second start: an isolated interpreter does not read the choice


def use_system_allocator(verb: str | None) -> None:
    """Restart this process with the C library's allocator if `verb` runs for long. Does nothing if the user chose an
    allocator or the development mode, or if the system is not Linux."""
    if os.environ.pop(_MARK, None):
        del os.environ[_CHOICE]  # processes that this one starts choose for themselves
        return
    if verb not in _LONG_RUNNING or _CHOICE in os.environ or sys.flags.dev_mode or sys.platform != "linux":
        return
    environment = os.environ | {_CHOICE: "malloc", _MARK: "1"}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
