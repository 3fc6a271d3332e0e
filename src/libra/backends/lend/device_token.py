"""Which of two processes has a device now, and what serving says of itself: a file that both map, and its lock.

Invariant: serving waits for no borrower longer than the grant that is out. The lock alone could not promise that (the
kernel frees it only after it has torn down a killed process), so a grant is a time, written before it begins; from
then on serving goes ahead without the lock, and says so by a new epoch. A loan ends with the lender's word: a time,
which the agent beside the server puts off for as long as all is well. Each field has one writer. Times are
CLOCK_MONOTONIC seconds, which all processes of a machine share and nobody sets.
"""

from __future__ import annotations

import fcntl
import json
import math
import mmap
import os
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from libra.lend.gate import IDLE, ServingView
from libra.lend.quota import KVView

_MAGIC = b"libralnd"
_LAYOUT = 3
_HEADER = struct.Struct("<8sQ")
_SERVING = struct.Struct("<qqddqqqqqqqqqddQ")  # see `ServingNotice`; its checksum follows
_VIEW_FIELDS = len(fields(ServingView))
# `astuple` copies deeply, which a step of serving would feel.
_fields, _kv_fields = (attrgetter(*(it.name for it in fields(kind))) for kind in (ServingView, KVView))
_COUNT = struct.Struct("<Q")
_SECONDS = struct.Struct("<d")
_STEP = struct.Struct("<iiiddf")
_STEPS = 64  # of the last steps, how many can be read

_SERVING_AT = 64
_CHECKSUM_AT = _SERVING_AT + _SERVING.size
_EPOCH_AT = 208  # grants that serving did not wait out
_EXPIRES_AT = 256
_PACE_AT = 264
_WISH_AT = 272
_LEASE_AT = 280
_KV_ASKED_AT = 288
_KV_HELD_AT = 296
_COUNT_AT = 320  # of steps
_STEPS_AT = 384
_TALLY_AT = 2432
_ABOUT_AT = 2816  # its length, its checksum, JSON
_SIZE = 4096
_ABOUT = struct.Struct("<QQ")
_TALLY = struct.Struct("<qqqqqdd256s")

POLL = 0.0002  # seconds between two looks at the lock
_PICKUP = 0.001  # seconds that a borrower has to take what serving can spare
_PATIENCE = 2.0  # seconds in which a page that is being written must be whole: its writer may be put aside meanwhile


class LendingError(RuntimeError):
    """A device cannot be shared. One line, with the remedy."""


class FencedError(RuntimeError):
    """The borrower held the device beyond its grant, and serving went ahead: it must not go on."""


class ServingNotice(NamedTuple):
    """What serving said last."""

    view: ServingView
    kv: KVView
    wants: bool  # it waits for the device
    pace: float  # that `view.due` was reckoned with, seconds a token; 0: nobody had asked for one
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
    """What the serving engine is."""

    model: str  # as it was given to the server
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int


class BorrowerTally(NamedTuple):
    """What came of a loan since its borrower began."""

    grants: int = 0  # that were used
    overstayed: int = 0  # of them, those that serving did not wait out
    over_bound: int = 0  # steps that took longer than their bound
    tokens: int = 0  # that they computed
    unrecorded: int = 0  # lines that the record had no room for
    lent: float = 0.0  # seconds of steps
    longest_step: float = 0.0  # C, of what serving said last; 0: not known yet
    why: str = ""  # nothing is lent now; empty where it is


class _Page:
    """The file, mapped."""

    def __init__(self, path: Path, *, create: bool) -> None:
        self.path = path
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        try:
            self.descriptor = os.open(path, flags, 0o600)
        except OSError as error:
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
            magic, layout = _HEADER.unpack_from(self.bytes, 0)
            if magic == bytes(8) and create:
                _HEADER.pack_into(self.bytes, 0, _MAGIC, _LAYOUT)
            elif (magic, layout) != (_MAGIC, _LAYOUT):
                raise LendingError(f"{path}: not a device's page of this version of libra; remove the file")
        except OSError as error:
            os.close(self.descriptor)
            raise LendingError(f"{path}: {error.strerror}; give a file on a disk with {_SIZE} bytes free") from None
        except BaseException:
            os.close(self.descriptor)
            raise

    def lock(self) -> bool:
        """True if the device is ours from now on."""
        with suppress(BlockingIOError):
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False

    def unlock(self) -> None:
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)

    def describe(self, about: EngineFacts) -> None:
        text = json.dumps(about._asdict()).encode()
        if _ABOUT_AT + _ABOUT.size + len(text) > _SIZE:
            raise LendingError(f"{self.path}: a model name of {len(about.model)} characters; serve it under a shorter")
        self.bytes[_ABOUT_AT : _ABOUT_AT + _ABOUT.size + len(text)] = _ABOUT.pack(len(text), crc32(text)) + text

    def about(self) -> EngineFacts:
        size, checksum = _ABOUT.unpack_from(self.bytes, _ABOUT_AT)
        text = self.bytes[_ABOUT_AT + _ABOUT.size : _ABOUT_AT + _ABOUT.size + size]
        if not text or crc32(text) != checksum:
            raise LendingError(f"{self.path}: it does not say which engine serves; start the serving engine again")
        return EngineFacts(**json.loads(text))

    def notice(self) -> ServingNotice:
        until = time.monotonic() + _PATIENCE
        while True:
            read = self.bytes[_SERVING_AT : _CHECKSUM_AT + _COUNT.size]
            said, checksum = read[: _SERVING.size], _COUNT.unpack(read[_SERVING.size :])[0]
            if crc32(said) == checksum:
                break
            if time.monotonic() > until:
                raise LendingError(f"{self.path}: the serving engine ended as it wrote; start it again")
            time.sleep(POLL)
        *views, wants, pace, at, pid = _SERVING.unpack(said)
        view, kv = ServingView(*views[:_VIEW_FIELDS]), KVView(*views[_VIEW_FIELDS:])
        return ServingNotice(view, kv, bool(wants), pace, at, pid)

    def only(self, who: str, refusal: str) -> int:
        """The descriptor of a lock that one process can have. Raises LendingError."""
        only = os.open(self.path.with_name(f"{self.path.name}.{who}"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(only, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(only)
            raise LendingError(f"{self.path}: {refusal}") from None
        return only

    def close(self) -> None:
        self.bytes.close()
        os.close(self.descriptor)


class ServingToken:
    """The serving engine's side. Makes the file if there is none; one that a server before this one left is taken over,
    and its borrower goes on."""

    def __init__(
        self, path: Path, about: EngineFacts | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._page, self._clock = _Page(path, create=True), clock
        if about is not None:
            self._page.describe(about)
        self._wants = self._held = False
        self.lent = False  # the device was, before the step that is under way
        self.fenced = 0
        self.publish(IDLE, KVView(), self.pace)

    @property
    def pace(self) -> float:
        """Seconds a token that the borrower would have serving slowed down to; 0: there was none yet."""
        return float(_SECONDS.unpack_from(self._page.bytes, _PACE_AT)[0])

    @property
    def expires(self) -> float:
        """When the last grant is over, or was."""
        return float(_SECONDS.unpack_from(self._page.bytes, _EXPIRES_AT)[0])

    @property
    def leased(self) -> bool:
        """Whether the lender has given its word."""
        return bool(_SECONDS.unpack_from(self._page.bytes, _LEASE_AT)[0] > self._clock())

    @property
    def kv_asked(self) -> int:
        """Bytes of KV that the borrower asks for."""
        return int(_COUNT.unpack_from(self._page.bytes, _KV_ASKED_AT)[0])

    @property
    def kv_held(self) -> int:
        """Bytes of KV that it has now, of what serving ceded."""
        return int(_COUNT.unpack_from(self._page.bytes, _KV_HELD_AT)[0])

    @property
    def due(self) -> float:
        """When the next token is due, by what was published last; inf: none is, or nobody has asked for a pace."""
        view, _, pace = self._said
        return view.due if pace > 0 else math.inf

    def publish(self, view: ServingView, kv: KVView, pace: float) -> None:
        self._said = view, kv, pace
        self._write()

    def publish_kv(self, kv: KVView) -> None:
        """Say this of the memory, and the same as before of all else."""
        view, _, pace = self._said
        self.publish(view, kv, pace)

    def acquire(self) -> bool:
        """Have the device. False: it was lent meanwhile, and there is as much to spare again: say who has come
        meanwhile, and ask anew.

        A borrower that wishes for what serving can spare is left a moment to take it: it cannot in the instant between
        two steps. What it then takes is waited for until its grant is over, and not longer.
        """
        if self._held:
            return True
        page, began = self._page, self._clock()
        self.lent = False
        free_until = began + _PICKUP if self.can_spare(began) else began
        while page.lock():
            if self._clock() >= free_until:
                self._held = True
                return True
            page.unlock()
            time.sleep(POLL)
        self.lent = self._wants = True
        self._write()
        while not page.lock():
            if self._clock() >= self.expires:
                if page.lock():
                    break
                self.fenced += 1
                _COUNT.pack_into(page.bytes, _EPOCH_AT, _COUNT.unpack_from(page.bytes, _EPOCH_AT)[0] + 1)
                self._wants = False
                return True
            time.sleep(POLL)
        self._wants = False
        self._held = not self.can_spare(self._clock())
        if not self._held:
            page.unlock()
        return self._held

    def can_spare(self, now: float) -> bool:
        """Whether somebody would borrow the device, and what serving said last leaves enough."""
        view = self._said[0]
        wish, lease = (_SECONDS.unpack_from(self._page.bytes, at)[0] for at in (_WISH_AT, _LEASE_AT))
        return bool(lease > now and wish > 0 and view.live and not view.waiting and view.due - now >= wish)

    def note(self, step: ServingStep | None) -> None:
        """What a step was, for those who bound the next ones."""
        if step is not None:
            page = self._page.bytes
            count = _COUNT.unpack_from(page, _COUNT_AT)[0]
            _STEP.pack_into(page, _STEPS_AT + count % _STEPS * _STEP.size, *step)
            _COUNT.pack_into(page, _COUNT_AT, count + 1)

    def release(self, step: ServingStep | None = None) -> None:
        """Let go of the device, after `publish`."""
        self.note(step)
        if self._held:
            self._held = False
            self._page.unlock()

    def close(self) -> None:
        self._page.close()

    def _write(self) -> None:
        view, kv, pace = self._said
        said = _SERVING.pack(*_fields(view), *_kv_fields(kv), self._wants, pace, self._clock(), os.getpid())
        self._page.bytes[_SERVING_AT : _CHECKSUM_AT + _COUNT.size] = said + _COUNT.pack(crc32(said))


class BorrowerToken:
    """The borrower's side. Raises LendingError where there is no page, or somebody else borrows."""

    def __init__(self, path: Path, pace: float) -> None:
        """`pace` is tau: seconds a token that serving may be slowed down to."""
        if not 0 < pace < math.inf:
            raise ValueError(f"a pace of {pace:g} s a token; it must be positive and finite")
        self._page = _Page(path, create=False)
        try:
            self._only = self._page.only("borrower", "another borrower has this device; one at a time can")
        except LendingError:
            self._page.close()
            raise
        self._seen = _COUNT.unpack_from(self._page.bytes, _COUNT_AT)[0]
        self._epoch = 0
        _SECONDS.pack_into(self._page.bytes, _PACE_AT, pace)
        self.wish(0.0)
        self.say_kv(0, 0)  # memory of a borrower before this one went with it
        self.tell(BorrowerTally())

    @property
    def lease(self) -> float:
        """Until when the lender has given its word."""
        return float(_SECONDS.unpack_from(self._page.bytes, _LEASE_AT)[0])

    def about(self) -> EngineFacts:
        """The engine that serves. Raises LendingError where it did not say."""
        return self._page.about()

    def look(self) -> ServingNotice:
        """What serving said last. Raises LendingError where its writer ended in the middle of it."""
        return self._page.notice()

    def tell(self, tally: BorrowerTally) -> None:
        """What came of the loan so far."""
        *numbers, why = tally
        _TALLY.pack_into(self._page.bytes, _TALLY_AT, *numbers, why.encode(errors="replace")[:256])

    def wish(self, seconds: float) -> None:
        """What serving must have to spare for a grant to be of use: a step of its own and the shortest one of ours. 0:
        there is nothing to do."""
        _SECONDS.pack_into(self._page.bytes, _WISH_AT, seconds)

    def say_kv(self, asked: int, held: int) -> None:
        """Bytes of KV that we would have serving cede, and those that we have of what it ceded."""
        _COUNT.pack_into(self._page.bytes, _KV_ASKED_AT, asked)
        _COUNT.pack_into(self._page.bytes, _KV_HELD_AT, held)

    def try_take(self, expires: float) -> bool:
        """Have the device if nobody has it; serving waits until `expires` at most.

        What serving says is to be looked at again before the device is used: it may have changed until now. From now on
        only new requests change it.
        """
        # Before the lock: whoever finds it taken reads until when.
        _SECONDS.pack_into(self._page.bytes, _EXPIRES_AT, expires)
        if not self._page.lock():
            return False
        self._epoch = _COUNT.unpack_from(self._page.bytes, _EPOCH_AT)[0]
        return True

    def shorten(self, expires: float) -> None:
        """Serving waits until then at most, which is sooner."""
        _SECONDS.pack_into(self._page.bytes, _EXPIRES_AT, expires)

    def release(self) -> None:
        """Raises FencedError where serving went ahead meanwhile."""
        self._page.unlock()
        if _COUNT.unpack_from(self._page.bytes, _EPOCH_AT)[0] != self._epoch:
            raise FencedError(f"{self._page.path}: the grant was over, and serving went ahead")

    def steps(self) -> list[ServingStep]:
        """What serving did since the last call, as far as it can still be read: the last 64 steps at most."""
        page = self._page.bytes
        count = _COUNT.unpack_from(page, _COUNT_AT)[0]
        first = max(self._seen, count - _STEPS + 1)  # the oldest may be under overwriting
        self._seen = count
        return [
            ServingStep(*_STEP.unpack_from(page, _STEPS_AT + number % _STEPS * _STEP.size))
            for number in range(first, count)
        ]

    def close(self) -> None:
        self.wish(0.0)
        self.say_kv(0, 0)
        os.close(self._only)
        self._page.close()


class LenderToken:
    """The side of the agent beside the server, whose word the loan hangs on. Raises LendingError where there is no
    page, or another agent lends."""

    def __init__(self, path: Path) -> None:
        self._page = _Page(path, create=False)
        try:
            self._only = self._page.only("lender", "another agent lends this device; one at a time can")
        except LendingError:
            self._page.close()
            raise
        self.extend(0.0)

    @property
    def replaced(self) -> bool:
        """The file of that name is another one by now."""
        try:
            return not os.path.samestat(self._page.path.stat(), os.fstat(self._page.descriptor))
        except FileNotFoundError:
            return True

    def extend(self, until: float) -> None:
        """The device may be borrowed until then; 0: not any more."""
        _SECONDS.pack_into(self._page.bytes, _LEASE_AT, until)

    def borrower_gone(self) -> None:
        """Its process has ended, so it has no memory and asks for none: nobody else would say so for one that was
        killed."""
        _COUNT.pack_into(self._page.bytes, _KV_ASKED_AT, 0)
        _COUNT.pack_into(self._page.bytes, _KV_HELD_AT, 0)

    def about(self) -> EngineFacts:
        """The engine that serves. Raises LendingError where it did not say."""
        return self._page.about()

    def look(self) -> ServingNotice:
        """What serving said last. Raises LendingError where its writer ended in the middle of it."""
        return self._page.notice()

    @property
    def tally(self) -> BorrowerTally:
        """What came of the loan so far."""
        grants, overstayed, over, tokens, unrecorded, lent, longest, why = _TALLY.unpack_from(
            self._page.bytes, _TALLY_AT
        )
        why = why.rstrip(b"\0").decode(errors="ignore")
        return BorrowerTally(grants, overstayed, over, tokens, unrecorded, lent, longest, why)

    def close(self) -> None:
        self.extend(0.0)
        os.close(self._only)
        self._page.close()
