"""Who outlives whom: a real fork server whose heavy imports are left out, and workers that it really forks."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from fakes.far_end import PATIENCE
from fakes.fork_servers import BARE, fork_server
from fakes.gpus import FakeGpu, fake_driver

from libra.backends.devices import inventory, placed
from libra.backends.launch.fork_server import GPU_WORKER_ENVIRONMENT, ForkError, ForkServer, LaunchError
from libra.backends.launch.launcher import LocalLauncher, WorkerLink
from libra.backends.transport.messages import Failure, Stop

BROKEN = "raise SystemExit('ImportError: no module named vllm')"


Forked = tuple[LocalLauncher, subprocess.Popen[bytes]]


@pytest.fixture
def source() -> str:
    return BARE


@pytest.fixture
def forked(tmp_path: Path, source: str) -> AbstractAsyncContextManager[Forked]:
    """A launcher, and the process of its fork server."""
    return fork_server(tmp_path, source)


async def ended(process: int) -> bool:
    """Whether the process of this descriptor ends. It becomes readable when it does, whoever its parent is."""
    readable, _, _ = await asyncio.to_thread(select.select, [process], [], [], PATIENCE)
    os.close(process)
    return bool(readable)


async def gone(link: WorkerLink) -> None:
    """Returns when the worker's end of the channel is closed, which the kernel does when its process ends."""
    with pytest.raises(ConnectionError):
        await link.channel.receive()


async def test_workers_are_forked_and_end_when_they_are_left_alone(forked: Forked, tmp_path: Path) -> None:
    launcher, process = forked
    assert await launcher.ready() >= 0
    assert launcher.processes() == (process.pid,)
    links = [await launcher.spawn(name, 0) for name in ("core-0", "rollout-0")]
    assert [link.name for link in links] == ["core-0", "rollout-0"]
    assert len({process.pid, *(link.pid for link in links)}) == 3
    for link in links:
        worker = os.pidfd_open(link.pid)
        link.channel.close()
        assert await ended(worker)
    await launcher.spawn("core-0", 0)  # the fork server goes on
    assert process.poll() is None
    assert (tmp_path / "core-0.log").is_file()


async def test_a_worker_that_is_told_nonsense_says_so_and_ends(forked: Forked, tmp_path: Path) -> None:
    launcher, _ = forked
    await launcher.ready()
    link = await launcher.spawn("rollout-0", 0)
    link.channel.send(Stop())
    assert await link.channel.receive() == Failure("TypeError: no worker starts with Stop")
    await gone(link)
    assert "Traceback" in (tmp_path / "rollout-0.log").read_text()


async def test_closing_the_launcher_ends_everything(forked: Forked) -> None:
    launcher, process = forked
    await launcher.ready()
    links = [await launcher.spawn(f"rollout-{number}", number) for number in range(2)]
    workers = [os.pidfd_open(link.pid) for link in links]
    launcher.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(launcher._fork_server.weights)
    assert process.returncode == -signal.SIGKILL
    for worker in workers:
        assert select.select([worker], [], [], 0)[0]  # it is gone already
        os.close(worker)
    await asyncio.gather(*(gone(link) for link in links))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(8)]
    launcher.close()  # a second time closes nobody else's file
    for file in files:
        os.close(file)  # raises where it is closed already


async def test_workers_die_with_their_fork_server(forked: Forked) -> None:
    launcher, process = forked
    await launcher.ready()
    link = await launcher.spawn("rollout-0", 0)
    process.kill()
    process.wait()
    await gone(link)
    with pytest.raises((LaunchError, ConnectionError)):
        await launcher.spawn("rollout-1", 0)


async def test_a_fork_server_that_was_killed_is_told_of_by_the_next_start(forked: Forked) -> None:
    launcher, process = forked
    await launcher.ready()
    process.kill()
    process.wait()
    with pytest.raises(LaunchError, match="worker core-0 cannot start: the fork server process ended"):
        await launcher.spawn("core-0", 0)


async def test_a_killed_worker_is_seen_on_its_channel_and_nobody_else_dies(forked: Forked) -> None:
    launcher, process = forked
    await launcher.ready()
    victim, other = [await launcher.spawn(f"rollout-{number}", number) for number in range(2)]
    os.kill(victim.pid, signal.SIGKILL)
    await gone(victim)
    other.channel.send(Stop())
    assert isinstance(await other.channel.receive(), Failure)
    assert process.poll() is None


async def test_a_worker_is_gone_when_its_slot_is_used_again(forked: Forked, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher, _ = forked
    monkeypatch.setattr("libra.backends.launch.fork_server._EXIT_SECONDS", 0.05)
    await launcher.ready()
    leaving, hanging, killed = [await launcher.spawn(f"rollout-{number}", number) for number in range(3)]
    processes = [os.pidfd_open(link.pid) for link in (leaving, hanging, killed)]
    leaving.channel.close()
    await launcher.gone(leaving)
    os.kill(hanging.pid, signal.SIGSTOP)  # it does not even notice that its channel is closed
    hanging.channel.close()
    await launcher.gone(hanging)
    launcher.kill(killed)
    await launcher.gone(killed)
    for ended_process in processes:
        assert select.select([ended_process], [], [], 0)[0]  # it has ended already
        os.close(ended_process)
    launcher.kill(killed)  # no error where there is nothing left
    await launcher.gone(killed)


async def test_a_fork_server_that_does_not_answer_is_told_of(forked: Forked, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher, process = forked
    monkeypatch.setattr("libra.backends.launch.fork_server._SPAWN_SECONDS", 0.05)
    await launcher.ready()
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(LaunchError, match="worker rollout-0 cannot start: the fork server process does not answer"):
        await launcher.spawn("rollout-0", 0)


NO_ROOM_ONCE = BARE.replace(
    "fork_server._import",
    """
import os
fork = os.fork
def full():
    os.fork = fork
    raise OSError(11, "Resource temporarily unavailable")
os.fork = full
fork_server._import""",
    1,
)


@pytest.mark.parametrize("source", [NO_ROOM_ONCE])
async def test_a_fork_that_fails_fails_alone(forked: Forked) -> None:
    launcher, process = forked
    await launcher.ready()
    with pytest.raises(ForkError, match=r"worker rollout-0 cannot start: .*Resource temporarily unavailable"):
        await launcher.spawn("rollout-0", 0)
    assert (await launcher.spawn("rollout-0", 0)).name == "rollout-0"
    assert process.poll() is None


async def test_a_fork_server_ends_when_its_controller_hangs_up(forked: Forked) -> None:
    launcher, process = forked
    await launcher.ready()
    link = await launcher.spawn("rollout-0", 0)
    launcher._fork_server._control.close()
    assert await asyncio.to_thread(process.wait, PATIENCE) == 0
    await gone(link)


@pytest.mark.parametrize("source", [BROKEN])
async def test_a_fork_server_that_cannot_import_says_why(forked: Forked) -> None:
    launcher, process = forked
    await asyncio.to_thread(process.wait, PATIENCE)
    with pytest.raises(LaunchError, match=r"no module named vllm\. Is the engine extra installed"):
        await launcher.ready()


CONTROLLER = """
import asyncio, sys
from pathlib import Path
from fakes.fork_servers import fork_server
async def main():
    async with fork_server(Path(sys.argv[1])) as (launcher, process):
        await launcher.ready()
        link = await launcher.spawn("rollout-0", 0)
        print(process.pid, link.pid, flush=True)
        await asyncio.get_running_loop().create_future()
asyncio.run(main())
"""


def test_nothing_outlives_a_controller_that_is_killed(tmp_path: Path) -> None:
    controller = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER, str(tmp_path)], cwd=Path(__file__).parents[2], stdout=subprocess.PIPE
    )
    assert controller.stdout is not None
    pids = [int(pid) for pid in controller.stdout.readline().split()]
    fork_server, worker = [os.pidfd_open(pid) for pid in pids]
    controller.kill()
    controller.wait()
    assert asyncio.run(ended(fork_server))
    assert asyncio.run(ended(worker))
    controller.stdout.close()


async def test_the_answer_to_a_start_that_was_given_up_is_nobody_elses(forked: Forked) -> None:
    launcher, process = forked
    await launcher.ready()
    process.send_signal(signal.SIGSTOP)
    given_up = asyncio.create_task(launcher.spawn("rollout-0", 0))
    await asyncio.sleep(0.05)
    given_up.cancel()
    process.send_signal(signal.SIGCONT)
    link = await launcher.spawn("rollout-1", 0)
    launcher.kill(link)
    await gone(link)  # nobody else was killed in its place


async def test_two_may_wait_for_the_same_worker_to_go(forked: Forked, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher, _ = forked
    await launcher.ready()
    for seconds, leaves in ((PATIENCE, True), (0.05, False)):
        monkeypatch.setattr("libra.backends.launch.fork_server._EXIT_SECONDS", seconds)
        link = await launcher.spawn("rollout-0", 0)
        waiting = asyncio.gather(launcher.gone(link), launcher.gone(link))
        await asyncio.sleep(0)
        if leaves:
            link.channel.close()
        await asyncio.wait_for(waiting, PATIENCE / 4)
        assert not Path(f"/proc/{link.pid}").exists()


GPU_IMPORTS = """
import json, os, sys, torch
import libra.backends.launch.fork_server as fork_server
names = ("Stream", "Event", "current_stream", "synchronize", "is_available")
before = [getattr(torch.cuda, name) for name in names] + [torch.Tensor.pin_memory]
fork_server._import_everything(sys.argv[1])
after = [getattr(torch.cuda, name) for name in names] + [torch.Tensor.pin_memory]
same = all(one is other for one, other in zip(before, after))
print(json.dumps([same, torch.cuda.is_initialized(), len(os.listdir("/proc/self/task"))]))
"""


@pytest.mark.integration
def test_imports_for_gpus_patch_nothing_and_start_nothing() -> None:
    environment = {**os.environ, **GPU_WORKER_ENVIRONMENT}
    done = subprocess.run([sys.executable, "-c", GPU_IMPORTS, "cuda"], env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["[true, false, 1]"], done.stderr


SHOWING = BARE.replace(
    "fork_server.main(",
    "fork_server.serve = lambda channel, weights: print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True)\n"
    "fork_server.main(",
).replace("import sys\n", "import os, sys\n")


async def test_a_local_worker_sees_the_gpus_of_its_slot_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in fake_driver(tmp_path, [FakeGpu("NVIDIA H100", 81559, "9.0")] * 4).items():
        monkeypatch.setenv(name, value)
    devices = placed(inventory(), 2, 1, 2)
    process = ForkServer(tmp_path, command=("-c", SHOWING), kind="cuda")
    launcher = LocalLauncher(process, devices)
    try:
        await launcher.ready()
        assert launcher.hardware.endswith("4 x NVIDIA H100, driver 580.95")
        for slot in (0, 1):
            link = await launcher.spawn(f"w{slot}", slot)
            assert link.device.gpus == devices[slot].gpus
            await gone(link)
    finally:
        launcher.close()
    assert [(tmp_path / f"w{slot}.log").read_text() for slot in (0, 1)] == ["0,1\n", "2,3\n"]


@pytest.mark.parametrize(
    ("dirt", "why"),
    [
        (
            "import threading, time; fork_server._THREAD_SECONDS = 0.1\n"
            "threading.Thread(target=time.sleep, args=(60,), name='builder', daemon=True).start()",
            r"1 thread\(s\) \(builder\)",
        ),
        (
            "import types; sys.modules['torch'] = types.SimpleNamespace("
            "cuda=types.SimpleNamespace(is_initialized=lambda: True))",
            "CUDA context",
        ),
    ],
)
async def test_a_fork_that_would_inherit_what_it_cannot_use_is_refused(tmp_path: Path, dirt: str, why: str) -> None:
    async with fork_server(tmp_path, BARE.replace("fork_server.main(", f"{dirt}\nfork_server.main(")) as (launcher, _):
        await launcher.ready()
        with pytest.raises(ForkError, match=why):
            await launcher.spawn("w0", 0)


async def test_a_fork_waits_for_threads_that_end(tmp_path: Path) -> None:
    ending = "import threading, time; threading.Thread(target=time.sleep, args=(0.3,), daemon=True).start()"
    source = BARE.replace("fork_server.main(", f"{ending}\nfork_server.main(")
    async with fork_server(tmp_path, source) as (launcher, _):
        await launcher.ready()
        await launcher.spawn("w0", 0)


FORKING = BARE.replace(
    "fork_server.main(",
    "def serve(channel, weights):\n"
    "    if (child := os.fork()) == 0:\n"
    "        channel.close()\n"
    "        time.sleep(600)\n"
    "    print(child, flush=True)\n"
    "fork_server.serve = serve\n"
    "fork_server.main(",
).replace("import sys\n", "import os, sys, time\n")


async def test_a_worker_is_gone_with_the_processes_that_it_forked(tmp_path: Path) -> None:
    """As an engine on several GPUs has one for each."""
    async with fork_server(tmp_path, FORKING) as (launcher, _):
        await launcher.ready()
        link = await launcher.spawn("w0", 0)
        await gone(link)  # the worker itself, which its child outlives
        child = int((tmp_path / "w0.log").read_text())
        assert Path(f"/proc/{child}").exists()
        await launcher.gone(link)
        assert not Path(f"/proc/{child}").exists()
