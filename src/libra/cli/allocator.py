"""The C library's allocator for a command that runs for weeks.

Python's allocator returns an arena to the system only when all its objects are freed, so most memory stays allocated
after a burst of sessions. The C library can return any free page (`libra.serve.http` requests this after a burst). An
interpreter chooses its allocator at start, so the process restarts, with the same id.
"""

from __future__ import annotations

import os
import sys

_CHOICE = "PYTHONMALLOC"
_LONG_RUNNING = ("route",)
_MARK = "LIBRA_ALLOCATOR_CHOSEN"  # prevents another restart, since an isolated interpreter does not read the choice


def use_system_allocator(verb: str | None) -> None:
    """Restart this process with the C library's allocator if `verb` runs for long. Does nothing if the user chose an
    allocator or the development mode, or if the system is not Linux."""
    if os.environ.pop(_MARK, None):
        del os.environ[_CHOICE]  # child processes choose their own allocator
        return
    if verb not in _LONG_RUNNING or _CHOICE in os.environ or sys.flags.dev_mode or sys.platform != "linux":
        return
    environment = os.environ | {_CHOICE: "malloc", _MARK: "1"}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
