"""Messages between the controller and a rollout engine.

Invariant: no message contains a tensor. Weights and KV go through shared memory (`shared_memory.py`).
"""

from __future__ import annotations

from typing import Any

import msgspec

from libra.backends.transport.messages import DeviceKind, Dtype, Message, Tensor

# --- from the controller ---------------------------------------------------------------------------------------------


class KVBufferPlace(msgspec.Struct, frozen=True):
    """Shared memory for KV transfers: an open file of process `pid`, with `frames` blocks of KV."""

    pid: int
    descriptor: int  # in that process
    frames: int
    frame_bytes: int


class DeviceLoan(msgspec.Struct, frozen=True):
    """A device on which another engine serves users, and the terms of its loan."""

    device: str  # path of its token
    terms: dict[str, Any]  # in lending's format
    record: str | None  # path of the file of views and answers
    share: float = 1.0  # share of its cores that the device may use; below 1, the engine is paced
    kv_beside: int | None = None  # bytes of the engine's KV memory that are not the other engine's; None: all


class StartEngine(Message, frozen=True):
    """Become a rollout engine."""

    model_directory: str
    max_model_len: int
    max_num_seqs: int
    dtype: Dtype
    kv_cache_bytes: int
    layout: tuple[Tensor, ...]
    buffer_bytes: int
    seed: int
    share: float  # of one core that this device may use
    cores: tuple[int, ...]
    refresh_kv: bool  # salt the prefix cache with the weight version
    kv: KVBufferPlace | None = None  # memory for its KV transfers; None: it has none
    loan: DeviceLoan | None = None  # the loan of its device; None: the device is its own
    device: DeviceKind = "cpu"
    gpus: int = 1  # among which this engine divides its model
    memory: float = 1.0  # share of each GPU's memory
    max_num_batched_tokens: int | None = None  # None: vLLM's default
    graphs: bool = False  # capture iterations as CUDA graphs
    asynchronous: bool = False  # whether it schedules an iteration while the previous one is computed
    sleeps: bool = False  # whether it may be ordered to release its memory; see `Sleep`


class WeightsPlace(msgspec.Struct, frozen=True):
    """Address at which a run's publications can be read."""

    host: str
    port: int
    token: str  # to be sent there first


class Borrow(Message, frozen=True):
    """A run's first message to the agent of a server: its request for the engine there. The answer is `Lent`, `NotNow`,
    or `Failure` if that engine does not fit."""

    max_model_len: int
    max_num_seqs: int
    kv_tokens: int  # tokens for which the engine has memory if all lendable memory is borrowed
    config: str = "{}"  # config.json of the run's model
    layout: tuple[Tensor, ...] = ()  # of the model's weights; empty for a query only
    buffer_bytes: int = 0
    refresh_kv: bool = False  # whether KV of earlier weights must not be used
    weights: WeightsPlace | None = None  # None: the run publishes nothing, and the engine keeps its first weights


class ExpectWeights(Message, frozen=True):
    """Announces the layout of all following weights. Has no answer."""

    layout: tuple[Tensor, ...]
    buffer_bytes: int


class StartServer(Message, frozen=True):
    """Become a server with recorded traffic, on a device that it lends."""

    model_directory: str
    random_weights: bool  # random weights instead of those in files
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_bytes: int
    dtype: Dtype
    seed: int
    device: str  # path of its token
    share: float  # of one core, which sets the device's speed
    cores: tuple[int, ...]
    traffic: str  # path of the recorded requests
    speed: float  # factor by which requests arrive faster than recorded
    shorter: float  # divisor of the lengths of prompts and outputs
    begins: float  # share of the record that is skipped at the start, so that servers get different requests
    first: int  # number of the first request; an earlier server got the requests before it
    served: str  # path of a file with a line for each ended request


class KVTransfer(msgspec.Struct, frozen=True):
    """KV of a context's first blocks, each in one of these frames."""

    number: int
    frames: list[int]


class Generate(Message, frozen=True):
    """One turn, or the rest of a turn. Generation stops at `stop_token` or after `max_tokens`."""

    id: str
    tokens: list[int]
    max_tokens: int
    temperature: float
    stop_token: int
    priority: int
    salt: str | None = None  # private prefix-cache namespace, for a request that must not see old KV
    transfer: KVTransfer | None = None  # KV of its context, saved by another engine; answered by `Fetched`
    seed: int | None = None  # of this request's sampling; None: the engine's own random state


class Interrupt(Message, frozen=True):
    """Stop a turn now. Its last piece and its end are reported as for any other turn."""

    id: str


class Sleep(Message, frozen=True):
    """Release the memory of weights and KV. The answer is `Acknowledged`. The engine must have no turns in progress."""


class Wake(Message, frozen=True):
    """Allocate the memory again. The answer is `Acknowledged`. Weights must be loaded before the next turn."""


class Save(Message, frozen=True):
    """Save the KV of this context's first blocks, as far as it is available. The answer is `Saved`. Turns continue
    meanwhile."""

    tokens: list[int]
    salt: str | None  # of the context's `Generate`
    transfer: KVTransfer


class LoadWeights(Message, frozen=True):
    version: int
    buffer: int
    checksum: int


class MeasureEngine(Message, frozen=True):
    """Measure iterations at these points (sequences, context tokens of each), `repeats` times."""

    points: list[tuple[int, int]]
    repeats: int


class MeasureHandover(Message, frozen=True):
    """Measure saving contexts of these numbers of tokens into the transfer's frames, and fetching them from there,
    `repeats` times. The prefix cache is empty afterwards."""

    contexts: list[int]
    repeats: int
    transfer: KVTransfer


# --- from a worker ---------------------------------------------------------------------------------------------------


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of a turn since its previous piece, all generated with one version of the weights."""

    turn: str  # id of its `Generate`
    version: int
    tokens: list[int]
    logprobs: list[float]  # one per token


class LoanState(msgspec.Struct, frozen=True, array_like=True):
    """Totals of a loan since the engine started. Times are seconds."""

    away: str  # reason why nothing is lent now; empty: it is lent
    wanted: float  # time with turns in progress while the device is lent
    lent: float  # part of `wanted` in which the engine had the device
    grants: int
    overstayed: int  # grants that the engine exceeded, so that serving continued without the lock


class Lent(Message, frozen=True):
    """The engine belongs to the run until the run or the agent ends the loan."""

    model: str  # name of the model that its device serves
    certified: float  # requests/s up to which the device is lent
    away: str  # reason why nothing is lent now; empty: it is lent


class NotNow(Message, frozen=True):
    """The engine is not available now. A later request may succeed."""

    why: str


class Generated(Message, frozen=True):
    """Tokens that an engine generated since its last report, and its counters since it started. Sent every
    `report.REPORT_SECONDS` while the engine has work, and at once when a turn ends."""

    pieces: list[Piece]  # those of a turn in order
    ended: list[str]  # ids of turns that have ended; all their pieces have been sent
    busy_seconds: float  # wall seconds with work, including messages, loads and pacing
    prefilled_tokens: int  # prompt tokens computed, without prefix-cache hits
    iterations: int
    generated_tokens: int
    loan: LoanState | None = None  # of the device; None: the device is the engine's own


class Saved(Message, frozen=True):
    """The `Save` of this transfer is done: its first `blocks` frames are filled."""

    transfer: int
    blocks: int


class Fetched(Message, frozen=True):
    """The frames of this transfer may be freed; the engine took `tokens` of the context from them."""

    transfer: int
    tokens: int


class Loaded(Message, frozen=True):
    version: int
    seconds: float


class EngineMeasured(Message, frozen=True):
    """Mean seconds of one iteration per point: (sequences, total context tokens, prefilled tokens, seconds)."""

    iterations: list[tuple[float, float, float, float]]


class HandoverMeasured(Message, frozen=True):
    """For each context: (tokens, seconds to save them, seconds to fetch them)."""

    contexts: list[tuple[int, float]]


EngineOrder = (
    StartEngine
    | StartServer
    | Wake
    | Borrow
    | ExpectWeights
    | Generate
    | Interrupt
    | Save
    | Sleep
    | LoadWeights
    | MeasureEngine
    | MeasureHandover
)
EngineAnswer = Lent | NotNow | Generated | Saved | Fetched | Loaded | EngineMeasured | HandoverMeasured
