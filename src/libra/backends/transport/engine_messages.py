"""Messages between the controller and a rollout engine.

Invariant: no tensor travels here. Weights and KV go through shared memory (`shared_memory.py`).
"""

from __future__ import annotations

from typing import Any

import msgspec

from libra.backends.transport.messages import DeviceKind, Dtype, Message, Tensor

# --- from the controller ---------------------------------------------------------------------------------------------


class KVBufferPlace(msgspec.Struct, frozen=True):
    """Place where KV is transferred: a file that process `pid` holds open, of `frames` blocks of KV."""

    pid: int
    descriptor: int  # of that process
    frames: int
    frame_bytes: int


class DeviceLoan(msgspec.Struct, frozen=True):
    """A device on which another engine serves users, and the terms of borrowing it."""

    device: str  # file of its token
    terms: dict[str, Any]  # as lending writes them
    record: str | None  # file of views and answers
    share: float = 1.0  # share of its cores that the device has; below 1, the engine is paced
    kv_beside: int | None = None  # bytes of its KV memory that do not belong to the other engine; None: all


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
    kv: KVBufferPlace | None = None  # where it may transfer KV; None: it cannot
    loan: DeviceLoan | None = None  # the device that it borrows; None: it has one of its own
    device: DeviceKind = "cpu"
    gpus: int = 1  # of this engine, which divides its model among them
    memory: float = 1.0  # share of each GPU's memory
    max_num_batched_tokens: int | None = None  # None: vLLM's default
    graphs: bool = False  # capture iterations as CUDA graphs
    asynchronous: bool = False  # schedule an iteration while the one before is computed
    sleeps: bool = False  # it may get the order to release its memory, see `Sleep`


class WeightsPlace(msgspec.Struct, frozen=True):
    """Address at which a run's publications can be followed."""

    host: str
    port: int
    token: str  # to be shown there


class Borrow(Message, frozen=True):
    """A run's first message to the agent of a server: its request for the engine there. Answered by `Lent`, by
    `NotNow`, or by `Failure` if that engine does not fit."""

    max_model_len: int
    max_num_seqs: int
    kv_tokens: int  # for which it has memory when all lendable memory is borrowed
    config: str = "{}"  # config.json of the run's model
    layout: tuple[Tensor, ...] = ()  # of its weights; empty: a query only
    buffer_bytes: int = 0
    refresh_kv: bool = False  # KV of earlier weights is not used
    weights: WeightsPlace | None = None  # None: nothing is published, and the engine keeps its first weights


class ExpectWeights(Message, frozen=True):
    """Expect weights in this layout from now on. Not answered."""

    layout: tuple[Tensor, ...]
    buffer_bytes: int


class StartServer(Message, frozen=True):
    """Become a server under recorded traffic, on a device that it lends."""

    model_directory: str
    random_weights: bool  # instead of weights from files
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_bytes: int
    dtype: Dtype
    seed: int
    device: str  # file of its token
    share: float  # of one core: the device's speed
    cores: tuple[int, ...]
    traffic: str  # file of requests
    speed: float  # times as fast as they were recorded
    shorter: float  # prompts and outputs are divided by it
    begins: float  # share of the record that is skipped at the start, so that servers do not all get the same requests
    first: int  # number of the first request: earlier requests went to an earlier server
    served: str  # file that gets a line for each request at its end


class KVTransfer(msgspec.Struct, frozen=True):
    """KV of a context's first blocks, one in each of these frames."""

    number: int
    frames: list[int]


class Generate(Message, frozen=True):
    """One turn, or the rest of one. Generation stops at `stop_token` or after `max_tokens`."""

    id: str
    tokens: list[int]
    max_tokens: int
    temperature: float
    stop_token: int
    priority: int
    salt: str | None = None  # a private prefix-cache namespace: a request that must not see old KV
    transfer: KVTransfer | None = None  # KV of its context that another engine has saved; answered by `Fetched`
    seed: int | None = None  # of this request's sampling; None: the engine continues to draw from its own


class Interrupt(Message, frozen=True):
    """Stop a turn now. Its last piece and its end are reported like those of any other."""

    id: str


class Sleep(Message, frozen=True):
    """Release the memory of weights and KV; answered by `Acknowledged`. The engine has no turns in progress."""


class Wake(Message, frozen=True):
    """Take the memory again; answered by `Acknowledged`. Weights come before the next turn."""


class Save(Message, frozen=True):
    """Save the available KV of this context, whole blocks from its beginning on; answered by `Saved`. Turns continue
    meanwhile."""

    tokens: list[int]
    salt: str | None  # that of its `Generate`
    transfer: KVTransfer


class LoadWeights(Message, frozen=True):
    version: int
    buffer: int
    checksum: int


class MeasureEngine(Message, frozen=True):
    """Time iterations at these (sequences, context tokens each), `repeats` times in turn."""

    points: list[tuple[int, int]]
    repeats: int


class MeasureHandover(Message, frozen=True):
    """Time saving contexts of these tokens into the transfer's frames, and fetching them from there, `repeats` times in
    turn. The prefix cache is empty afterwards."""

    contexts: list[int]
    repeats: int
    transfer: KVTransfer


# --- from a worker ---------------------------------------------------------------------------------------------------


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Tokens that a turn generated since the piece before, all with one version of the weights."""

    turn: str  # id of its `Generate`
    version: int
    tokens: list[int]
    logprobs: list[float]  # one per token


class LoanState(msgspec.Struct, frozen=True, array_like=True):
    """Totals of a loan since the engine started. Times are seconds."""

    away: str  # reason why nothing is lent for the time being; empty: it is lent
    wanted: float  # with turns in progress, while the device is lent
    lent: float  # of these seconds, those with the device
    grants: int
    overstayed: int  # grants that were exceeded, so serving continued without the lock


class Lent(Message, frozen=True):
    """The engine belongs to the run until the run or the agent ends the loan."""

    model: str  # that is served on its device
    certified: float  # requests/s up to which the device is lent
    away: str  # why nothing is lent for the time being; empty: it is lent


class NotNow(Message, frozen=True):
    """The engine is not available yet; asking again later may help."""

    why: str


class Generated(Message, frozen=True):
    """Tokens that an engine generated since its last report, and its counters since it started. Sent every
    `report.REPORT_SECONDS` while it has work, and at once when a turn ends."""

    pieces: list[Piece]  # those of one turn in order
    ended: list[str]  # turns that have ended; all their pieces have been sent
    busy_seconds: float  # wall seconds with work, messages, loads and pacing included
    prefilled_tokens: int  # prompt tokens computed, prefix-cache hits excluded
    iterations: int
    generated_tokens: int
    loan: LoanState | None = None  # of the device; None: it is the engine's own


class Saved(Message, frozen=True):
    """The `Save` with this transfer is done: its first `blocks` frames are filled."""

    transfer: int
    blocks: int


class Fetched(Message, frozen=True):
    """The frames of this transfer are no longer needed; `tokens` of the context were taken from them."""

    transfer: int
    tokens: int


class Loaded(Message, frozen=True):
    version: int
    seconds: float


class EngineMeasured(Message, frozen=True):
    """Mean seconds of one iteration for each kind: (sequences, context tokens in all, prefilled tokens, seconds)."""

    iterations: list[tuple[float, float, float, float]]


class HandoverMeasured(Message, frozen=True):
    """(tokens, seconds to save them, seconds to fetch them) for each context."""

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
