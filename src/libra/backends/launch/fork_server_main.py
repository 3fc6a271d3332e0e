"""A process that has imported the heavy libraries once and forks workers from there.

Invariant: no worker outlives the fork server, and the fork server does not outlive the controller: each dies with its
parent (`PR_SET_PDEATHSIG`), and the fork server also ends when the controller's socket closes. It never starts a
thread, so a fork is a clean copy; importing vLLM takes seconds, forking it milliseconds.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NoReturn, Protocol

from libra.backends.arithmetic import Bf16Speed, probe
from libra.backends.transport.channel import WorkerChannel
from libra.backends.transport.engine_messages import StartEngine
from libra.backends.transport.messages import Failure, Message
from libra.backends.transport.trainer_messages import StartTrainer

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


_PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 15, 36  # linux/prctl.h


def main(control_descriptor: int, weights_descriptor: int) -> None:
    die_with(os.getppid())
    control = socket.socket(fileno=control_descriptor)
    began = time.monotonic()
    _import_everything()
    bf16 = _probe()
    gc.collect()
    gc.freeze()  # shared pages stay shared: the collector does not touch what existed before the fork
    # The kernel reaps, also those whom a worker forked and left behind; the controller sees a death on its socket.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    ready = {"ready": time.monotonic() - began, "bf16": asdict(bf16)}
    control.sendall(json.dumps(ready).encode() + b"\n")
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, 65536, 1)
        if not request:
            return
        order: dict[str, Any] = json.loads(request)
        fork_server = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:  # memory or processes are short, which may pass: that start has failed, no more
            os.close(descriptors[0])
            control.sendall(json.dumps({"error": str(error)}).encode() + b"\n")
            continue
        if pid == 0:
            die_with(fork_server)
            control.close()
            _become_worker(socket.socket(fileno=descriptors[0]), order, weights_descriptor)
        os.close(descriptors[0])
        control.sendall(json.dumps({"pid": pid}).encode() + b"\n")


def _become_worker(connection: socket.socket, order: dict[str, Any], weights_descriptor: int) -> NoReturn:
    """Run one worker in the forked child, and leave without the fork server's clean-up handlers."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, order["name"].encode()[:15])  # what ps and top show
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.update(order["environment"])
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    channel = WorkerChannel(connection)
    serve_and_leave(lambda: serve(channel, weights_descriptor), channel)


def serve(channel: WorkerChannel, weights_descriptor: int) -> None:
    """A worker's first message says what it is to become."""
    began = time.monotonic()
    match message := channel.receive():
        case StartEngine():
            from libra.backends.vllm.engine import serve_engine

            serve_engine(channel, message, weights_descriptor, began)
        case StartTrainer():
            from libra.backends.grpo.training_worker import serve_trainer

            serve_trainer(channel, message, weights_descriptor, began)
        case _:
            raise TypeError(f"a worker starts with StartEngine or StartTrainer, not {type(message).__name__}")


def _import_everything() -> None:
    """What engines and trainers import, so that a fork has it already."""
    import vllm.model_executor.models.qwen3
    import vllm.v1.attention.backends.cpu_attn
    import vllm.v1.executor.uniproc_executor
    import vllm.v1.worker.cpu_worker
    from vllm.model_executor.models import ModelRegistry

    # A model that it knows by its name only, vLLM looks at in a process of its own, once for every engine until one has
    # kept the result: that takes as long as importing vLLM, and outlives a worker that is killed meanwhile.
    ModelRegistry.register_model("Qwen3ForCausalLM", vllm.model_executor.models.qwen3.Qwen3ForCausalLM)


def _probe() -> Bf16Speed:
    """In a child: it may start the threads and the GPU that later forks cannot take along."""
    fork_server = os.getpid()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        die_with(fork_server)
        try:
            os.write(writing, json.dumps(asdict(probe())).encode())
        except Exception:  # noqa: BLE001 - it must not go on as the fork server, which ends too; the log says why
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as answer:
        found = answer.read()
    os.waitpid(pid, 0)
    if not found:
        raise RuntimeError("matrix products could not be tried on this device")
    return Bf16Speed(**json.loads(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
