"""Effects of the faults on the run: lost workers and the reasons, the end of each session, and times to recover.

Invariant: no worker is lost without a fault that struck that very process, and a session ends only by a fault that ends
it. Times are of the soak's clock: of what was found in the journal, looked at every `LOOK_SECONDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import median

from benchmarks.rows import Row
from benchmarks.soak.accounts import checked
from benchmarks.soak.faults import ENDING, HARMLESS, Kind
from benchmarks.soak.processes import Sample
from benchmarks.soak.storm import Struck
from tests.oracles.run_files import Row as Line

LOOK_SECONDS = 0.05

# The last one makes all its steps.
_STATUS: Mapping[Kind | None, int] = {None: 0, Kind.KILL_CONTROLLER: -9, Kind.INTERRUPT: 130}

_FEW_DESCRIPTORS = 6  # by which those of a controller may differ: a process that starts, a file that changes
_SETTLED = 20.0  # seconds with all workers, after which a controller holds what it needs
_LONG = 60.0  # seconds of a session in which growth shows
_LONGER = 120.0  # seconds in which growth of memory does: at first there is some that ends
_GROWTH = 16.0  # MiB a minute


@dataclass(frozen=True, slots=True)
class Ended:
    """End of a session. `status` is None for one that did not end in time; `left` are processes that outlived it."""

    session: int
    ending: Kind | None
    status: int | None
    seconds: float
    left: Sequence[str]
    said: str

    @property
    def expected(self) -> bool:
        return self.status == _STATUS.get(self.ending, 1)


@dataclass(frozen=True, slots=True)
class Seen:
    """An entry of the journal, and when it was found."""

    time: float
    session: int
    row: Line


def survival(ends: Sequence[Ended], struck: Sequence[Struck], seen: Sequence[Seen]) -> Iterator[Row]:
    wrong = (
        f"session {end.session} ended with {end.status} after {end.ending or 'no fault that ends it'}: {end.said}"
        for end in ends
        if not end.expected
    )
    yield checked("every session ended by what ends one, with its exit code", wrong, f"{len(ends)} sessions")
    left = (f"session {end.session}: {who}" for end in ends for who in end.left)
    yield checked("no process outlived its controller", left, f"looked {len(ends)} times")
    lost, unexplained = _losses(struck, seen)
    yield checked("nobody was lost without a fault", unexplained, f"{lost} losses")


def _losses(struck: Sequence[Struck], seen: Sequence[Seen]) -> tuple[int, list[str]]:
    fatal = {(entry.session, entry.worker, entry.pid) for entry in struck if entry.kind not in HARMLESS}
    ended = {entry.session: entry.time for entry in struck if entry.kind in (Kind.KILL_FORK_SERVER, Kind.KILL_CORES)}
    pids: dict[str, int] = {}
    lost, unexplained = 0, []
    for entry in seen:
        row = entry.row
        if row["kind"] == "worker":
            pids[row["worker"]] = row["pid"]
        elif row["kind"] == "lost":
            lost += 1
            known = (entry.session, row["worker"], pids[row["worker"]]) in fatal
            if not known and entry.time < ended.get(entry.session, float("inf")):
                unexplained.append(f"{row['worker']} in session {entry.session}: {row['why']}")
    return lost, unexplained


def growth(samples: Sequence[Sample]) -> Iterator[Row]:
    """Checks of the growth of controllers, in sessions that were long enough."""
    sessions: dict[int, list[Sample]] = {}
    began: dict[int, float] = {}
    for sample in samples:
        found = sessions.setdefault(sample.session, [])
        began.setdefault(sample.session, sample.time)
        if sample.time >= began[sample.session] + _SETTLED:
            found.append(sample)
    long = {number: found for number, found in sessions.items() if found and found[-1].time - found[0].time >= _LONG}
    counts: dict[str, Callable[[Sample], int]] = {
        "descriptors": attrgetter("descriptors"),
        "threads": attrgetter("threads"),
        "descriptors of the fork server": attrgetter("fork_server_descriptors"),
    }
    for name, held in counts.items():
        # The fewest of a while: in a move there are more.
        grown = {n: min(map(held, found[-15:])) - min(map(held, found[:15])) for n, found in long.items()}
        wrong = (f"session {number}: {by:+d}" for number, by in grown.items() if by > _FEW_DESCRIPTORS)
        most = f"at most {max(grown.values(), default=0):+d} in {len(long)} sessions of a minute and more"
        yield checked(f"{name} do not become more", wrong, most)
    rates = {
        number: (found[-1].memory - found[0].memory) / 2**20 / ((found[-1].time - found[0].time) / 60)
        for number, found in long.items()
        if found[-1].time - found[0].time >= _LONGER
    }
    wrong = (f"session {number}: {rate:+.1f} MiB a minute" for number, rate in rates.items() if rate > _GROWTH)
    most = f"at most {max(rates.values(), default=0.0):+.1f} MiB a minute in {len(rates)} sessions of two minutes"
    yield checked("the controller's memory does not run away", wrong, most)


def recoveries(struck: Sequence[Struck], seen: Sequence[Seen]) -> Iterator[Row]:
    """Seconds from faults to what made them good in their session, or for those that end one, in any later one."""
    for name, kind, sign in (
        ("killed engine: its turns are given to others", Kind.KILL_ENGINE, "lost"),
        ("killed engine: its slot works again", Kind.KILL_ENGINE, "done"),
        ("killed hybrid trainer: the next step is made", Kind.KILL_HYBRID, "step"),
        ("killed core trainer: the next step is made", Kind.KILL_CORE, "step"),
        ("killed core trainer: it trains again", Kind.KILL_CORE, "done"),
        ("worker that hangs: it is given up", Kind.HANG, "lost"),
    ):
        yield from summed(name, (_until(fault, seen, sign) for fault in struck if fault.kind is kind))
    for kind in sorted(ENDING):
        name = f"{kind}, resume: the next new step is made"
        yield from summed(name, (_until_new_step(fault, seen) for fault in struck if fault.kind is kind))


def summed(name: str, seconds: Iterable[float | None]) -> Iterator[Row]:
    found = sorted(each for each in seconds if each is not None)
    if found:
        yield Row("recovery", name, median(found), "s", note=f"{len(found)} times, {found[-1]:.2f} s at most")


def _until(fault: Struck, seen: Sequence[Seen], sign: str) -> float | None:
    """Seconds until the first entry of this kind in its session; of the same worker, where such entries have one."""
    found = (
        entry.time - fault.time
        for entry in seen
        if entry.session == fault.session and entry.time >= fault.time and entry.row["kind"] == sign
        if entry.row.get("worker", fault.worker) == fault.worker
    )
    return next(found, None)


def _until_new_step(fault: Struck, seen: Sequence[Seen]) -> float | None:
    """Seconds until a new step of a later session; repeated steps do not count. A session that is killed as it starts
    is a part of the time."""
    steps = [entry for entry in seen if entry.row["kind"] == "step"]
    before = max((entry.row["version"] for entry in steps if entry.session <= fault.session), default=0)
    return next((entry.time - fault.time for entry in steps if entry.row["version"] > before), None)
