"""Parameters, moments and gradients in shared memory: the same training, and others can read it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from fakes.states import RATE, SHAPES, make_state, parameters, step, vectors
from msgspec.structs import astuple

from libra.backends.grpo.publication import SLOTS, OverrunError, Shape, SharedPublication
from libra.backends.grpo.train_state import FlatLayout, Follower, TrainState
from libra.backends.transport.shared_memory import LayoutError, attach

# Another process: copies the state and the update to it, prints both.
READER = """
import json, sys, torch
from libra.backends.transport.trainer_messages import StatePlace
from libra.backends.grpo.publication import Shape, SharedPublication
place, shape = json.loads(sys.argv[1])
publication = SharedPublication(StatePlace(*place), Shape(*shape))
board = [torch.zeros(shape[0]) for _ in range(3)]
state = publication.copy_state([vector.numpy() for vector in board])
gradient = torch.zeros(shape[0])
update = publication.copy_update(state.number, gradient.numpy())
print(json.dumps([state.number, state.steps, state.checksum, update.learning_rate, update.denominator,
    [vector.tolist() for vector in board], gradient.tolist()]))
"""


def test_training_on_a_board_is_the_same_training() -> None:
    state, plain = make_state(), parameters()
    optimiser = torch.optim.AdamW(plain.values(), lr=RATE)
    for _ in range(3):
        step(state)
        for name, parameter in plain.items():
            parameter.grad = state._parameters[name].grad.clone()
        optimiser.step()
        for name, parameter in plain.items():
            assert torch.equal(state._parameters[name], parameter)
            for key, tensor in optimiser.state[parameter].items():
                assert torch.equal(state.optimiser_tensors()[f"{name}/{key}"], tensor)


def test_backward_adds_to_the_slot_itself() -> None:
    state = make_state()
    for _ in range(SLOTS + 1):
        slot = state.gradient()
        assert not slot.any()
        before = {name: parameter.grad.data_ptr() for name, parameter in state._parameters.items()}
        for _ in range(2):  # micro-batches
            sum((parameter * parameter).sum() for parameter in state._parameters.values()).backward()
        assert {name: p.grad.data_ptr() for name, p in state._parameters.items()} == before
        assert slot.data_ptr() == min(before.values())
        wanted = 4 * sum(float(parameter.detach().sum()) for parameter in state._parameters.values())
        assert float(slot.sum()) == pytest.approx(wanted, rel=1e-5)
        state.step(1.0, 0.0)


def test_each_change_is_a_new_state() -> None:
    state = make_state()
    first = state.number
    kept, before = state.keep(), vectors(state)
    step(state)
    step(state)
    assert state.number == first + 2
    assert state.checksum != make_state().checksum
    state.put_back(kept)
    assert state.number == first + 3
    assert state.checksum == make_state().checksum
    assert all(torch.equal(a, b) for a, b in zip(vectors(state), before, strict=True))
    addresses = {p.data_ptr() for p in state._parameters.values()}
    assert addresses == {view.data_ptr() for view in state._flat.views(state._board.vectors[0]).values()}


def test_another_process_reads_the_state_and_the_update_to_it() -> None:
    state = make_state()
    step(state)
    step(state, rate=0.5)
    place = state.place
    ends = [astuple(place), astuple(state.shape)]
    answer = subprocess.run([sys.executable, "-c", READER, json.dumps(ends)], capture_output=True, check=True)
    number, steps, checksum, rate, denominator, board, gradient = json.loads(answer.stdout)
    assert (number, steps, checksum) == (state.number, 2, state.checksum)
    assert (rate, denominator) == (0.5, 3.0)
    assert board == [vector.tolist() for vector in state._board.vectors]
    assert gradient == state._board.slots[number % SLOTS][:-1].tolist()


def test_a_reader_cannot_write() -> None:
    state = make_state()
    publication = state.publication_at(state.place)
    with pytest.raises(ValueError, match="read-only"):
        publication.vectors[0][0] = 1.0


def test_a_reader_of_another_model_is_refused() -> None:
    state = make_state()
    turned = FlatLayout.of({f"p{i}": tuple(reversed(shape)) for i, shape in enumerate(SHAPES)}, 4)
    assert turned.length == state._flat.length
    with pytest.raises(LayoutError, match="trains another model"):
        SharedPublication(state.place, Shape(turned.length, "float32", turned.signature()))
    with pytest.raises(LayoutError, match="the same model in the same precision"):
        SharedPublication(state.place, Shape(100_000, "float32", 0))


def test_a_process_that_is_gone_cannot_be_read() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with pytest.raises(OSError):
        attach(gone.pid, 3, 4096)


def test_a_replica_becomes_another_one() -> None:
    core, joiner = make_state(0), make_state(1)
    for _ in range(2):
        step(core)
    publication = joiner.publication_at(core.place)
    step(core, rate=0.25)
    assert joiner.take_state(publication) == core.number
    assert (joiner.checksum, joiner.learning_rate) == (core.checksum, 0.25)
    step(core, rate=0.125)
    assert joiner.take_update(publication, core.number)
    assert not joiner.take_update(publication, core.number + 1)
    assert (joiner.checksum, joiner.learning_rate) == (core.checksum, 0.125)
    assert all(torch.equal(a, b) for a, b in zip(vectors(joiner), vectors(core), strict=True))


def test_processes_that_took_over_different_states_of_a_core_count_alike() -> None:
    """A replica holds a state only if all its processes name the same one."""
    core, joiners = make_state(0), [make_state(1), make_state(2)]
    followers = []
    for joiner in joiners:
        followers.append(Follower(joiner.publication_at(core.place), joiner))
        followers[-1].advance()
        step(core)
    for follower in followers:
        follower.advance()
    assert [joiner.number for joiner in joiners] == [core.number] * 2
    reader = make_state(3)
    third = Follower(reader.publication_at(joiners[0].place), reader)  # it may be followed itself
    third.advance()
    for each in (core, joiners[0]):
        step(each)
    third.advance()
    assert (third.number, reader.checksum) == (core.number, core.checksum)


def test_who_takes_over_a_state_publishes_no_update_of_its_own_past() -> None:
    core, joiner, reader = make_state(0), make_state(1), make_state(2)
    step(core)
    for _ in range(2):
        step(joiner)
    past = joiner.number
    joiner.take_state(joiner.publication_at(core.place))
    publication = reader.publication_at(joiner.place)
    assert joiner.number == core.number == past - 1
    assert not reader.take_update(publication, past)


def test_an_update_is_kept_for_a_while() -> None:
    core = make_state()
    publication = core.publication_at(core.place)
    first = core.number + 1
    for _ in range(SLOTS):
        step(core)
    core.gradient()  # of the next step
    with pytest.raises(OverrunError, match=f"the update to state {first} is gone; {SLOTS - 1} are kept"):
        publication.update(first)
    assert all(publication.update(first + later) for later in range(1, SLOTS))


def test_a_state_is_broken_after_an_error_and_whole_again_after_the_next_change() -> None:
    state, reader = make_state(0), make_state(1)
    publication = reader.publication_at(state.place)
    with pytest.raises(ZeroDivisionError), state.change():
        raise ZeroDivisionError
    assert not publication.at_rest()
    step(state)
    assert publication.at_rest()
    assert reader.take_state(publication) == state.number
    assert reader.checksum == state.checksum


def test_a_change_that_is_no_step_has_no_update() -> None:
    core = make_state()
    publication = core.publication_at(core.place)
    core.put_back(core.keep())
    with pytest.raises(OverrunError):
        publication.update(core.number)


def test_places_start_on_cache_lines_and_what_is_between_stays_zero() -> None:
    state: TrainState = make_state()
    assert all(offset * 4 % 64 == 0 for offset in state._flat.offsets.values())
    step(state)
    for vector in state._board.vectors:
        covered = torch.zeros(len(vector), dtype=torch.bool)
        for view in state._flat.views(covered).values():
            view.fill_(True)
        assert not vector[~covered].any()
