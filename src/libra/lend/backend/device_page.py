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
POLL = 0.0002  # seconds between two looks at fields of another process
_PATIENCE = 2.0  # seconds within which a notice in progress must be whole: the kernel may suspend its writer

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_LOCK = fcntl.LOCK_EX | fcntl.LOCK_NB
_ROLES = ("lender", "borrower")  # each locks the byte of the file with its index
_RANGE = struct.Struct("hhqqi4x")  # `struct flock`: type, whence, start, length, process; native alignment
_HEADER = struct.Struct("<8sQQ")
_NOTICE = struct.Struct("<qqddqqqqqqqqqddQ")  # see `ServingNotice`; its checksum follows
_NOTICE_AT = 64
_CHECKSUM = struct.Struct("<Q")
_VIEW_FIELDS = len(fields(ServingView))
# `astuple` makes deep copies, which would slow serving's steps down.
_view_fields, _kv_fields = (attrgetter(*(it.name for it in fields(kind))) for kind in (ServingView, KVView))
_FIELDS_AT = 256
_STEP = struct.Struct("<iiiddf")
_STEPS = 64  # number of last steps on the page
_STEPS_AT = 384
_TALLY = struct.Struct("<qqqqqdd256s")
_TALLY_AT = 2432
_FACTS = struct.Struct("<QQ")  # length and checksum of the JSON that follows
_FACTS_AT = 2816


class LendingError(RuntimeError):
    """A device cannot be shared. The message is one line with the remedy."""


class ServingNotice(NamedTuple):
    """Serving's last notice."""

    view: ServingView
    kv: KVView
    wants: bool  # serving waits for the device
    pace: float  # seconds per token with which `view.due` was computed; 0: no borrower has set a pace
    at: float
    pid: int


class ServingStep(NamedTuple):
    """One step that serving made."""

    sequences: int
    new_tokens: int  # tokens beyond one per sequence
    context: int
    seconds: float
    ended: float = 0.0
    margin: float = math.inf  # seconds from the step's end to the earliest due time; inf: no token was due


class EngineFacts(NamedTuple):
    """Model and limits of the serving engine."""

    model: str  # the server's option `--model`
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int


class BorrowerTally(NamedTuple):
    """Totals of a loan since its borrower began."""

    grants: int = 0  # used grants
    overstayed: int = 0  # used grants that ended before the borrower released the device
    over_bound: int = 0  # steps that took longer than their bound
    tokens: int = 0  # computed by the steps
    unrecorded: int = 0  # lines for which the disk of the record had no room
    lent: float = 0.0  # seconds of steps
    longest_step: float = 0.0  # C for serving's last notice; 0: not known yet
    why: str = ""  # reason why nothing is lent now; empty: the device is lent, or no work waits


class PageFields(ctypes.Structure):
    """Numbers at fixed places of a page. The numbers are aligned, so each is read and written whole."""

    # Written by the borrower
    expires: float  # end of the current grant
    pace: float  # seconds per token to which serving may be slowed down
    wish: float  # least slack of serving, in seconds, that makes a grant useful; 0: the borrower has no work
    kv_asked: int  # bytes of KV that serving is to cede
    kv_held: int  # bytes of ceded KV that the borrower has
    # Written by the lender
    lease: float  # time until which the device may be borrowed
    # Written by serving
    epoch: int  # grants after whose end serving continued without the lock
    steps: int  # steps that serving has made

    _fields_ = [
        *((name, ctypes.c_double) for name in ("expires", "pace", "wish")),
        *((name, ctypes.c_uint64) for name in ("kv_asked", "kv_held")),
        ("lease", ctypes.c_double),
        *((name, ctypes.c_uint64) for name in ("epoch", "steps")),
    ]


class DevicePage:
    """The mapped file. Raises LendingError if the file is not a device's page, or cannot become one."""

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
                raise LendingError(f"{path}: {size} bytes, but a device's page has {_SIZE}; give another file")
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
                raise LendingError(f"{path}: no server has run since this machine was started; start the server")
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
        """Try to lock the device. Returns whether this process has the lock now."""
        try:
            fcntl.flock(self.descriptor, _LOCK)
        except BlockingIOError:
            return False
        return True

    def unlock(self) -> None:
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)

    def only(self, who: str, refusal: str) -> int:
        """Take the lock that only one process in the role `who` can have, on the file and not on its name. Returns the
        lock's descriptor. Raises LendingError with `refusal` if another process has the lock."""
        only = os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.fcntl(only, fcntl.F_OFD_SETLK, _RANGE.pack(fcntl.F_WRLCK, os.SEEK_SET, _ROLES.index(who), 1, 0))
        except BlockingIOError:
            os.close(only)
            raise LendingError(f"{self.path}: {refusal}") from None
        return only

    def has(self, who: str) -> bool:
        """Whether a process has the lock of the role `who`."""
        try:
            os.close(self.only(who, "the lock is taken"))
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
        """Serving's last notice. Raises LendingError if the server ended while it wrote the notice."""
        until = time.monotonic() + _PATIENCE
        while True:
            read = self.bytes[_NOTICE_AT : _NOTICE_AT + _NOTICE.size + _CHECKSUM.size]
            said, checksum = read[: _NOTICE.size], _CHECKSUM.unpack(read[_NOTICE.size :])[0]
            if crc32(said) == checksum:
                break
            if time.monotonic() > until:
                raise LendingError(f"{self.path}: the serving engine ended while it wrote; start the server again")
            time.sleep(POLL)
        *views, wants, pace, at, pid = _NOTICE.unpack(said)
        view, kv = ServingView(*views[:_VIEW_FIELDS]), KVView(*views[_VIEW_FIELDS:])
        return ServingNotice(view, kv, bool(wants), pace, at, pid)

    # Serving's steps

    def add_step(self, step: ServingStep) -> None:
        count = self.fields.steps
        _STEP.pack_into(self.bytes, _STEPS_AT + count % _STEPS * _STEP.size, *step)
        self.fields.steps = count + 1

    def steps_between(self, seen: int, count: int) -> list[ServingStep]:
        """Steps number `seen` to before `count`; at most the last 63, since older ones are overwritten."""
        first = max(seen, count - _STEPS + 1)  # serving may be overwriting the oldest step
        return [
            ServingStep(*_STEP.unpack_from(self.bytes, _STEPS_AT + number % _STEPS * _STEP.size))
            for number in range(first, count)
        ]

    # Description of the serving engine

    @property
    def facts(self) -> EngineFacts:
        """Model and limits of the serving engine. Raises LendingError if the page has no description."""
        size, checksum = _FACTS.unpack_from(self.bytes, _FACTS_AT)
        text = self.bytes[_FACTS_AT + _FACTS.size : _FACTS_AT + _FACTS.size + size]
        if not text or crc32(text) != checksum:
            raise LendingError(f"{self.path}: the serving engine is not described; start the server again")
        return EngineFacts(**json.loads(text))

    @facts.setter
    def facts(self, facts: EngineFacts) -> None:
        text = json.dumps(facts._asdict()).encode()
        if _FACTS_AT + _FACTS.size + len(text) > _SIZE:
            raise LendingError(
                f"{self.path}: the model's name has {len(facts.model)} characters; serve it under a shorter name"
            )
        self.bytes[_FACTS_AT : _FACTS_AT + _FACTS.size + len(text)] = _FACTS.pack(len(text), crc32(text)) + text

    # The borrower's tally

    @property
    def tally(self) -> BorrowerTally:
        *numbers, why = _TALLY.unpack_from(self.bytes, _TALLY_AT)
        return BorrowerTally._make((*numbers, why.rstrip(b"\0").decode(errors="ignore")))

    @tally.setter
    def tally(self, tally: BorrowerTally) -> None:
        *numbers, why = tally
        _TALLY.pack_into(self.bytes, _TALLY_AT, *numbers, why.encode(errors="replace")[:256])

    def close(self) -> None:
        del self.fields  # a view of the bytes, which would keep them from closing
        self.bytes.close()
        os.close(self.descriptor)
