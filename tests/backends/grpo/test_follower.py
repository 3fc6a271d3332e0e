"""A joiner beside a core that goes on: whatever the two do in between, a torn state is never taken for a whole one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from fakes.states import WAYS, Way, around_copies, before_copies, gradient, make_state, reading, step, vectors
from hypothesis import given, settings
from hypothesis import strategies as st

import libra.backends.grpo.publication
import libra.backends.grpo.relay
import libra.backends.grpo.train_state
from libra.backends.grpo.publication import FIRST_MOMENT, PARAMETERS, SECOND_MOMENT, SLOTS, OverrunError, Update
from libra.backends.grpo.train_state import SNAPSHOTS, BehindError, Follower, SilentError, TrainState

ways = pytest.mark.parametrize("way", WAYS)


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
                after.gradient()[:-1] += state._board.slots[(state.number + 1) % SLOTS][:-1]
                after.step(1.0, 0.0)
            else:
                after.put_back(make_state(len(self.history)).keep())
            self.history[state.number + 1] = vectors(after)
            if is_step:  # from here on a joiner may be there before the core
                state._board.publish(Update(state.number + 1, 0.01, 1.0, 0.0))
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


@ways
@settings(deadline=None, max_examples=300)
@given(
    kinds=st.lists(st.sampled_from([True] * 19 + [False]), min_size=6, max_size=20),
    beside_states=st.lists(st.sampled_from([0] * 9 + [1, 3, 8, 17, 40]), min_size=9, max_size=40),
    beside_updates=st.lists(st.sampled_from([0] * 3 + [1, 3, 8, 17, 40]), min_size=9, max_size=40),
    between=st.lists(st.integers(1, 60), max_size=20),
)
def test_a_torn_state_is_never_taken_for_a_whole_one(
    way: Way, kinds: list[bool], beside_states: list[int], beside_updates: list[int], between: list[int]
) -> None:
    """The core makes so many stores around each half of a copy, and between two looks of the joiner."""
    core, joiner = Core(kinds), make_state(1)
    states, updates, looks = iter(beside_states), iter(beside_updates), iter(between)
    with pytest.MonkeyPatch.context() as patch, reading(way, core.state, joiner) as publication:
        around_copies(patch, lambda is_gradient: core.act(next(updates if is_gradient else states, 0)))
        patch.setattr(libra.backends.grpo.relay, "_PIECE_BYTES", 80)
        patch.setattr(libra.backends.grpo.publication, "_wait", lambda: core.act(1))
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


@ways
def test_a_joiner_takes_one_copy_and_then_the_steps(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    core, joiner = make_state(0), make_state(1)
    copies = []
    before_copies(monkeypatch, lambda: copies.append(core.number))
    with reading(way, core, joiner) as publication:
        follower = Follower(publication, joiner)
        follower.advance()
        assert len(copies) == 3  # parameters and two moments
        for _ in range(SLOTS - 1):
            step(core)
        follower.advance()
    assert (follower.number, joiner.checksum) == (core.number, core.checksum)
    assert len(copies) == 3 + SLOTS - 1  # a gradient each


@ways
@pytest.mark.parametrize("during", ["before", "half"])
def test_a_gradient_that_is_overwritten_while_it_is_copied_is_refused(
    way: Way, during: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, joiner = make_state(0), make_state(1)
    moments = iter([during == "before", during == "half", False])

    def overwrite(is_gradient: bool) -> None:
        assert is_gradient
        if next(moments):
            step(core)  # its slot is the one that is read
            core.gradient()

    with reading(way, core, joiner) as publication:
        joiner.take_state(publication)
        for _ in range(SLOTS - 1):
            step(core)
        before = vectors(joiner)
        around_copies(monkeypatch, overwrite)
        with pytest.raises(OverrunError, match="overwritten while it was copied"):
            joiner.take_update(publication, core.number - SLOTS + 2)
    assert all(torch.equal(a, b) for a, b in zip(vectors(joiner), before, strict=True))


@ways
def test_a_joiner_that_missed_a_step_starts_again(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    core, joiner = make_state(0), make_state(1)
    copies = []
    with reading(way, core, joiner) as publication:
        follower = Follower(publication, joiner)
        follower.advance()
        for _ in range(SLOTS + 1):
            step(core)
        before_copies(monkeypatch, lambda: copies.append(core.number))
        follower.advance()
    assert (follower.number, joiner.checksum) == (core.number, core.checksum)
    assert len(copies) == 3


@pytest.mark.parametrize(("way", "copied"), [("shared", 3), ("relayed", 1)])
def test_a_core_that_is_always_faster_is_given_up(way: Way, copied: int, monkeypatch: pytest.MonkeyPatch) -> None:
    core, joiner = make_state(0), make_state(1)
    copies = []

    def overtake() -> None:
        copies.append(core.number)
        step(core)

    before_copies(monkeypatch, overtake)
    with reading(way, core, joiner) as publication:
        follower = Follower(publication, joiner)
        with pytest.raises(BehindError, match=f"{SNAPSHOTS} copies of the core's state in sequence became outdated"):
            follower.advance()
    assert len(copies) == copied * SNAPSHOTS  # what is torn already is not sent to its end
    assert follower.number is None


@ways
def test_a_core_that_does_not_get_done_with_a_change(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    core, joiner = make_state(0), make_state(1)
    monkeypatch.setattr(libra.backends.grpo.publication, "_wait", lambda: None)
    with reading(way, core, joiner) as publication:
        follower = Follower(publication, joiner)
        with core.change():
            for _ in range(SNAPSHOTS + 1):  # it gets back to its orders, and nothing was overtaken
                follower.advance()
                assert follower.number is None
            monkeypatch.setattr(libra.backends.grpo.train_state, "SILENT_SECONDS", 0.0)
            with pytest.raises(SilentError, match="did not finish a change"):
                follower.advance()
        follower.advance()
    assert follower.number == core.number
