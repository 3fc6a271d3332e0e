"""A replica of several processes on its way up: a process that is lost before they have met is named at once."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time

import pytest

from libra.backends.launch.handle import START_DEADLINE
from libra.backends.transport.channel import PeerChannel
from libra.backends.transport.messages import Failure

LEADER = """
import os, signal, socket, sys
from libra.backends.launch.worker import serve_and_leave
from libra.backends.grpo import training_worker
from libra.backends.grpo.model_part import meet
from libra.backends.transport.channel import WorkerChannel

signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # as in every worker

def killed(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)

def failing(*arguments):
    raise ValueError("no memory")

def last_is_killed(rank, processes, store, device):
    return meet(rank, processes, store, device) if rank < processes - 1 else killed()

{patch}
own = WorkerChannel(socket.socket(fileno=int(sys.argv[1])))
serve_and_leave(lambda: training_worker.serve_together(own, 3, lambda channel, inside: None), own.send)
"""


@pytest.mark.parametrize(
    ("patch", "why"),
    [
        ("training_worker._serve_peer = killed", r"process \d of the replica has ended: killed by signal 9"),
        ("training_worker._serve_peer = lambda *arguments: os._exit(3)", r"process \d .* has ended: exit status 3"),
        ("training_worker._serve_peer = failing", r"process \d of the replica: ValueError: no memory"),
        ("training_worker.meet = last_is_killed", "process 2 of the replica has ended: killed by signal 9"),
    ],
    ids=["killed", "exits", "fails", "killed as they meet"],
)
def test_a_process_that_is_lost_before_they_have_met_is_not_waited_for(patch: str, why: str) -> None:
    ours, theirs = socket.socketpair()
    ours.settimeout(START_DEADLINE)
    with ours, theirs:
        command = [sys.executable, "-c", LEADER.format(patch=patch), str(theirs.fileno())]
        leader = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stderr=subprocess.DEVNULL)
        theirs.close()
        began = time.monotonic()
        last_words = PeerChannel(ours).receive()
        assert leader.wait(START_DEADLINE) == 1
    assert time.monotonic() - began < START_DEADLINE / 2  # most of it is the import of torch
    assert isinstance(last_words, Failure)
    assert re.fullmatch(f"BrokenReplicaError: {why}", last_words.error)
