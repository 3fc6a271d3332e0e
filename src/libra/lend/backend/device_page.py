"""A file that all processes of a lent device map: the notices of each, field by field, and the device's lock.

Invariant: each field has only one writer, so no field needs a lock. A field of 8 bytes is read atomically; serving's
notice is longer and has a checksum. Times are CLOCK_MONOTONIC seconds, which all processes of a machine share. This
clock restarts with the machine, and a page on a disk then becomes invalid.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import math
import mmap
import os
import struct
import time
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from libra.lend.gate import ServingView
from libra.lend.quota import KVView
from libra.lend.records.own_file import StrangerError, open_own

_MAGIC = b"libralnd"
_LAYOUT = 5
_SIZE = 4096
POLL = 0.0002  # seconds between two looks at what another process may change
_PATIENCE = 2.0  # seconds in which a page that is being written must be whole: its writer may be put aside meanwhile

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_LOCK = fcntl.LOCK_EX | fcntl.LOCK_NB
_ROLES = ("lender", "borrower")  # the byte of the file that each of them locks
_RANGE = struct.Struct("hhqqi4x")  # `struct flock`: type, whence, start, length, process; native alignment
_HEADER = struct.Struct("<8sQQ")
_NOTICE = struct.Struct("<qqddqqqqqqqqqddQ")  # see `ServingNotice`; its checksum follows
_NOTICE_AT = 64
_CHECKSUM = struct.Struct("<Q")
_VIEW_FIELDS = len(fields(ServingView))
# `astuple` copies deeply, which a step of serving would feel.
_view_fields, _kv_fields = (attrgetter(*(it.name for it in fields(kind))) for kind in (ServingView, KVView))
_FIELDS_AT = 256
_STEP = struct.Struct("<iiiddf")
_STEPS = 64  # of the last steps, how many can be read
_STEPS_AT = 384
_TALLY = struct.Struct("<qqqqqdd256s")
_TALLY_AT = 2432
_FACTS = struct.Struct("<QQ")  # length and checksum of the JSON that follows
_FACTS_AT = 2816


class LendingError(RuntimeError):
    """A device cannot be shared. One line, with the remedy."""


class ServingNotice(NamedTuple):
    """Serving's last notice."""

    view: ServingView
    kv: KVView
    wants: bool  # it waits for the device
    pace: float  # seconds per token, for which `view.due` was computed; 0: no borrower had asked for one
    at: float
    pid: int


class ServingStep(NamedTuple):
    """One step that serving made."""

    sequences: int
    new_tokens: int  # beyond one a sequence
    context: int
    seconds: float
    ended: float = 0.0
    margin: float = math.inf  # seconds by which the token that was due first came before its due; inf: none was due


class EngineFacts(NamedTuple):
    """Model and limits of the serving engine."""

    model: str  # as it was given to the server
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int


class BorrowerTally(NamedTuple):
    """Totals of a loan since its borrower began."""

    grants: int = 0  # that were used
    overstayed: int = 0  # of them, those that serving ended by going ahead
    over_bound: int = 0  # steps that took longer than their bound
    tokens: int = 0  # that they computed
    unrecorded: int = 0  # lines that the record had no room for
    lent: float = 0.0  # seconds of steps
    longest_step: float = 0.0  # C, of what serving said last; 0: not known yet
    why: str = ""  # reason why nothing is lent now; empty where it is


class PageFields(ctypes.Structure):
    """The numbers of a page at their places. They are aligned, so each is read and written whole."""

    # The borrower's
    expires: float  # end of the current grant
    pace: float  # seconds per token that serving may be slowed down to
    wish: float  # seconds that serving must have to spare for a grant to be useful; 0: none is wanted
    kv_asked: int  # bytes of KV that serving is to cede
    kv_held: int  # bytes that it has of what serving ceded
    # the lender's
    lease: float  # until when the device may be borrowed
    # serving's
    epoch: int  # grants that it ended by going ahead
    steps: int  # that it made

    _fields_ = [
        *((name, ctypes.c_double) for name in ("expires", "pace", "wish")),
        *((name, ctypes.c_uint64) for name in ("kv_asked", "kv_held")),
        ("lease", ctypes.c_double),
        *((name, ctypes.c_uint64) for name in ("epoch", "steps")),
    ]


class DevicePage:
    """The mapped file. Raises LendingError if it is no such file, or cannot be one."""

    def __init__(self, path: Path, *, create: bool) -> None:
        self.path = path
        try:
            self.descriptor = open_own(path, create=create)
        except StrangerError as error:
            raise LendingError(f"{path}: {error.strerror}") from None
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise LendingError(f"{path} is a symbolic link; name the file itself") from None
            raise LendingError(
                f"{path}: {error.strerror}; start the serving engine with LendingScheduler and this file first"
            ) from None
        try:
            if create and os.fstat(self.descriptor).st_size == 0:
                os.posix_fallocate(self.descriptor, 0, _SIZE)
            size = os.fstat(self.descriptor).st_size
            if size != _SIZE:
                raise LendingError(f"{path}: {size} bytes, not the {_SIZE} of a device's page; give another file")
            self.bytes = mmap.mmap(self.descriptor, _SIZE)
            self.fields = PageFields.from_buffer(self.bytes, _FIELDS_AT)
            magic, layout, boot = _HEADER.unpack_from(self.bytes, 0)
            started, ours = crc32(_BOOT.read_bytes()), (magic, layout) == (_MAGIC, _LAYOUT)
            if create and (magic == bytes(8) or (ours and boot != started)):
                self.bytes[:] = bytes(_SIZE)
                _HEADER.pack_into(self.bytes, 0, _MAGIC, _LAYOUT, started)
            elif not ours:
                raise LendingError(f"{path}: not a device's page of this version of libra; remove the file")
            elif boot != started:
                raise LendingError(f"{path}: no server has run since this machine was started; start it")
        except OSError as error:
            os.close(self.descriptor)
            raise LendingError(f"{path}: {error.strerror}; give a file on a disk with {_SIZE} bytes free") from None
        except BaseException:
            os.close(self.descriptor)
            raise

    @property
    def replaced(self) -> bool:
        """Whether the name now belongs to another file."""
        try:
            return not os.path.samestat(self.path.stat(), os.fstat(self.descriptor))
        except FileNotFoundError:
            return True

    def lock(self) -> bool:
        """Lock the device; True if this process has it from now on."""
        try:
            fcntl.flock(self.descriptor, _LOCK)
        except BlockingIOError:
            return False
        return True

    def unlock(self) -> None:
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)

    def only(self, who: str, refusal: str) -> int:
        """The descriptor of a lock that only one process can have, on the file itself and not on its name. Raises
        LendingError."""
        only = os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.fcntl(only, fcntl.F_OFD_SETLK, _RANGE.pack(fcntl.F_WRLCK, os.SEEK_SET, _ROLES.index(who), 1, 0))
        except BlockingIOError:
            os.close(only)
            raise LendingError(f"{self.path}: {refusal}") from None
        return only

    def has(self, who: str) -> bool:
        """Whether a process has that lock."""
        try:
            os.close(self.only(who, "somebody has it"))
        except LendingError:
            return True
        return False

    # Serving's notice

    def say(self, notice: ServingNotice) -> None:
        view, kv, *others = notice
        said = _NOTICE.pack(*_view_fields(view), *_kv_fields(kv), *others)
        self.bytes[_NOTICE_AT : _NOTICE_AT + _NOTICE.size + _CHECKSUM.size] = said + _CHECKSUM.pack(crc32(said))

    @property
    def notice(self) -> ServingNotice:
        """Raises LendingError if its writer ended while writing it."""
        until = time.monotonic() + _PATIENCE
        while True:
            read = self.bytes[_NOTICE_AT : _NOTICE_AT + _NOTICE.size + _CHECKSUM.size]
            said, checksum = read[: _NOTICE.size], _CHECKSUM.unpack(read[_NOTICE.size :])[0]
            if crc32(said) == checksum:
                break
            if time.monotonic() > until:
                raise LendingError(f"{self.path}: the serving engine ended while it wrote; start it again")
            time.sleep(POLL)
        *views, wants, pace, at, pid = _NOTICE.unpack(said)
        view, kv = ServingView(*views[:_VIEW_FIELDS]), KVView(*views[_VIEW_FIELDS:])
        return ServingNotice(view, kv, bool(wants), pace, at, pid)

    # its steps

    def add_step(self, step: ServingStep) -> None:
        count = self.fields.steps
        _STEP.pack_into(self.bytes, _STEPS_AT + count % _STEPS * _STEP.size, *step)
        self.fields.steps = count + 1

    def steps_between(self, seen: int, count: int) -> list[ServingStep]:
        """Steps after the first `seen`, of the `count` so far, that can still be read: the last 63 at most."""
        first = max(seen, count - _STEPS + 1)  # the oldest may be under overwriting
        return [
            ServingStep(*_STEP.unpack_from(self.bytes, _STEPS_AT + number % _STEPS * _STEP.size))
            for number in range(first, count)
        ]

    # what it is

    @property
    def facts(self) -> EngineFacts:
        """Raises LendingError if there is no description."""
        size, checksum = _FACTS.unpack_from(self.bytes, _FACTS_AT)
        text = self.bytes[_FACTS_AT + _FACTS.size : _FACTS_AT + _FACTS.size + size]
        if not text or crc32(text) != checksum:
            raise LendingError(f"{self.path}: the serving engine is not described; start it again")
        return EngineFacts(**json.loads(text))

    @facts.setter
    def facts(self, facts: EngineFacts) -> None:
        text = json.dumps(facts._asdict()).encode()
        if _FACTS_AT + _FACTS.size + len(text) > _SIZE:
            raise LendingError(
                f"{self.path}: a model name of {len(facts.model)} characters; serve it under a shorter name"
            )
        self.bytes[_FACTS_AT : _FACTS_AT + _FACTS.size + len(text)] = _FACTS.pack(len(text), crc32(text)) + text

    # and the borrower's tally

    @property
    def tally(self) -> BorrowerTally:
        *numbers, why = _TALLY.unpack_from(self.bytes, _TALLY_AT)
        return BorrowerTally._make((*numbers, why.rstrip(b"\0").decode(errors="ignore")))

    @tally.setter
    def tally(self, tally: BorrowerTally) -> None:
        *numbers, why = tally
        _TALLY.pack_into(self.bytes, _TALLY_AT, *numbers, why.encode(errors="replace")[:256])

    def close(self) -> None:
        del self.fields  # they lie in the bytes
        self.bytes.close()
        os.close(self.descriptor)
