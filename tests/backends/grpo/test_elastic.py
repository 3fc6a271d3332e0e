"""The gradient exchange: beside a membership in use the next one forms, and somebody may be missing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
from fakes.replicas import BATCH, HOST, PATIENCE, TOKEN, at_once, make_trainer, order, prepare, regroup, train
from msgspec.structs import replace

import libra.backends.grpo.elastic
import libra.backends.grpo.trainer
from libra.backends.grpo.elastic import GradientExchange, PeerLostError
from libra.backends.grpo.model_part import Inside
from libra.backends.transport.trainer_messages import HostRendezvous, MeasureTraining, Prepare

pytestmark = pytest.mark.usefixtures("one_thread")

PEER = """
import sys
from libra.backends.grpo.elastic import GradientExchange
from libra.backends.transport.trainer_messages import HostRendezvous, Prepare
exchange = GradientExchange()
print("here", flush=True)
exchange.prepare(Prepare(1, 1, 2, "127.0.0.1", "127.0.0.1", int(sys.argv[1]), "0" * 64))
exchange.enter(1)
print("entered", flush=True)
sys.stdin.read()
"""


@contextmanager
def peer_process(port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Replica 1 of generation 1, a process of its own that only waits. It has started: nobody waits for that."""
    process = subprocess.Popen([sys.executable, "-c", PEER, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"here\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def enter(exchanges: Sequence[GradientExchange], generation: int) -> None:
    at_once(*(lambda exchange=exchange: exchange.enter(generation) for exchange in exchanges))


def sums(exchanges: Sequence[GradientExchange], values: Sequence[float]) -> list[list[float]]:
    """What each replica holds after adding up its value."""
    tensors = [torch.tensor([value, 1.0]) for value in values]
    at_once(*(lambda e=e, t=t: e.all_reduce(t, PATIENCE) for e, t in zip(exchanges, tensors, strict=True)))
    return [tensor.tolist() for tensor in tensors]


def test_alone_an_exchange_is_free() -> None:
    tensor = torch.tensor([1.0, 2.0])
    exchange = GradientExchange()
    assert exchange.all_reduce(tensor, 0.0) == 0.0
    exchange.prepare(Prepare(1, 0, 1, HOST, HOST, 0, TOKEN))
    assert exchange.formed(1, 0.0)
    exchange.enter(1)
    assert exchange.all_reduce(tensor, 0.0) == 0.0
    assert tensor.tolist() == [1.0, 2.0]


def test_the_next_membership_forms_beside_the_present_one() -> None:
    core, hybrid, joiner = GradientExchange(), GradientExchange(), GradientExchange()
    prepare([core, hybrid], 1)
    enter([core, hybrid], 1)
    prepare([core, hybrid, joiner], 2)
    assert all(exchange.formed(2, PATIENCE) for exchange in (core, hybrid, joiner))
    assert sums([core, hybrid], [1.0, 2.0]) == [[3.0, 2.0]] * 2  # nobody has entered it yet
    enter([core, hybrid, joiner], 2)
    assert sums([core, hybrid, joiner], [1.0, 2.0, 4.0]) == [[7.0, 3.0]] * 3
    prepare([core, joiner], 3)
    assert sums([core, hybrid, joiner], [1.0, 2.0, 4.0]) == [[7.0, 3.0]] * 3  # who is about to leave takes part
    enter([core, joiner], 3)
    assert sums([core, joiner], [1.0, 4.0]) == [[5.0, 2.0]] * 2


def test_when_the_first_replica_is_gone_another_one_hosts_the_meeting() -> None:
    first, second, third = GradientExchange(), GradientExchange(), GradientExchange()
    prepare([first, second, third], 1)
    enter([first, second, third], 1)
    del first
    prepare([second, third], 2)
    enter([second, third], 2)
    assert sums([second, third], [1.0, 2.0]) == [[3.0, 2.0]] * 2


def test_only_what_was_prepared_is_entered() -> None:
    exchange = GradientExchange()
    with pytest.raises(ValueError, match="membership 1 was not prepared"):
        exchange.enter(1)
    exchange.prepare(Prepare(1, 0, 1, HOST, HOST, 0, TOKEN))
    exchange.prepare(Prepare(2, 0, 1, HOST, HOST, 0, TOKEN))
    with pytest.raises(ValueError, match="membership 1 was not prepared"):
        exchange.formed(1, 0.0)
    exchange.enter(2)


@pytest.mark.parametrize("hosts", [(HOST, HOST), ("127.0.0.2", "127.0.0.3")])
def test_replicas_meet_and_listen_at_their_own_addresses_only(hosts: tuple[str, str]) -> None:
    exchanges = [GradientExchange(), GradientExchange()]
    before = {c.laddr for c in psutil.Process().net_connections()}
    prepare(exchanges, 1, hosts)
    enter(exchanges, 1)
    assert sums(exchanges, [3.0, 4.0]) == [[7.0, 2.0], [7.0, 2.0]]
    opened = {c.laddr for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN} - before
    assert {address.ip for address in opened} == set(hosts)
    prepare(exchanges[::-1], 2, hosts[::-1])  # the other one hosts
    enter(exchanges, 2)
    assert sums(exchanges, [3.0, 4.0]) == [[7.0, 2.0], [7.0, 2.0]]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_membership_that_not_everyone_enters(rank: int, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libra.backends.grpo.elastic, "FORMING", timedelta(milliseconds=200))
    trainer, reference = make_trainer(tiny_model), make_trainer(tiny_model)
    port = trainer.elastic.exchange.host_rendezvous(HostRendezvous(HOST, 0, TOKEN)) if rank == 0 else free_port()
    trainer.elastic.exchange.prepare(Prepare(1, rank, 2, HOST, HOST, port, TOKEN))
    with pytest.raises(PeerLostError, match=r"membership 1 of 2 replicas was not formed: \w"):
        trainer.elastic.exchange.enter(1)
    # It must not make a step with its own share alone.
    assert "the membership has ended" in trainer.reduce(order(BATCH[:2])).failure
    trainer.discard()
    regroup([trainer], 2)
    assert train(trainer, order(BATCH)).parameter_hash == train(reference, order(BATCH)).parameter_hash


def test_who_never_comes_does_not_hold_up_the_membership_after() -> None:
    core, hybrid = GradientExchange(), GradientExchange()
    port = core.host_rendezvous(HostRendezvous(HOST, 0, TOKEN))
    core.prepare(Prepare(1, 0, 2, HOST, HOST, port, TOKEN))
    assert not core.formed(1, 0.05)
    assert prepare([core, hybrid], 2) == port  # who hosts again does so at the same place
    began = time.monotonic()
    enter([core, hybrid], 2)
    assert time.monotonic() - began < libra.backends.grpo.elastic.FORMING.total_seconds() / 2
    assert sums([core, hybrid], [1.0, 2.0]) == [[3.0, 2.0]] * 2


def test_a_port_that_is_taken_is_told() -> None:
    first, second, third = GradientExchange(), GradientExchange(), GradientExchange()
    assert (
        second.host_rendezvous(HostRendezvous(HOST, first.host_rendezvous(HostRendezvous(HOST, 0, TOKEN)), TOKEN)) == 0
    )
    second.prepare(Prepare(1, 0, 2, HOST, HOST, 0, TOKEN))
    third.prepare(Prepare(1, 1, 2, HOST, HOST, 0, TOKEN))
    assert not second.formed(1, 0.0) and not third.formed(1, PATIENCE)
    with pytest.raises(PeerLostError, match="Address already in use"):
        second.enter(1)
    with pytest.raises(PeerLostError, match="the first replica cannot listen"):
        third.enter(1)
    prepare([second, third], 2)
    enter([second, third], 2)
    assert sums([second, third], [1.0, 2.0]) == [[3.0, 2.0]] * 2


def test_who_hosts_again_at_another_port_listens_there() -> None:
    first, second = GradientExchange(), GradientExchange()
    for generation in (1, 2):
        port = free_port()
        assert first.host_rendezvous(HostRendezvous(HOST, port, TOKEN)) == port
        first.prepare(Prepare(generation, 0, 2, HOST, HOST, port, TOKEN))
        second.prepare(Prepare(generation, 1, 2, HOST, HOST, port, TOKEN))
        enter([first, second], generation)
        assert sums([first, second], [1.0, 2.0]) == [[3.0, 2.0]] * 2


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_replica_that_dies_or_hangs_leaves_the_other_as_it_was(end: signal.Signals, tiny_model: Path) -> None:
    patience = 1.0 if end == signal.SIGSTOP else 600.0  # one that is dead is not waited for
    core, reference = make_trainer(tiny_model), make_trainer(tiny_model)
    port = core.elastic.exchange.host_rendezvous(HostRendezvous(HOST, 0, TOKEN))
    with peer_process(port) as peer:
        core.elastic.exchange.prepare(Prepare(1, 0, 2, HOST, HOST, port, TOKEN))
        core.elastic.exchange.enter(1)
        assert peer.stdout is not None and peer.stdout.readline() == b"entered\n"
        before = core.state.checksum
        os.kill(peer.pid, end)
        began = time.monotonic()
        vote = core.reduce(replace(order(BATCH[:2]), patience=patience))
        assert "gradient exchange of 2 replicas failed" in vote.failure
        assert (time.monotonic() - began >= patience) == (end == signal.SIGSTOP)
    core.discard()
    assert core.state.checksum == before
    # Nothing of the failed step is left: with the others' samples it is made again, by those who remain.
    regroup([core], 2)
    assert train(core, order(BATCH)).parameter_hash == train(reference, order(BATCH)).parameter_hash


class _OtherProcessFailed(Inside):
    """Another process of the replica does not get its part added up."""

    def largest(self, number: int) -> int:
        return 1 if number is False else number


def test_a_replica_of_which_one_process_failed_while_measuring_is_not_waited_for(tiny_model: Path) -> None:
    failed, other = make_trainer(tiny_model), make_trainer(tiny_model)
    regroup([failed, other], 1)
    failed._inside = _OtherProcessFailed(0, 1)
    lengths = MeasureTraining([[6, 9], [12]], 2)
    began = time.monotonic()
    measured = at_once(lambda: failed.measure(lengths), lambda: other.measure(lengths))
    assert measured[0].failure == "the gradient exchange of another process failed"
    assert "gradient exchange of 2 replicas failed" in measured[1].failure
    assert time.monotonic() - began < libra.backends.grpo.trainer._MEASURING_PATIENCE / 2
