"""A joiner beside a core that goes on: whatever the two do in between, a torn state is never taken for a whole one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_states import gradient, make_state, step, vectors

import libra.exec.train.follower
import libra.exec.train.publication
from libra.exec.train.board import FIRST_MOMENT, PARAMETERS, SECOND_MOMENT
from libra.exec.train.follower import SNAPSHOTS, BehindError, Follower, SilentError
from libra.exec.train.gradient_ring import SLOTS, Update
from libra.exec.train.publication import OverrunError
from libra.exec.train.train_state import TrainState
from libra.exec.wire.shared_vectors import Vector


class Core:
    """A core whose every store can be the last before a reader looks."""

    def __init__(self, kinds: list[bool]) -> None:
        self.state = make_state(0)
        self.history = {self.state.number: vectors(self.state)}
        self._life = self._live(kinds)

    def act(self, times: int) -> bool:
        """So many stores; whether there are more."""
        return all(next(self._life, None) is not None for _ in range(times))

    def _live(self, kinds: list[bool]) -> Iterator[bool]:
        """Optimiser steps, and changes of another kind (False), as after a measurement."""
        state = self.state
        for is_step in kinds:
            after = make_state(0)
            if is_step:
                yield from self._make_gradient()
                after.put_back(state.keep())
                after.gradient()[:-1] += state._ring.slots[(state.number + 1) % SLOTS][:-1]
                after.step(1.0, 0.0)
            else:
                after.put_back(make_state(len(self.history)).keep())
            self.history[state.number + 1] = vectors(after)
            if is_step:  # from here on a joiner may be there before the core
                state._ring.publish(Update(state.number + 1, 0.01, 1.0, 0.0))
                yield True
            with state.change():
                yield True
                for start in range(0, state._flat.length, 16):  # as AdamW does it: moments, then parameter
                    for vector in (FIRST_MOMENT, SECOND_MOMENT, PARAMETERS):
                        part = after._board.vectors[vector][start : start + 16]
                        state._board.vectors[vector][start : start + 16] = part
                        yield True
                state._set_steps(int(after._steps()[0]))
            yield True

    def _make_gradient(self) -> Iterator[bool]:
        slot = self.state._open_slot()
        yield True
        slot.zero_()
        yield True
        made = gradient(self.state.number + 1, len(slot) - 1)
        places = self.state._flat.views
        for view, part in zip(places(slot).values(), places(made).values(), strict=True):
            view += part
            yield True


def assert_holds(follower: Follower, joiner: TrainState, core: Core) -> None:
    """What it says that it holds, it holds."""
    if follower.number is not None:
        wanted = core.history[follower.number]
        assert all(torch.equal(a, b) for a, b in zip(vectors(joiner), wanted, strict=True))


@settings(deadline=None, max_examples=300)
@given(
    kinds=st.lists(st.sampled_from([True] * 19 + [False]), min_size=6, max_size=20),
    beside_states=st.lists(st.sampled_from([0] * 9 + [1, 3, 8, 17, 40]), min_size=9, max_size=40),
    beside_updates=st.lists(st.sampled_from([0] * 3 + [1, 3, 8, 17, 40]), min_size=9, max_size=40),
    between=st.lists(st.integers(1, 60), max_size=20),
)
def test_a_torn_state_is_never_taken_for_a_whole_one(
    kinds: list[bool], beside_states: list[int], beside_updates: list[int], between: list[int]
) -> None:
    """The core makes so many stores around each half of a copy, and between two looks of the joiner."""
    core, joiner = Core(kinds), make_state(1)
    publication = joiner.publication_at(core.state.place)
    states, updates, looks = iter(beside_states), iter(beside_updates), iter(between)

    def torn_copy(source: Vector, target: Vector) -> None:
        is_update = any(np.shares_memory(source, slot) for slot in publication._ring.vectors)
        half, pauses = len(source) // 2, updates if is_update else states
        core.act(next(pauses, 0))
        target[:half] = source[:half]
        core.act(next(pauses, 0))
        target[half:] = source[half:]
        core.act(next(pauses, 0))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(libra.exec.train.publication, "_copy", torn_copy)
        patch.setattr(libra.exec.train.publication, "_wait", lambda: core.act(1))
        follower, going = Follower(publication, joiner), True
        while going:
            try:
                follower.advance()
            except BehindError:
                follower = Follower(publication, joiner)
            assert_holds(follower, joiner, core)
            going = core.act(next(looks, 1))
        # Nobody changes the core any more: then one more look is enough, at most after a last try.
        while True:
            try:
                follower.advance()
                break
            except BehindError:
                follower = Follower(publication, joiner)
        assert follower.number == core.state.number
        assert_holds(follower, joiner, core)


def with_copies(patch: pytest.MonkeyPatch, before_each: Callable[[], None]) -> None:
    """Let the core do something whenever a vector is copied."""

    def copy(source: Vector, target: Vector) -> None:
        before_each()
        target[:] = source

    patch.setattr(libra.exec.train.publication, "_copy", copy)


def test_a_joiner_takes_one_copy_and_then_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    core, joiner = make_state(0), make_state(1)
    copies = []
    with_copies(monkeypatch, lambda: copies.append(core.number))
    follower = Follower(joiner.publication_at(core.place), joiner)
    follower.advance()
    assert len(copies) == 3  # parameters and two moments
    for _ in range(SLOTS - 1):
        step(core)
    follower.advance()
    assert (follower.number, joiner.checksum) == (core.number, core.checksum)
    assert len(copies) == 3 + SLOTS - 1  # a gradient each


@pytest.mark.parametrize("during", ["before", "half"])
def test_a_gradient_that_is_overwritten_while_it_is_copied_is_refused(
    during: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, joiner = make_state(0), make_state(1)
    publication = joiner.publication_at(core.place)
    joiner.take_state(publication)
    for _ in range(SLOTS - 1):
        step(core)
    before = vectors(joiner)

    def copy(source: Vector, target: Vector) -> None:
        half = len(source) // 2 if during == "half" else 0
        target[:half] = source[:half]
        step(core)  # its slot is the one that is read
        core.gradient()
        target[half:] = source[half:]

    monkeypatch.setattr(libra.exec.train.publication, "_copy", copy)
    with pytest.raises(OverrunError, match="overwritten while it was copied"):
        joiner.take_update(publication, core.number - SLOTS + 2)
    assert all(torch.equal(a, b) for a, b in zip(vectors(joiner), before, strict=True))


def test_a_joiner_that_missed_a_step_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    core, joiner = make_state(0), make_state(1)
    follower = Follower(joiner.publication_at(core.place), joiner)
    follower.advance()
    for _ in range(SLOTS + 1):
        step(core)
    copies = []
    with_copies(monkeypatch, lambda: copies.append(core.number))
    follower.advance()
    assert (follower.number, joiner.checksum) == (core.number, core.checksum)
    assert len(copies) == 3


def test_a_core_that_is_always_faster_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    core, joiner = make_state(0), make_state(1)
    copies = []

    def overtake() -> None:
        copies.append(core.number)
        step(core)

    with_copies(monkeypatch, overtake)
    follower = Follower(joiner.publication_at(core.place), joiner)
    with pytest.raises(BehindError, match=f"{SNAPSHOTS} copies of the core's state in a row were overtaken"):
        follower.advance()
    assert len(copies) == 3 * SNAPSHOTS
    assert follower.number is None


def test_a_core_that_does_not_get_done_with_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    core, joiner = make_state(0), make_state(1)
    monkeypatch.setattr(libra.exec.train.publication, "_wait", lambda: None)
    follower = Follower(joiner.publication_at(core.place), joiner)
    with core.change():
        for _ in range(SNAPSHOTS + 1):  # it gets back to its orders, and nothing was overtaken
            follower.advance()
            assert follower.number is None
        monkeypatch.setattr(libra.exec.train.follower, "SILENT_SECONDS", 0.0)
        with pytest.raises(SilentError, match="does not get done"):
            follower.advance()
    follower.advance()
    assert follower.number == core.number
