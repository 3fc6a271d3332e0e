"""Bounds staleness by admission: decides which groups may start and which groups make up the next batch.

Invariant: at most `(1 + max_staleness) * groups_per_step` groups are between their start and the publication of the
version that they contribute to. A group started under version v is in the batch of version v + 1 + max_staleness at the
latest. So no token is more than `max_staleness` versions older than the policy that trains on it, and nothing is ever
discarded: the trainer waits. This holds for whole batches, and for batches taken in parts as their groups complete.
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
    """Groups in the order of their start. Episodes are opaque; `take` and `take_part` return them."""

    def __init__(self, groups_per_step: int, group_size: int, max_staleness: int, version: int = 0) -> None:
        self.groups_per_step, self.group_size, self.max_staleness = groups_per_step, group_size, max_staleness
        self.published = version  # what every engine holds
        self.taken = version  # batches taken so far: the version in the making, or published
        self._parts = 0  # groups taken of the batch after these
        self._groups: dict[str, _Group[Episode]] = {}  # ordered by start
        self._complete = 0  # number of complete groups in `_groups`

    @property
    def in_flight(self) -> int:
        """Groups between their start and the publication of the version that they contribute to."""
        return len(self._groups) + self._parts + (self.taken - self.published) * self.groups_per_step

    def may_start(self) -> bool:
        return self.in_flight < (1 + self.max_staleness) * self.groups_per_step

    def start(self, group: str) -> None:
        if not self.may_start():
            raise ValueError(f"group {group}: {self.in_flight} groups are in flight; finish one first")
        if group in self._groups:
            raise ValueError(f"group {group} was started before")
        self._groups[group] = _Group(self.published, self.group_size, [])

    def resume(self, group: str, started_at: int, episodes: Iterable[Episode]) -> None:
        """Add a group that was in flight when its run was interrupted, with its finished `episodes`. Call it for the
        oldest group first, and before any other starts. Raises ValueError if it can no longer be trained on in
        time."""
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
        """Add one finished episode of the group."""
        entry = self._groups[group]
        if entry.complete:
            raise ValueError(f"group {group} has its {self.group_size} episodes already")
        entry.episodes.append(episode)
        self._complete += entry.complete

    def ready(self) -> bool:
        """Whether the next batch can be taken: enough complete groups, including all that must be in it."""
        return self._choose() is not None

    def take(self) -> list[tuple[str, list[Episode]]]:
        """The next batch. Raises ValueError when it is not `ready`, or a part of it is taken already."""
        if self._parts:
            raise ValueError(f"{self._parts} groups of the next batch are already taken: continue with take_part")
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
        """Take the complete groups, oldest first, that may be in the next batch whenever the others complete. Take none
        if they are fewer than `least` and the batch lacks more. With its last group the batch is `taken`."""
        least = min(least, self.lacks)
        if self._complete < least:
            return []
        chosen: list[str] = []
        older: list[int] = []  # versions of incomplete groups; younger groups keep their place in the batches
        for name, group in self._groups.items():
            if not group.complete:
                older.append(group.started_at)
            elif self._in_time(older, self.lacks - len(chosen) - 1):
                chosen.append(name)
                if len(chosen) == self.lacks:
                    break
            else:
                break  # later groups would leave too little room for the older ones, too
        if len(chosen) < least:
            return []
        self._parts += len(chosen)
        if self._parts == self.groups_per_step:
            self._parts = 0
            self.taken += 1
        return self._taken(chosen)

    def publish(self, version: int) -> None:
        """Record that every engine holds `version`."""
        if not self.published <= version <= self.taken:
            raise ValueError(f"version {version} cannot be published between {self.published} and {self.taken}")
        self.published = version

    def _choose(self) -> list[str] | None:
        """The oldest complete groups; None if they are too few, or if the remaining groups would be more than later
        batches can take in time."""
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
        """Whether groups started under the versions `started`, oldest first, can be trained on in time if the next
        batch has room for `room` of them. It is enough to check the first of each batch, which is its oldest."""
        if room and started and self.taken > started[0] + self.max_staleness:
            return False
        firsts = started[room :: self.groups_per_step]
        return all(self.taken + batch <= first + self.max_staleness for batch, first in enumerate(firsts, start=1))
