"""Which allocator a command runs with."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Python counts the blocks of its own allocator, and none of the C library's.
TELL = """
import os, sys
from libra.cli.allocator import use_system_allocator

use_system_allocator(sys.argv[1])
print(sys.getallocatedblocks() == 0, "PYTHONMALLOC" in os.environ, os.getpid())
"""


def told(*options: str, verb: str, **environment: str) -> tuple[list[str], int]:
    """Output of a process, in words, and its process id."""
    command = [sys.executable, *options, "-c", TELL, verb]
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONMALLOC", "PYTHONDEVMODE")}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=clean | environment)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return said.split(), process.pid


@pytest.mark.skipif(sys.platform != "linux", reason="the allocator is chosen on Linux alone")
def test_a_router_uses_the_allocator_of_the_c_library_and_its_children_do_not() -> None:
    said, started = told(verb="route")
    assert said == ["True", "False", str(started)]


@pytest.mark.parametrize("verb", ["plan", "simulate"])
def test_a_short_command_keeps_the_faster_allocator(verb: str) -> None:
    assert told(verb=verb)[0][:2] == ["False", "False"]


def test_a_choice_of_the_user_stays() -> None:
    assert told(verb="route", PYTHONMALLOC="pymalloc")[0][:2] == ["False", "True"]


def test_an_interpreter_that_reads_no_environment_starts_once_more_and_no_more() -> None:
    src = os.pathsep.join(it for it in sys.path if it)
    code = f"import sys; sys.path[:0] = {src.split(os.pathsep)!r}\n" + TELL
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, "route"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split()[0] == "False"
