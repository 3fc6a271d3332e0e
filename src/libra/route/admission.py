"""Staleness by admission: which group may start, and which groups the next batch is made of.

Invariant: at most `(1 + max_staleness) * groups_per_step` groups are between their start and the publication of the
version they helped to make, and a group that was started under version v is in the batch that makes version
v + 1 + max_staleness at the latest. So no token is more than `max_staleness` versions older than the policy that trains
on it, and nothing is ever discarded: the trainer waits. That holds for batches that are taken whole, and for those
that are taken in parts, as their groups are complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Episode = TypeVar("Episode")


@dataclass(slots=True)
class _Group(Generic[Episode]):
    started_at: int  # version
    size: int
    episodes: list[Episode]

    @property
    def complete(self) -> bool:
        return len(self.episodes) == self.size


class Admission(Generic[Episode]):
    """Groups in the order in which they were started; an episode is whatever the caller wants back in its batch."""

    def __init__(self, groups_per_step: int, group_size: int, max_staleness: int, version: int = 0) -> None:
        self.groups_per_step, self.group_size, self.max_staleness = groups_per_step, group_size, max_staleness
        self.published = version  # what every engine holds
        self.taken = version  # batches taken so far: the version in the making, or published
        self._parts = 0  # groups taken of the batch after these
        self._groups: dict[str, _Group[Episode]] = {}  # ordered by start
        self._complete = 0  # of these

    @property
    def in_flight(self) -> int:
        """Groups between their start and the publication of the version they helped to make."""
        return len(self._groups) + self._parts + (self.taken - self.published) * self.groups_per_step

    def may_start(self) -> bool:
        return self.in_flight < (1 + self.max_staleness) * self.groups_per_step

    def start(self, group: str) -> None:
        if not self.may_start():
            raise ValueError(f"group {group}: {self.in_flight} groups are in flight, no more may start")
        if group in self._groups:
            raise ValueError(f"group {group} was started before")
        self._groups[group] = _Group(self.published, self.group_size, [])

    def resume(self, group: str, started_at: int, episodes: Iterable[Episode]) -> None:
        """A group that was under way when its run was interrupted, with what is there of it. Oldest groups first, and
        before any other starts. Raises ValueError where it can no more be trained on in time."""
        if started_at > self.published:
            raise ValueError(f"group {group} was started under version {started_at}, after {self.published}")
        self.start(group)
        self._groups[group] = _Group(started_at, self.group_size, [])
        for episode in episodes:
            self.finish(group, episode)
        if not self._in_time([entry.started_at for entry in self._groups.values()], self.lacks):
            raise ValueError(
                f"group {group} was started under version {started_at}: it cannot be trained on at most"
                f" {self.max_staleness} versions later any more"
            )

    def finish(self, group: str, episode: Episode) -> None:
        """One episode of the group is finished."""
        entry = self._groups[group]
        if entry.complete:
            raise ValueError(f"group {group} has its {self.group_size} episodes already")
        entry.episodes.append(episode)
        self._complete += entry.complete

    def ready(self) -> bool:
        """Whether the next batch can be taken: enough complete groups, and none that must be in it is missing."""
        return self._choose() is not None

    def take(self) -> list[tuple[str, list[Episode]]]:
        """The next batch. Raises ValueError when it is not `ready`, or a part of it is taken already."""
        if self._parts:
            raise ValueError(f"{self._parts} groups of the next batch are taken already: go on with take_part")
        chosen = self._choose()
        if chosen is None:
            raise ValueError("the next batch is not complete")
        self.taken += 1
        return self._taken(chosen)

    @property
    def lacks(self) -> int:
        """Groups that the next batch still lacks, 1 or more."""
        return self.groups_per_step - self._parts

    def take_part(self, least: int = 1) -> list[tuple[str, list[Episode]]]:
        """The complete groups, oldest first, that may be in the next batch whatever becomes of the others; none where
        they are fewer than `least` and the batch would lack more. With the last that it lacks the batch is `taken`."""
        least = min(least, self.lacks)
        if self._complete < least:
            return []
        chosen: list[str] = []
        older: list[int] = []  # versions of those that stay: whoever is younger finds room in the same batch as before
        for name, group in self._groups.items():
            if not group.complete:
                older.append(group.started_at)
            elif self._in_time(older, self.lacks - len(chosen) - 1):
                chosen.append(name)
                if len(chosen) == self.lacks:
                    break
            else:
                break  # nor would those that follow leave room enough for these
        if len(chosen) < least:
            return []
        self._parts += len(chosen)
        if self._parts == self.groups_per_step:
            self._parts = 0
            self.taken += 1
        return self._taken(chosen)

    def publish(self, version: int) -> None:
        """Every engine holds `version` now."""
        if not self.published <= version <= self.taken:
            raise ValueError(f"version {version} cannot be published between {self.published} and {self.taken}")
        self.published = version

    def _choose(self) -> list[str] | None:
        """The oldest complete groups; None while they are too few, or would leave more groups behind than the batches
        after this one can take in time."""
        if self._complete < self.groups_per_step:
            return None
        chosen = [name for name, group in self._groups.items() if group.complete][: self.groups_per_step]
        taken = set(chosen)
        left = [group.started_at for name, group in self._groups.items() if name not in taken]
        return chosen if self._in_time(left, 0) else None

    def _taken(self, chosen: Sequence[str]) -> list[tuple[str, list[Episode]]]:
        self._complete -= len(chosen)
        return [(group, self._groups.pop(group).episodes) for group in chosen]

    def _in_time(self, started: Sequence[int], room: int) -> bool:
        """Whether groups that were started under these versions, oldest first, can be trained on in time if the next
        batch has room for so many of them. The first of each batch was started first."""
        if room and started and self.taken > started[0] + self.max_staleness:
            return False
        firsts = started[room :: self.groups_per_step]
        return all(self.taken + batch <= first + self.max_staleness for batch, first in enumerate(firsts, start=1))
