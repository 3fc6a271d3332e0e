"""The directory of a run: its lock, its `config.json`, and checks that a run can start or resume in it.

Invariant: a process that writes or deletes files in a run directory holds its lock. The operating system releases the
lock at any end of the process.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from libra.config.run import ConfigError, RunConfig
from libra.loop.checkpoint import check_kinds, latest_checkpoint
from libra.records.files import write_whole, writing
from libra.records.run_lock import LOCK, running_process
from libra.route.custom import restore_policy

_RESUMED_AS_STARTED = (
    (None, "seed"),
    ("environment", "kind"),
    ("environment", "train_prompts"),
    ("training", "prompts_per_step"),
    ("training", "samples_per_prompt"),
    ("training", "precision"),
)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Context in which this process holds the lock of a run directory; makes the directory if needed. Raises
    `ConfigError` if another process holds the lock or something else has its name, `DiskError` if the file cannot be
    made."""
    path = directory / LOCK
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise ConfigError(f"name: {path} is not a regular file; remove it")
    lock = FileLock(path, mode=0o644, blocking=False, fallback_to_soft=False)
    try:
        with writing(path):
            directory.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire()
            except Timeout:
                owner = path.read_text(errors="replace").strip() or "unknown"
                raise _RunningError(directory, owner) from None
            path.write_text(f"{os.getpid()}\n")
        yield
    finally:
        lock.release()


class _RunningError(ConfigError):
    def __init__(self, directory: Path, process: str) -> None:
        super().__init__(
            f"name: process {process} is running in {directory}; wait for it, stop it, or give another --name"
        )


def check_not_running(directory: Path) -> None:
    """Raise `ConfigError` if another process runs in the directory, whose files may then change during any check."""
    if (process := running_process(directory)) is not None:
        raise _RunningError(directory, process)


def prepare_run_directory(config: RunConfig, resume: bool, overwrite: bool) -> RunConfig:
    """Empty the run directory if `overwrite`, and write `config.json`, which marks it as a run's from the first moment.
    The caller holds its lock. Checks the directory again, since another run may have begun and ended since the first
    check. Returns the configuration of the run: a resumed run keeps the precision that `auto` once chose. Raises
    `ConfigError`, `DiskError`."""
    directory = config.run_directory
    check_run_directory(config, resume, overwrite)
    if overwrite:
        with writing(directory):
            # The file that marks the directory as a run's goes last: an interrupted --overwrite can be repeated.
            for path in sorted(_files(directory), key=lambda path: path.name == "config.json"):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    if resume and config.training.precision == "auto":
        chosen = _started_with(directory)["training", "precision"]
        config = config if chosen == "auto" else config.computing_in(chosen)
    record_config(config)
    return config


def record_config(config: RunConfig) -> None:
    """Write `config.json`. Raises `DiskError`."""
    write_whole(config.run_directory / "config.json", config.model_dump_json(indent=1) + "\n")


def check_run_directory(config: RunConfig, resume: bool, overwrite: bool) -> None:
    """Check that a run can start, or resume, in its directory. Raises `ConfigError`."""
    directory = config.run_directory
    if resume and overwrite:
        raise ConfigError(
            "--resume and --overwrite contradict each other: one continues the run that the other deletes; give one"
        )
    if not can_be_written(directory):
        raise ConfigError(f"directory: {directory} cannot be written; give a directory that you may write to")
    used = directory.is_dir() and bool(_files(directory))
    if resume and not used:
        raise ConfigError(f"name: there is no run to resume in {directory}; start it without --resume")
    if resume:
        check_kinds(directory)
        path, state = latest_checkpoint(directory, contents=False)  # the run itself reads the contents
        _check_resumed(config, _started_with(directory))
        try:
            restore_policy(config.routing.policy, state.policy)
        except ValueError as error:
            raise ConfigError(f"routing.policy: {path}: {error}") from None
    if used and overwrite and not (directory / "config.json").is_file():
        raise ConfigError(
            f"name: {directory} has files but no run, so --overwrite would delete something else; give another --name"
        )
    if used and not resume and not overwrite:
        raise ConfigError(f"name: {directory} has an earlier run; use --resume, --overwrite, or another --name")


def _started_with(directory: Path) -> dict[tuple[str | None, str], Any]:
    """Settings in `config.json` that a resumed run must keep, by section and key. Raises `ConfigError`."""
    path = directory / "config.json"
    try:
        before = json.loads(path.read_bytes())
        return {
            (section, key): (before if section is None else before[section])[key]
            for section, key in _RESUMED_AS_STARTED
        }
    except OSError as error:
        why = error.strerror or "unreadable"
    except (ValueError, RecursionError, TypeError) as error:
        why = str(error) or "it is nested too deeply"
    except KeyError as error:
        why = f"it lacks {error.args[0]}"
    raise ConfigError(f"name: {path} is damaged ({why}); start again with --overwrite")


def _check_resumed(config: RunConfig, before: Mapping[tuple[str | None, str], Any]) -> None:
    """Check that groups in flight keep their prompts and size, and that replayed steps equal the steps made before."""
    now = config.model_dump(mode="json")
    for (section, key), old in before.items():
        new = (now if section is None else now[section])[key]
        if old != new and new != "auto":  # auto keeps its first choice
            name = key if section is None else f"{section}.{key}"
            raise ConfigError(
                f"{name}: the run was started with {old} and cannot continue with {new}; give the old value, or start"
                " again with --overwrite"
            )


def _files(directory: Path) -> list[Path]:
    """All files of a run in its directory, except the lock."""
    return [path for path in directory.iterdir() if path.name != LOCK]


def can_be_written(directory: Path) -> bool:
    """Whether files can be made in a directory or, if it does not exist, in its nearest existing parent."""
    nearest = next(
        parent
        for parent in (directory, *directory.absolute().parents)
        if os.path.exists(parent)  # noqa: PTH110 - Path.exists raises without permission to look
    )
    return nearest.is_dir() and _writable(nearest)


def _writable(directory: Path) -> bool:
    """Whether a file can be created in the directory. A permission check does not suffice, since root passes it on a
    read-only disk.
    """
    probe = directory / f".libra-probe-{os.getpid()}"
    try:
        probe.touch()
    except OSError:
        return False
    probe.unlink()
    return True
