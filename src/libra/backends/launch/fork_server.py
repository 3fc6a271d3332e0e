"""The fork server of a node: a process that has imported the heavy libraries once, and forks workers.

Invariant: every process started here has ended when `close` returns, and also when this process is killed. Each worker
dies with the fork server. The fork server dies with the controller, and also ends when the controller's socket closes.
It never starts a thread, so a fork is a clean copy. Importing vLLM takes seconds, a fork milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from libra.backends.devices import gpus_bf16, inventory
from libra.backends.launch.worker import die_with, serve_and_leave
from libra.backends.machine import Bf16Speed, probe
from libra.backends.transport.channel import WorkerChannel
from libra.backends.transport.engine_messages import StartEngine, StartServer
from libra.backends.transport.messages import DeviceKind
from libra.backends.transport.shared_memory import create_buffer
from libra.backends.transport.trainer_messages import StartTrainer
from libra.config.extras import install_command
from libra.config.rooms import offered

_EVERYWHERE = {
    # One thread per worker, since a slot is a share of one core, and spinning threads would take the neighbour's share.
    # On GPUs, libraries would start threads at import, and a process with threads cannot be forked.
    "OMP_NUM_THREADS": "1",
    # The allocator of pyarrow would also start a thread; pandas imports pyarrow if it is installed.
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    # The engine shares the worker's process and its event loop.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}
WORKER_ENVIRONMENT = _EVERYWHERE | {
    "OMP_WAIT_POLICY": "PASSIVE",
    # Compilation would stall the first request for many seconds, without gain for models this small.
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the slot sets the cores
}
GPU_WORKER_ENVIRONMENT = _EVERYWHERE | {
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # the order in `devices`
    # One of vLLM's libraries for quantized models would compile kernels at import, in processes and threads.
    "HUMMING_DISABLE_PARALLEL_BUILD": "1",
}
_COMMAND = ("-m", "libra.backends.launch.fork_server")

_SPAWN_SECONDS = 30.0  # after which a fork server hangs; a fork takes milliseconds
_EXIT_SECONDS = 5.0  # in which a worker ends by itself after the order to stop
_CLOSE_SECONDS = 5.0  # in which all workers end after their fork server was killed, as with a core dump
_KILL_SECONDS = 30.0  # in which a killed process ends
_GROUP_SECONDS = 0.01  # between two checks whether the forks of a worker have ended
_THREAD_SECONDS = 5.0  # in which threads end that a library started at import


_PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 15, 36  # linux/prctl.h


class LaunchError(RuntimeError):
    """Worker processes cannot be started."""


class ForkError(RuntimeError):
    """A worker process cannot be started now; other workers are not affected."""


class ForkServer:
    """The controller's handle on a fork server. `weights` is the descriptor of the memory in which workers find
    weights; `kind` is the kind of their devices."""

    def __init__(
        self,
        logs: Path,
        name: str = "fork server",
        command: tuple[str, ...] = _COMMAND,
        kind: DeviceKind = "cpu",
    ) -> None:
        """Start the server. It logs to `<logs>/<name>.log`, and each worker to its own file."""
        self._logs, self.log, self.kind = logs, logs / f"{name}.log", kind
        self._control, theirs = socket.socketpair()
        self._control.setblocking(False)
        self.weights = create_buffer()
        with open(self.log, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, *command, str(theirs.fileno()), str(self.weights), kind],
                pass_fds=(theirs.fileno(), self.weights),
                env={**os.environ, **(GPU_WORKER_ENVIRONMENT if kind == "cuda" else WORKER_ENVIRONMENT)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the controller, which then ends its workers in order
            )
        theirs.close()
        self.bf16: Bf16Speed  # of the device here; set by `ready`
        self._lock = asyncio.Lock()
        self._closed = False
        self._running: dict[int, int] = {}  # process id -> pidfd, since the system may reuse an id

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ready(self) -> float:
        """Wait until all libraries are imported; returns the seconds of the import. Raises `LaunchError`."""
        reply = await self._reply()
        if reply is None:
            tail = self.log.read_text(errors="replace").strip().splitlines()[-3:]
            raise LaunchError(
                "worker processes cannot start: " + (" | ".join(tail) or "no output")
                + f". Is the engine extra installed? ({install_command('gpu' if self.kind == 'cuda' else 'cpu')})"
            )  # fmt: skip
        self.bf16 = Bf16Speed(**reply["bf16"])
        return float(reply["ready"])

    async def fork(self, name: str, connection: socket.socket, environment: Mapping[str, str]) -> int:
        """Fork a worker at the other end of `connection`, and close `connection` here; returns the process id. Raises
        `ForkError`, and `LaunchError` if no worker can be forked any more."""
        # The answer must be read even if the caller stops waiting, since the next caller would get it otherwise.
        return await asyncio.shield(asyncio.create_task(self._fork(name, connection, environment)))

    async def _fork(self, name: str, connection: socket.socket, environment: Mapping[str, str]) -> int:
        async with self._lock:
            log = str((self._logs / f"{name}.log").resolve())
            order = json.dumps({"name": name, "log": log, "environment": dict(environment)}).encode()
            try:
                with connection:
                    socket.send_fds(self._control, [order], [connection.fileno()])
            except OSError:  # the fork server has just ended
                raise LaunchError(f"worker {name} cannot start: the fork server process ended") from None
            try:
                reply = await asyncio.wait_for(self._reply(), _SPAWN_SECONDS)
            except TimeoutError:
                self._process.kill()  # otherwise a late answer would go to the next caller
                raise LaunchError(f"worker {name} cannot start: the fork server process does not answer") from None
            if reply is None:
                raise LaunchError(f"worker {name} cannot start: the fork server process ended")
            if "error" in reply:
                raise ForkError(f"worker {name} cannot start: {reply['error']}")
            pid = int(reply["pid"])
            with contextlib.suppress(ProcessLookupError):  # the worker has ended already
                self._running[pid] = os.pidfd_open(pid)
            return pid

    def kill(self, pid: int) -> None:
        """Kill a worker at once; no error if it has ended."""
        if pid in self._running:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._running[pid], signal.SIGKILL)

    async def gone(self, pid: int) -> None:
        """Wait until the worker and its forks have ended; kill them if they do not end by themselves. Raises
        `TimeoutError` if even that does not end them."""
        process = self._running.get(pid)
        if process is None:
            return
        watched = os.dup(process)  # a descriptor has one reader, and another caller may wait, too
        try:
            if not await _ended(watched, _EXIT_SECONDS):
                self.kill(pid)
                if not await _ended(watched, _KILL_SECONDS):
                    raise TimeoutError(f"process {pid} does not end")
        finally:
            os.close(watched)
        await _group_ended(pid)
        if self._running.get(pid) == process:
            os.close(self._running.pop(pid))

    async def ended(self) -> None:
        """Wait until the fork server process has ended."""
        process = os.pidfd_open(self.pid)
        try:
            await _ended(process, None)
        finally:
            os.close(process)

    async def _reply(self) -> dict[str, Any] | None:
        """The fork server's next line; None if it has ended."""
        try:
            line = await asyncio.get_running_loop().sock_recv(self._control, 4096)
        except ConnectionError:
            return None
        return json.loads(line) if line else None

    def close(self) -> None:
        """End the fork server and its workers. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._process.poll() is None:
            self._process.kill()  # its workers end with it
            self._process.wait()
        self._control.close()
        deadline = time.monotonic() + _CLOSE_SECONDS
        while self._running:
            worker = self._running.popitem()[1]
            select.select([worker], [], [], max(0.0, deadline - time.monotonic()))  # readable once it has ended
            os.close(worker)
        os.close(self.weights)


async def _ended(process: int, seconds: float | None) -> bool:
    """Whether the process of this pidfd ends within `seconds`. The pidfd is readable once the process has ended."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(process, ended.set)
    try:
        await asyncio.wait_for(ended.wait(), seconds)
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(process)
    return True


async def _group_ended(pid: int) -> None:
    """Kill the remaining processes in the group of an ended worker, and wait for their end. Raises `TimeoutError`."""
    deadline = time.monotonic() + _KILL_SECONDS
    with contextlib.suppress(ProcessLookupError, PermissionError):  # no process is left
        while True:
            os.killpg(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise TimeoutError(f"processes that worker {pid} forked do not end")
            await asyncio.sleep(_GROUP_SECONDS)


# In the fork server process and its forks


def main(control_descriptor: int, weights_descriptor: int, kind: DeviceKind = "cpu") -> None:
    die_with(os.getppid())
    control = socket.socket(fileno=control_descriptor)
    began = time.monotonic()
    _import_everything(kind)
    bf16 = _probe(kind)
    gc.collect()
    gc.freeze()  # keeps pages shared: the collector does not touch objects from before the fork
    # The kernel reaps all children, also those that workers leave; the controller notices a death on its socket.
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
            _require_clean()
            pid = os.fork()
        except (OSError, ForkError) as error:  # memory or processes may be short for a while; only this fork failed
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
    """Run one worker in the forked child, and exit without the fork server's clean-up handlers."""
    os.setpgid(0, 0)  # a group with the worker's own forks, such as an engine's process for each further GPU
    ctypes.CDLL(None).prctl(_PR_SET_NAME, order["name"].encode()[:15])  # the name in ps and top
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.update(order["environment"])
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    channel = WorkerChannel(connection)
    serve_and_leave(lambda: serve(channel, weights_descriptor), channel.send)


def serve(channel: WorkerChannel, weights_descriptor: int) -> None:
    """Serve as the kind of worker that the first message names."""
    began = time.monotonic()
    match message := channel.receive():
        case StartEngine():
            from libra.backends.vllm.engine_worker import serve_engine

            serve_engine(channel, message, weights_descriptor, began)
        case StartServer():
            next(offered("traced server"))(channel, message)
        case StartTrainer():
            from libra.backends.grpo.training_worker import serve_trainer

            serve_trainer(channel, message, weights_descriptor, began)
        case _:
            raise TypeError(f"no worker starts with {type(message).__name__}")


def _require_clean() -> None:
    """Raise `ForkError` if a fork would inherit state that it cannot use: a CUDA context, or locks of other threads."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise ForkError("a library has opened a CUDA context in the fork server; see its log")
    deadline = time.monotonic() + _THREAD_SECONDS
    while (tasks := len(list(Path("/proc/self/task").iterdir()))) > 1:
        if time.monotonic() > deadline:
            names = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
            which = f" ({', '.join(names)})" if names else ""
            raise ForkError(f"a library has started {tasks - 1} thread(s){which} in the fork server; see its log")
        time.sleep(_GROUP_SECONDS)


def _import_everything(kind: DeviceKind) -> None:
    """Import the libraries of engines and trainers, so that a fork already has them. vLLM's worker for CPUs replaces
    streams, events and pinned memory of CUDA in all of torch, so no process may have both workers."""
    import vllm.model_executor.models.llama
    import vllm.model_executor.models.qwen3
    import vllm.v1.executor.uniproc_executor
    from vllm.model_executor.models import ModelRegistry

    if kind == "cuda":
        import vllm.v1.attention.backends.flash_attn
        import vllm.v1.executor.multiproc_executor
        import vllm.v1.worker.gpu_worker
    else:
        import vllm.v1.attention.backends.cpu_attn
        import vllm.v1.worker.cpu_worker

    # vLLM inspects a model that is registered only by name in a separate process. It does so for every engine until
    # one engine has stored the result. That takes as long as importing vLLM, and the process outlives a worker that is
    # killed meanwhile.
    ModelRegistry.register_model("Qwen3ForCausalLM", vllm.model_executor.models.qwen3.Qwen3ForCausalLM)
    ModelRegistry.register_model("LlamaForCausalLM", vllm.model_executor.models.llama.LlamaForCausalLM)


def _probe(kind: DeviceKind) -> Bf16Speed:
    """Speed of bf16. A CPU is measured in a child, since later forks could not inherit the threads of a measurement."""
    if kind == "cuda":
        return gpus_bf16(inventory())
    fork_server = os.getpid()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        die_with(fork_server)
        try:
            os.write(writing, json.dumps(asdict(probe("cpu"))).encode())
        except Exception:  # noqa: BLE001 - the child must not continue as fork server; the log has the error
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as answer:
        found = answer.read()
    os.waitpid(pid, 0)
    if not found:
        raise RuntimeError("the test of bf16 matrix products failed: the traceback above in this log has the cause")
    return Bf16Speed(**json.loads(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), "cuda" if sys.argv[3] == "cuda" else "cpu")
