"""The order in which a tier evicts its chunks, against a model that gives each chunk the time of its latest use.

The rules are those of vLLM's policies for offloaded KV, `lru` and `arc`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.sim.engine.chunk_cache import Access, CachePolicy, Key, LruCache, chunk_cache
from libra.sim.engine.request import Chain

OWNERS = tuple(Chain(name) for name in "abc")
CONTEXTS: tuple[tuple[Key, ...], ...] = tuple(tuple((owner, place) for place in range(4)) for owner in OWNERS)
WRITE, READ = ("write", "written", "end"), ("read", "was_read", "end")
SLOW = tuple((step,) for step in dict.fromkeys(WRITE + READ))
TURNS = st.tuples(st.integers(0, 2), st.integers(1, 4), st.sampled_from([WRITE, WRITE, READ, READ, *SLOW]))


@dataclass
class Model:
    """Every chunk that is there, or was evicted and is remembered (`gone`), with its latest use."""

    chunks: int
    policy: CachePolicy
    queue: dict[Key, str] = field(default_factory=dict)
    used: dict[Key, int] = field(default_factory=dict)
    busy: dict[Key, int] = field(default_factory=dict)  # reads and writes under way
    room: float = 0.0  # for chunks used once
    time: int = 0

    def of(self, *queues: str) -> list[Key]:
        """The chunks of some queues, the least recently used first."""
        return sorted((key for key, at in self.queue.items() if at in queues), key=lambda key: self.used[key])

    @property
    def present(self) -> list[Key]:
        return self.of("once", "often")

    def move(self, key: Key, queue: str) -> None:
        self.time += 1
        self.queue[key], self.used[key] = queue, self.time

    def begin_write(self, keys: tuple[Key, ...], access: Access) -> list[Key] | None:
        new = [key for key in keys if key not in self.present]
        missed = [key for key in new if key not in access.missed]
        access.missed.update(missed)
        for key in reversed(missed):
            self.miss(key)
        there = [key for key in keys if key not in new and not self.writing(key)]
        access.seen.update(new, there)
        access.reused.update(key for key in there if key not in access.inserted)
        evicted = self.victims(len(self.present) + len(new) - self.chunks if new else 0, keys)
        if evicted is None:
            return None
        for key in evicted:
            self.move(key, f"gone {self.queue[key]}")
        for queue in ("gone once", "gone often"):
            for key in self.of(queue)[: -self.chunks]:
                del self.queue[key]
        for key in new:
            self.move(key, "once")
            self.busy[key] = -1
        access.inserted.update(new)
        return new

    def writing(self, key: Key) -> bool:
        return self.busy.get(key, 0) < 0

    def miss(self, key: Key) -> None:
        """A chunk that was evicted too early: its queue is to have more room, the more the shorter its own memory."""
        once, often = len(self.of("gone once")), len(self.of("gone often"))
        if self.policy == "arc" and self.queue.get(key) == "gone once":
            self.room = min(self.chunks, self.room + max(1, often / once))
            self.move(key, "gone once")
        elif self.policy == "arc" and self.queue.get(key) == "gone often":
            self.room = max(0, self.room - max(1, once / often))
            self.move(key, "gone often")

    def victims(self, count: int, spared: tuple[Key, ...]) -> list[Key] | None:
        idle = [key for key in self.present if not self.busy.get(key) and key not in spared]
        if self.policy == "lru":
            return idle[: max(0, count)] if count <= len(idle) else None
        once = len(self.of("once"))
        chosen: list[Key] = []
        for _ in range(count):
            first = "once" if once >= int(self.room) else "often"
            left = sorted((key for key in idle if key not in chosen), key=lambda key: self.queue[key] != first)
            if not left:
                return None
            chosen.append(left[0])
            once -= self.queue[left[0]] == "once"
        return chosen

    def end_access(self, access: Access) -> None:
        for key in sorted(access.seen, key=lambda key: -key[1]):
            if key not in self.present:
                continue
            if self.policy == "lru":
                self.move(key, "once")
            elif key in access.reused:
                self.move(key, "often")
            elif key in access.inserted:
                self.move(key, self.queue[key])


class Both:
    """A cache and its model, with a request for each of the contexts."""

    def __init__(self, chunks: int, policy: CachePolicy) -> None:
        self.cache, self.model = chunk_cache(chunks, policy), Model(chunks, policy)
        self.uses = [(Access(), Access()) for _ in CONTEXTS]
        self.reading: list[tuple[Key, ...]] = []
        self.writing: list[list[Key]] = []

    def write(self, which: int, keys: tuple[Key, ...]) -> None:
        access, same = self.uses[which]
        new = self.cache.begin_write(keys, access)
        assert new == self.model.begin_write(keys, same)
        self.writing += [new] if new else []

    def written(self, which: int, keys: tuple[Key, ...]) -> None:
        if self.writing:
            ended = self.writing.pop()
            self.cache.end_write(ended)
            self.model.busy.update(dict.fromkeys(ended, 0))

    def read(self, which: int, keys: tuple[Key, ...]) -> None:
        if all(self.cache.presence(key) == "there" for key in keys):
            access, same = self.uses[which]
            self.cache.begin_read(keys, access)
            same.seen.update(keys)
            same.reused.update(key for key in keys if key not in same.inserted)
            self.reading.append(keys)
            for key in keys:
                self.model.busy[key] += 1

    def was_read(self, which: int, keys: tuple[Key, ...]) -> None:
        if self.reading:
            read = self.reading.pop()
            self.cache.end_read(read)
            for key in read:
                self.model.busy[key] -= 1

    def end(self, which: int, keys: tuple[Key, ...]) -> None:
        access, same = self.uses[which]
        self.cache.end_access(access)
        self.model.end_access(same)
        self.uses[which] = (Access(), Access())

    def check(self) -> None:
        cache, model = self.cache, self.model
        there = {key for keys in CONTEXTS for key in keys if cache.presence(key) != "missing"}
        assert there == set(model.present)
        assert (cache.held, cache.idle) == (len(model.present), sum(not model.busy[key] for key in model.present))
        if isinstance(cache, LruCache):
            assert [key for key, *_ in _queue(cache.order())] == model.present
            return
        once, often, gone_once, gone_often, room = cache.order()
        assert [key for key, *_ in _queue(once)] == model.of("once")
        assert [key for key, *_ in _queue(often)] == model.of("often")
        assert (gone_once, gone_often) == (tuple(model.of("gone once")), tuple(model.of("gone often")))
        assert room == model.room


def _queue(told: object) -> list[tuple[Key, bool, int]]:
    assert isinstance(told, tuple)
    return list(told)


@pytest.mark.parametrize("policy", ["lru", "arc"])
@settings(max_examples=200, deadline=None)
@given(st.integers(2, 6), st.lists(TURNS, min_size=30, max_size=60))
def test_the_least_recently_used_goes_first(
    policy: CachePolicy, chunks: int, turns: list[tuple[int, int, tuple[str, ...]]]
) -> None:
    """Requests write or read the beginning of one of three contexts, and end: at once, or while others go on."""
    both = Both(chunks, policy)
    for which, end, steps in turns:
        for step in steps:
            getattr(both, step)(which, CONTEXTS[which][:end])
            both.check()
