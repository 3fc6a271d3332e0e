"""The gradient exchange when somebody is missing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from replicas import BATCH, at_once, free_port, make_trainer, order

import libra.exec.elastic
from libra.exec.elastic import GradientExchange, PeerLostError
from libra.exec.messages import Regroup

pytestmark = pytest.mark.usefixtures("one_thread")

PEER = """
import sys
from libra.exec.elastic import GradientExchange
exchange = GradientExchange()
exchange.regroup(1, 1, 2, int(sys.argv[1]))
sys.stdin.read()
"""


@contextmanager
def peer_process(port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Replica 1 of generation 1, a process of its own that only waits."""
    process = subprocess.Popen([sys.executable, "-c", PEER, str(port)], stdin=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def pair(port: int) -> list[GradientExchange]:
    exchanges = [GradientExchange(), GradientExchange()]
    first, second = (lambda rank=rank: exchanges[rank].regroup(1, rank, 2, port) for rank in range(2))
    at_once(first, second)
    return exchanges


def test_alone_an_exchange_is_free() -> None:
    tensors = [torch.tensor([1.0, 2.0])]
    exchange = GradientExchange()
    assert exchange.add_up(tensors, 7.0) == (7.0, 0.0)
    exchange.share(tensors)
    assert tensors[0].tolist() == [1.0, 2.0]


def test_tensors_of_every_shape_are_added_up_in_place() -> None:
    exchanges = pair(free_port())
    mine = [torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor(5.0)]
    theirs = [torch.tensor([[10.0, 20.0], [30.0, 40.0]]), torch.tensor(50.0)]
    sums = at_once(lambda: exchanges[0].add_up(mine, 3.0), lambda: exchanges[1].add_up(theirs, 4.0))
    assert [total for total, _ in sums] == [7.0, 7.0]
    for tensors in (mine, theirs):
        assert [tensor.tolist() for tensor in tensors] == [[[11.0, 22.0], [33.0, 44.0]], 55.0]


def test_state_comes_from_replica_0() -> None:
    exchanges = pair(free_port())
    mine, theirs = [torch.tensor([1.0, 2.0]), torch.tensor(3.0)], [torch.zeros(2), torch.tensor(0.0)]
    at_once(lambda: exchanges[0].share(mine), lambda: exchanges[1].share(theirs))
    assert [tensor.tolist() for tensor in theirs] == [tensor.tolist() for tensor in mine] == [[1.0, 2.0], 3.0]


def test_a_replica_that_dies_before_the_exchange_leaves_the_other_as_it_was(tiny_model: Path) -> None:
    port = free_port()
    core, reference = make_trainer(tiny_model), make_trainer(tiny_model)
    with peer_process(port) as peer:
        core.regroup(Regroup(1, 0, 2, port, False))
        before = core.parameter_hash()
        peer.kill()
        peer.wait()
        with pytest.raises(PeerLostError, match="gradient exchange of 2 replicas failed"):
            core.train(order(BATCH[:2]))
    assert core.parameter_hash() == before
    # Nothing of the failed step is left: with the others' samples it is made again, by those who remain.
    core.regroup(Regroup(2, 0, 1, port, False))
    assert core.train(order(BATCH)).parameter_hash == reference.train(order(BATCH)).parameter_hash


@pytest.mark.parametrize("rank", [0, 1])
def test_a_membership_that_not_everyone_enters(rank: int, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libra.exec.elastic, "DEADLINE", timedelta(milliseconds=200))
    port = free_port()
    trainer, reference = make_trainer(tiny_model), make_trainer(tiny_model)
    with pytest.raises(PeerLostError, match="membership 1 of 2 replicas did not come about"):
        trainer.regroup(Regroup(1, rank, 2, port, False))
    # It must not make a step with its own share alone.
    with pytest.raises(PeerLostError):
        trainer.train(order(BATCH[:2]))
    trainer.regroup(Regroup(2, 0, 1, port, False))
    assert trainer.train(order(BATCH)).parameter_hash == reference.train(order(BATCH)).parameter_hash
