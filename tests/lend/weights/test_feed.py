"""What a feed gives brings any reader to where the feed is."""

from __future__ import annotations

import asyncio
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.backends.transport.shared_memory import WeightUpdateError
from libra.backends.weights.grid import Grid
from libra.lend.weights.feed import Feed, FeedReader
from libra.lend.weights.mirror import Mirror
from libra.lend.weights.source import Source
from libra.lend.weights.wire import NOTHING, Chunk, Complete

GRID = Grid(256, "bfloat16", 64)
EVERYTHING = np.ones(len(GRID), np.bool_)
EMPTY = np.full(len(GRID), NOTHING, np.int64)


class Follower:
    """A mirror, and its place in a feed."""

    def __init__(self, wanted: list[bool] | None = None) -> None:
        self.halves = np.zeros(GRID.size, np.uint8), np.zeros(GRID.size, np.uint8)
        self.mirror = Mirror(GRID, self.halves, np.array(wanted or EVERYTHING))
        self.wholes = 0
        self.come_again()

    def come_again(self) -> None:
        self.reader = FeedReader(self.mirror.have, self.mirror.wanted)

    def read(self, feed: Feed, most: int) -> None:
        for _ in range(most):
            entry = feed.next(self.reader)
            if entry is None:
                return
            if isinstance(entry.item, Chunk):
                assert self.mirror.take(entry.item), "it is of no use to this reader"
                self.wholes += entry.item.whole
            else:
                self.mirror.confirm(entry.item)
                self.mirror.settle()


def published(version: int, seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    content = generator.integers(0, 255, GRID.size, dtype=np.uint8)
    for _ in range(version):
        content[generator.integers(0, GRID.size, 5)] += 1
    return content


ACTION = st.one_of(
    st.just(("publish", 0, 0)),
    st.tuples(st.just("read"), st.integers(0, 2), st.integers(1, 9)),
    st.tuples(st.just("reconnect"), st.integers(0, 2), st.just(0)),
    st.tuples(st.just("new"), st.integers(0, 2), st.just(0)),
)


@settings(deadline=None)
@given(st.lists(ACTION, max_size=40), st.integers(0, 1500), st.integers(1, 3))
def test_whoever_reads_when_he_likes_ends_with_the_latest_version(
    actions: list[tuple[str, int, int]], kept_bytes: int, threads: int
) -> None:
    asyncio.run(_play(actions, kept_bytes, threads))


async def _play(actions: list[tuple[str, int, int]], kept_bytes: int, threads: int) -> None:
    feed = Feed(GRID, EVERYTHING, kept_bytes=kept_bytes)
    source, version = Source(feed, "run", threads=threads), 0
    followers = [Follower(), Follower(), Follower([False, True, True, False])]
    for action, who, count in [*actions, ("publish", 0, 0)]:
        match action:
            case "publish":
                content = published(version, 7)
                await source.publish(version, content, zlib.crc32(content.data))
                version += 1
            case "read":
                followers[who].read(feed, count)
            case "reconnect":
                followers[who].come_again()
            case "new":
                followers[who] = Follower(followers[who].mirror.wanted.tolist())
        assert feed.kept <= max(kept_bytes, 0)
    for follower in followers:
        follower.read(feed, 1000)
        assert follower.mirror.held == version - 1
        wanted = np.repeat(follower.mirror.wanted, 64)
        assert np.array_equal(follower.halves[follower.mirror.half][wanted], published(version - 1, 7)[wanted])


async def test_late_comers_get_deltas_while_they_are_kept_and_else_everything() -> None:
    feed = Feed(GRID, EVERYTHING, kept_bytes=1 << 20)
    source = Source(feed, "run")
    await source.publish(0, published(0, 1))
    early, late = Follower(), Follower()
    early.read(feed, 1000)
    assert early.wholes == 4
    for version in (1, 2, 3):
        await source.publish(version, published(version, 1))
    early.come_again()
    early.read(feed, 1000)
    late.read(feed, 1000)
    assert (early.wholes, late.wholes) == (4, 4)
    assert early.mirror.held == late.mirror.held == 3
    feed.kept_bytes = 0
    await source.publish(4, published(4, 1))
    assert feed.kept == 0
    early.read(feed, 1000)
    assert (early.wholes, early.mirror.held) == (8, 4)


async def test_a_publication_that_is_overwritten_while_it_is_read_is_not_called_complete() -> None:
    feed = Feed(GRID, EVERYTHING)
    source = Source(feed, "run")
    content = published(0, 1)
    await source.publish(0, content, zlib.crc32(content.data))
    follower = Follower()
    follower.read(feed, 1000)
    later = published(1, 1)
    with pytest.raises(WeightUpdateError, match=r"weights v1 are gone: checksum 0x\w{8}, expected 0x0000002a"):
        await source.publish(1, later, 42)
    follower.read(feed, 1000)
    assert follower.mirror.held == 0
    again = Source(feed, "another")
    await again.publish(1, later, zlib.crc32(later.data))
    assert feed.lineage == "another"
    fresh = Follower()
    fresh.read(feed, 1000)
    assert fresh.mirror.held == 1 and np.array_equal(fresh.halves[fresh.mirror.half], later)


async def test_what_skips_a_version_or_comes_twice_is_not_kept() -> None:
    feed = Feed(GRID, EVERYTHING, "run")
    whole = Chunk(0, 3, NOTHING, 0, 0, b"")
    assert feed.add(whole, b"x") and not feed.add(whole, b"x")
    assert not feed.add(Chunk(0, 5, 4, 0, 0, b""), b"x")
    assert feed.add(Chunk(0, 4, 3, 0, 0, b""), b"x")
    assert not feed.add(Chunk(0, 3, 2, 0, 0, b""), b"x")
    assert feed.add(Complete(4, 0, 1, None), b"x") and not feed.add(Complete(4, 0, 1, None), b"x")


async def test_no_version_begins_before_the_last_is_there_from_all_senders() -> None:
    feed = Feed(GRID, EVERYTHING, "run")
    ours, theirs = np.array([True, True, False, False]), np.array([False, False, True, True])
    for number in range(4):
        feed.add(Chunk(number, 1, NOTHING, 0, 0, b""), b"x")
    for number in (0, 1):
        await feed.turn(ahead := Chunk(number, 2, 1, 0, 0, b""), theirs)
        feed.add(ahead, b"x")
    waiting = asyncio.create_task(feed.turn(Chunk(0, 3, 2, 0, 0, b""), theirs))
    for number in (2, 3):
        await asyncio.sleep(0)
        assert not waiting.done()
        await feed.turn(behind := Chunk(number, 2, 1, 0, 0, b""), ours)
        feed.add(behind, b"x")
    await waiting


async def test_a_feed_that_is_full_waits_for_its_own_mirror_and_for_nobody_else() -> None:
    feed = Feed(GRID, EVERYTHING, "run", kept_bytes=1)
    own, other = FeedReader(EMPTY, EVERYTHING), FeedReader(EMPTY, EVERYTHING)
    feed.first = own
    feed.add(Chunk(0, 1, NOTHING, 0, 0, b""), b"frame")
    waiting = asyncio.create_task(feed.room())
    await asyncio.sleep(0)
    assert not waiting.done() and feed.kept == 5
    assert feed.next(own) is not None
    await waiting
    assert feed.kept == 0 and feed.next(other) is None


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (2, 2), (0, 5)])
def test_a_source_has_chunks_of_its_grid(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=f"chunks from {start} to {stop}: give 0 <= start < stop <= 4"):
        Source(Feed(GRID, EVERYTHING), "run", start, stop)
