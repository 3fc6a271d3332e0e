"""Every message arrives as it was sent, and nothing else arrives."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from libra.backends.transport.channel import FromWorker, ToWorker
from libra.backends.transport.engine_messages import (
    EngineMeasured,
    Fetched,
    Generate,
    Generated,
    HandoverMeasured,
    Interrupt,
    KVBufferPlace,
    KVTransfer,
    Loaded,
    LoadWeights,
    MeasureEngine,
    MeasureHandover,
    Piece,
    Save,
    Saved,
    StartEngine,
)
from libra.backends.transport.messages import Acknowledged, Failure, Message, Ready, Stop, Tensor
from libra.backends.transport.trainer_messages import (
    CatchUp,
    Commit,
    Discard,
    Enter,
    Entered,
    Follow,
    HostRendezvous,
    Identify,
    LoadCheckpoint,
    MeasureTraining,
    Prepare,
    Publish,
    Published,
    Reduced,
    RelayPlace,
    Rendezvous,
    Sample,
    SaveCheckpoint,
    Score,
    Scored,
    Serve,
    Serving,
    StartTrainer,
    StateDigest,
    StatePlace,
    Train,
    Trained,
    TrainingMeasured,
    WarmedUp,
    WarmUp,
)

LAYOUT = (Tensor("embed.weight", (64, 32), 0, "bfloat16"), Tensor("norm.weight", (32,), 4096, "bfloat16"))
SAMPLE = Sample("g0-1", [5, 6, 7], [False, True, True], [0.0, -0.1, -2.5e-7], [-1, 3, 4], -0.75)
PIECES = [Piece("g0-1/0#7", 3, [6, 7], [-0.1, -2.5]), Piece("g0-1/0#7", 4, [8], [-0.30000001192092896])]

PLACE = StatePlace(4711, 9, 10)

TO_WORKER = [
    StartEngine("/models/tiny", 160, 16, "bfloat16", 1 << 33, LAYOUT, 4160, 7, 0.45, (1,), False),
    StartTrainer("/models/tiny", 5e-5, (0.8, 1.28), "constant", 12.0, 0.7, 1024, "fp32", 7, 0.45, (0, 1)),
    StartEngine(
        "/models/tiny",
        160,
        16,
        "bfloat16",
        1 << 33,
        LAYOUT,
        4160,
        7,
        0.45,
        (1,),
        True,
        KVBufferPlace(4711, 9, 8, 1 << 20),
    ),
    Generate("g0-1/0#7", [5, 6, 7], 16, 1.0, 21, 3),
    Generate("fresh", [5], 16, 0.0, -1, 3, salt="fresh"),
    Generate("moved", [5] * 40, 16, 0.0, -1, 3, transfer=KVTransfer(7, [3])),
    Save([5] * 64, None, KVTransfer(1 << 40, [0, 2])),
    Interrupt("g0-1/0#7"),
    LoadWeights(4, 0, 0xFFFFFFFF),
    MeasureEngine([(1, 16), (8, 64)], 3),
    MeasureHandover([33, 257], 3, KVTransfer(1, [0, 1])),
    MeasureTraining([[14, 22], [31]], 6),
    Train(4, [SAMPLE], 8, 50, 60.0),
    Train(5, [], 0, 0, 0.5),
    Commit(4, -1),
    Discard(),
    HostRendezvous("10.0.0.1", 0),
    Prepare(2, 1, 2, "10.0.0.2", "10.0.0.1", 29500),
    Enter(2),
    Identify(),
    Serve("10.0.0.1", "7f" * 16, (1, 2)),
    Follow([PLACE]),
    Follow([RelayPlace("10.0.0.1", 40000, "7f" * 16)]),
    CatchUp(1 << 40, 2, 0.02),
    WarmUp([([5, 6], [False, True])], 2e-3),
    Publish(4, 0),
    SaveCheckpoint("/runs/a/checkpoint-4.part", True),
    LoadCheckpoint("/runs/a/checkpoint-4"),
    Score([[5, 6], [7]]),
    Stop(),
]
FROM_WORKER = [
    Ready(1.5),
    Ready(1.5, LAYOUT, 4160),
    Generated(PIECES, ["g0-1/0#7"], 3.5, 40, 12, 90),
    Saved(1 << 40, 2),
    Fetched(7, 32),
    Loaded(4, 0.01),
    EngineMeasured([(4.0, 88.0, 0.0, 0.01)]),
    HandoverMeasured([(32, 0.001)]),
    TrainingMeasured([(120, 0.5)], 0.1, 0.02),
    Reduced(4, "", 0.5, 0.1, 120, 50, 2.0, 51.5, 0.25),
    Reduced(4, "replica 1 is gone: \u2028 'peer' \0", 0.5, 0.0, 120, 50, 2.0, 51.5, 0.25),
    Trained(4, 0xFFFFFFFF, 1 << 31, 0.05, 1.75),
    WarmedUp(2.5, 640),
    Published(4, 1 << 31),
    Rendezvous(29500),
    Entered(2, "not everyone came"),
    Serving([40000], ""),
    Serving([], "Cannot assign requested address"),
    StateDigest(7, 0xFFFFFFFF, 1 << 40, [PLACE]),
    StateDigest(-1, 0, 64, [PLACE], ready=True, behind="too slow"),
    Acknowledged(),
    Scored([[-0.1, -2.5], []]),
    Failure("out of memory"),
]


def test_every_message_is_in_the_tables() -> None:
    assert {type(message) for message in TO_WORKER} == set(get_args(ToWorker))
    assert {type(message) for message in FROM_WORKER} == set(get_args(FromWorker))
    assert {*get_args(ToWorker), *get_args(FromWorker)} == set(Message.__subclasses__())


@pytest.mark.parametrize("message", TO_WORKER, ids=lambda message: type(message).__name__)
def test_orders_arrive_as_they_were_sent(message: Message) -> None:
    assert msgspec.json.decode(msgspec.json.encode(message), type=ToWorker) == message


@pytest.mark.parametrize("message", FROM_WORKER, ids=lambda message: type(message).__name__)
def test_answers_arrive_as_they_were_sent(message: Message) -> None:
    assert msgspec.json.decode(msgspec.json.encode(message), type=FromWorker) == message


@pytest.mark.parametrize(
    "frame",
    [
        b'{"type":"Exec","code":"1"}',
        b'{"type":"Ready","seconds":1.0,"layout":[],"buffer_bytes":0}',  # an answer, not an order
        b'{"type":"Interrupt","id":"a","force":true}',
        b'{"type":"Interrupt"}',
        b'{"type":"Interrupt","id":7}',
        b'{"id":"a"}',
        b"[]",
        b"null",
    ],
)
def test_anything_else_is_refused(frame: bytes) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(frame, type=ToWorker)
