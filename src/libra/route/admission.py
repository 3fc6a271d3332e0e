"""Admission of groups under a bound on staleness: which groups may start, and which form the next batch.

Invariant: at most `(1 + max_staleness) * groups_per_step` groups are in flight, from their start to the publication of
the version trained on them. A group started under version v is in the batch of version v + 1 + max_staleness at the
latest. So no token is more than `max_staleness` versions older than the policy that trains on it. No group is
discarded: the trainer waits instead. This is true for whole batches, and for batches that are taken in parts as their
groups complete.
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
        self.published = version  # newest version that every engine has
        self.taken = version  # number of batches taken: the version in training, or the published version
        self._parts = 0  # groups of the next batch that have been taken
        self._groups: dict[str, _Group[Episode]] = {}  # ordered by start
        self._complete = 0  # number of complete groups in `_groups`

    @property
    def in_flight(self) -> int:
        """Number of groups between their start and the publication of the version trained on them."""
        return len(self._groups) + self._parts + (self.taken - self.published) * self.groups_per_step

    def may_start(self) -> bool:
        return self.in_flight < (1 + self.max_staleness) * self.groups_per_step

    def start(self, group: str) -> None:
        if not self.may_start():
            raise ValueError(
                f"group {group} cannot start: {self.in_flight} groups are in flight, the most that max_staleness"
                f" {self.max_staleness} allows; publish the next version first"
            )
        if group in self._groups:
            raise ValueError(f"group {group} was started before")
        self._groups[group] = _Group(self.published, self.group_size, [])

    def resume(self, group: str, started_at: int, episodes: Iterable[Episode]) -> None:
        """Add a group that was in flight when its run was interrupted, with its finished `episodes`. Add the oldest
        group first, and all interrupted groups before a new group starts. Raises `ValueError` if the group is already
        too stale.
        """
        if started_at > self.published:
            raise ValueError(f"group {group} was started under version {started_at}, after {self.published}")
        self.start(group)
        self._groups[group] = _Group(started_at, self.group_size, [])
        for episode in episodes:
            self.finish(group, episode)
        if not self._in_time([entry.started_at for entry in self._groups.values()], self.lacks):
            raise ValueError(
                f"group {group} was started under version {started_at}: it is too old to train on within "
                f"{self.max_staleness} versions"
            )

    def finish(self, group: str, episode: Episode) -> None:
        """Add one finished episode of the group."""
        entry = self._groups[group]
        if entry.complete:
            raise ValueError(f"group {group} already has its {self.group_size} episodes")
        entry.episodes.append(episode)
        self._complete += entry.complete

    def ready(self) -> bool:
        """Whether the next batch can be taken, that is, enough groups are complete, including all that must be in this
        batch.
        """
        return self._choose() is not None

    def take(self) -> list[tuple[str, list[Episode]]]:
        """Take the next batch. Raises `ValueError` if the batch is not `ready`, or if parts of it have been taken."""
        if self._parts:
            raise ValueError(f"{self._parts} groups of the next batch have been taken already: continue with take_part")
        chosen = self._choose()
        if chosen is None:
            raise ValueError("the next batch is not complete")
        self.taken += 1
        return self._taken(chosen)

    @property
    def lacks(self) -> int:
        """Number of groups that the next batch still needs, 1 or more."""
        return self.groups_per_step - self._parts

    def take_part(self, least: int = 1) -> list[tuple[str, list[Episode]]]:
        """Take complete groups for the next batch, oldest first: groups that may be in this batch in whichever order
        the other groups complete. Take no group if fewer than `least` qualify, unless they are all that the batch
        lacks. The batch counts as `taken` after its last group is taken.
        """
        least = min(least, self.lacks)
        if self._complete < least:
            return []
        chosen: list[str] = []
        older: list[int] = []  # versions of incomplete groups; younger groups must leave room for them
        for name, group in self._groups.items():
            if not group.complete:
                older.append(group.started_at)
            elif self._in_time(older, self.lacks - len(chosen) - 1):
                chosen.append(name)
                if len(chosen) == self.lacks:
                    break
            else:
                break  # with later groups, too little room would remain for older ones
        if len(chosen) < least:
            return []
        self._parts += len(chosen)
        if self._parts == self.groups_per_step:
            self._parts = 0
            self.taken += 1
        return self._taken(chosen)

    def publish(self, version: int) -> None:
        """Record that every engine has the weights of `version`."""
        if not self.published <= version <= self.taken:
            raise ValueError(f"version {version} cannot be published between {self.published} and {self.taken}")
        self.published = version

    def _choose(self) -> list[str] | None:
        """The oldest complete groups; None if there are too few, or if later batches could not take all other groups in
        time.
        """
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
        """Whether groups that started under the versions `started`, oldest first, can be trained on in time if the next
        batch has room for `room` groups. Only the oldest group of each batch needs a check.
        """
        if room and started and self.taken > started[0] + self.max_staleness:
            return False
        firsts = started[room :: self.groups_per_step]
        return all(self.taken + batch <= first + self.max_staleness for batch, first in enumerate(firsts, start=1))
