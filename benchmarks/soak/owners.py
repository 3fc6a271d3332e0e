"""Owners of devices that are lent: on each of them a server under traffic, and `libra lend serve`.

Invariant: an owner starts again what has ended, and knows nothing of the run that borrows; a run knows its agents'
sockets only. Nothing that an owner started is running after `end`, or after the soak, however that ended.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.soak.owned_server import LIMITS, MODEL, SHARE, TPOT, TTFT
from benchmarks.soak.processes import still_there
from benchmarks.soak.small_loan import ROOMY, write_loan
from benchmarks.soak.unruly import Unruly
from libra.backends.launch.fork_server import WORKER_ENVIRONMENT
from libra.backends.launch.worker import die_with
from libra.backends.tiny_model import write_tiny_model
from libra.config.run import ModelConfig
from libra.lend.backend.device_page import DevicePage, LendingError
from libra.lend.gate import Slo
from libra.lend.traffic.envelope import Envelope

_PAUSE = 4.0  # seconds between the end of a process and its next start: its word has lapsed by then
_ENGINE = {"max_model_len": 64, "max_num_seqs": 16, "kv_tokens": 1024}  # that borrows
_CERTIFICATE = replace(
    ROOMY,
    hardware=f"{SHARE:g} cores",
    slo=Slo(TTFT, TPOT),
    use=0.8,
    longest_grant=0.04,
    longest_step=0.1,
    envelope=Envelope(rate=4.0, queued=8192, live=32, context=8192, window=2.0),
)


class Owner:
    """Owner of device `number`; files of all owners are in `directory`."""

    def __init__(self, directory: Path, number: int) -> None:
        self._directory, self._number = directory, number
        self._loan, self._device = directory / f"loan-{number}.yaml", directory / f"device-{number}"
        self._core = sorted(os.sched_getaffinity(0))[-1 - number % len(os.sched_getaffinity(0))]
        self._server: subprocess.Popen[bytes] | None = None
        self._agent: subprocess.Popen[bytes] | None = None
        self._next = 0.0  # when something may be started
        self.starts: list[float] = []  # of servers
        self._ready = False
        rollout = {
            "model": "policy",
            "max_model_len": _ENGINE["max_model_len"],
            "max_num_seqs": _ENGINE["max_num_seqs"],
            "kv_cache": "0.25 MiB",
            "borrowed_kv": "4 MiB",
        }
        write_loan(
            self._loan,
            _CERTIFICATE,
            directory / "chat",
            rollout,
            device=self._device.name,
            listen=f"agent-{number}",
            quiet=0.5,
            most_quiet=8.0,
            record=f"lending-{number}.jsonl",
            share=SHARE,
        )

    def tend(self) -> None:
        """Start what is not there: the server first, the agent once it serves."""
        now = time.monotonic()
        for process in (self._server, self._agent):
            if process is not None and process.poll() is not None:
                self._next = now + _PAUSE
        self._server, self._agent = (
            process if process is not None and process.poll() is None else None
            for process in (self._server, self._agent)
        )
        if self._server is None:
            self._ready = False
            if now >= self._next:
                arguments = ["benchmarks.soak.owned_server", str(self._directory), str(self._number)]
                self._server = self._start("server", *arguments)
                self.starts.append(now)
        elif not self._ready:
            self._ready = b"ready\n" in self._log("server").read_bytes()
        elif self._agent is None and now >= self._next:
            arguments = ["libra.cli.app", "lend", "serve", str(self._loan), "--json", "--period", "1"]
            arguments += ["--logs", str(self._directory / f"logs-{self._number}")]
            self._agent = self._start("agent", *arguments)

    def process(self, what: str) -> psutil.Process | None:
        """The server, agent, borrower or follower, if it is there."""
        if what in ("server", "agent"):
            started = self._server if what == "server" else self._agent
            return psutil.Process(started.pid) if started is not None and started.poll() is None else None
        agent = self.process("agent")
        try:
            for child in [] if agent is None else agent.children(recursive=True):
                if child.name() == what or f"libra.lend.weights.{what}" in child.cmdline():
                    return child
        except psutil.NoSuchProcess:
            pass
        return None

    @property
    def grants(self) -> int:
        """Those that the present borrower has used, as the device's page says: a record ends where a disk is full."""
        try:
            page = DevicePage(self._device, create=False)
        except LendingError:
            return 0  # no server has run here
        try:
            return page.tally.grants
        finally:
            page.close()

    def end(self) -> None:
        started = [process for process in (self._agent, self._server) if process is not None]
        family = [child for process in started for child in _descendants(process.pid)]
        for process in started:
            process.kill()
            process.wait()
        still_there(family)  # each of them dies with its parent

    def _start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        soak = os.getpid()

        def begin() -> None:
            die_with(soak)
            os.sched_setaffinity(0, {self._core})

        with self._log(name).open("wb") as log, self._log(name).with_suffix(".all").open("ab") as everything:
            return subprocess.Popen(
                [sys.executable, "-m", *arguments],
                env={**os.environ, **WORKER_ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=everything,
                start_new_session=True,  # Ctrl-C is for the soak
                preexec_fn=begin,
            )

    def _log(self, name: str) -> Path:
        return self._directory / f"{name}-{self._number}.log"


def owned_run(template: Path, directory: Path, count: int) -> tuple[Path, list[Owner]]:
    """A configuration like the template, of a run that borrows from `count` owners; and these owners."""
    directory.mkdir(parents=True)
    alphabet = Unruly().alphabet
    write_tiny_model(directory / "chat", ModelConfig.model_validate(MODEL), alphabet, LIMITS["max_model_len"])
    config: dict[str, Any] = yaml.safe_load(template.read_text())
    write_tiny_model(directory / "policy", ModelConfig.model_validate(config["model"]), alphabet, 192)
    _save_weights(directory / "policy")
    owners = [Owner(directory, number) for number in range(count)]
    config |= {
        "model": {"directory": str(directory / "policy")},
        "lending": {"agents": [str(directory / f"agent-{number}") for number in range(count)], "engine": _ENGINE},
    }
    config["training"]["precision"] = "fp32"  # as the engines that are lent
    shutil.copy(template.with_name("unruly.py"), directory)
    path = directory / "agents.yaml"
    path.write_text(yaml.safe_dump(config))
    return path, owners


def _save_weights(model: Path) -> None:
    """Random ones."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).save_pretrained(model)


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def publishers(controller: int) -> Sequence[psutil.Process]:
    """The processes that publish a run's weights to agents."""
    try:
        children = psutil.Process(controller).children()
        return [child for child in children if "libra.lend.weights.publisher" in child.cmdline()]
    except psutil.NoSuchProcess:
        return []
