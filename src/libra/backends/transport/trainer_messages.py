"""Messages between the controller and a training replica.

Invariant: no tensor travels here. Weights go through shared memory, gradients through a process group (`elastic.py`),
and a joiner reads a core's state from its board (`publication.py`) or over a relay (`relay.py`).
"""

from __future__ import annotations

import msgspec
from msgspec.structs import astuple

from libra.backends.transport.messages import Denominator, DeviceKind, Message, Precision, Sharding

# --- from the controller ---------------------------------------------------------------------------------------------


class StartTrainer(Message, frozen=True):
    """Become a training replica."""

    model_directory: str
    learning_rate: float
    clip: tuple[float, float]
    denominator: Denominator
    token_constant: float
    temperature: float  # of sampling: the policy that is trained is softmax(logits / temperature)
    micro_batch_tokens: int
    precision: Precision
    seed: int
    share: float  # of one core, that its processes have together
    cores: tuple[int, ...]
    processes: int = 1
    sharding: Sharding = "none"
    device: DeviceKind = "cpu"
    memory: float = 1.0  # share of its GPU's memory
    hashed: bool = False  # published weights are sealed with a hash of the device: no other node checks them by CRC


class MeasureTraining(Message, frozen=True):
    """Time steps on samples of these lengths, `repeats` times in turn; the state is restored afterwards."""

    batches: list[list[int]]
    repeats: int


class Sample(msgspec.Struct, frozen=True):
    """Training data of one trajectory. The four lists have one entry per token."""

    id: str
    tokens: list[int]
    generated: list[bool]  # the loss mask: True where the policy wrote the token
    logprobs: list[float]  # of the behaviour policy, 0 where not generated
    versions: list[int]  # weight version that generated the token, -1 where none did
    advantage: float


class Train(Message, frozen=True):
    """Back-propagate this replica's share of a batch and sum the gradients of all replicas; then await the verdict.

    `sequences` and `tokens` are this replica's part of the loss denominator. They count every trajectory of the batch,
    also those of groups without a signal, which are not sent.
    """

    version: int  # the version that this step makes
    samples: list[Sample]
    sequences: int
    tokens: int
    patience: float  # seconds to wait for the other replicas


class Commit(Message, frozen=True):
    """All replicas hold the summed gradient of this version: make the optimiser step."""

    version: int
    publish_to: int  # buffer index; -1: this replica does not publish


class Discard(Message, frozen=True):
    """No step is made: forget the gradient that awaits a verdict. The state is that before `Train`."""


# Time to form a membership: all replicas get the order within milliseconds, so a replica that has not joined by then
# will not join. A replica with the order to enter waits at most this long for the others.
FORMING_SECONDS = 20.0


class HostRendezvous(Message, frozen=True):
    """Listen as the rendezvous of the replicas; answered by `Rendezvous`."""

    host: str  # address of this replica's node to listen at
    port: int  # 0: any free one
    token: str  # which the other replicas show


class Prepare(Message, frozen=True):
    """Form the membership of `size` replicas in which this one has number `rank`, while the present one continues."""

    generation: int
    rank: int
    size: int
    address: str  # of this replica's node: the others reach it there
    host: str  # where the replicas meet: at number 0, which listens there
    port: int  # 0: it cannot listen
    token: str  # to be shown there


class Enter(Message, frozen=True):
    """Exchange gradients in the prepared membership from now on. A replica that follows a core stops following."""

    generation: int


class StatePlace(msgspec.Struct, frozen=True, tag=True):
    """Place where one process of a replica publishes its part of the state, on its own node: a file that process `pid`
    holds open."""

    pid: int
    descriptor: int  # of that process


TOKEN_BYTES = 32  # of ASCII


class RelayPlace(msgspec.Struct, frozen=True, tag=True):
    """Address at which another node reads a replica's state: a relay that listens for one reader with the token."""

    host: str
    port: int
    token: str


class Serve(Message, frozen=True):
    """Let the reader with this token copy the published state to another node, until it has joined or left."""

    host: str  # address of this replica's node to listen at
    token: str
    cores: tuple[int, ...]  # of this node, on which the relay may run


class Identify(Message, frozen=True):
    """Report the state that this replica holds."""


class Follow(Message, frozen=True):
    """Take over the state published there, and keep up with it until `Enter`; answer when level with it."""

    places: list[StatePlace | RelayPlace]  # one for each process of the replica


class CatchUp(Message, frozen=True):
    """Answer when level with state `number` of the followed core and ready to enter membership `generation`, or after
    `seconds`."""

    number: int
    generation: int
    seconds: float


class WarmUp(Message, frozen=True):
    """Make one supervised step on demonstrations: (tokens, generated mask) per sequence."""

    batch: list[tuple[list[int], list[bool]]]
    learning_rate: float


class Publish(Message, frozen=True):
    version: int
    buffer: int


class SaveCheckpoint(Message, frozen=True):
    directory: str
    optimiser: bool  # with its moments, to continue from; without, just the model


class LoadCheckpoint(Message, frozen=True):
    directory: str


class Score(Message, frozen=True):
    """Log-probs of these sequences under the current weights at the temperature of sampling, for the check against the
    engines."""

    sequences: list[list[int]]


# --- from a worker ---------------------------------------------------------------------------------------------------


class TrainingMeasured(Message, frozen=True):
    """(tokens, seconds of forward and backward) for each batch, and mean seconds of the work once a step."""

    batches: list[tuple[int, float]]
    step_seconds: float  # clip, optimiser, hash
    exchange_seconds: float
    failure: str = ""  # why nothing was measured; empty where it was


class TokenSums(msgspec.Struct, frozen=True):
    """Sums of a share or a part of it: over all tokens that went through the model, and over the policy's own
    tokens."""

    forward_tokens: int = 0
    generated_tokens: int = 0
    clipped: float = 0.0  # tokens whose ratio was clipped
    behaviour_weight: float = 0.0  # sum of min(pi_prox / mu, cap)
    prox_gap: float = 0.0  # sum of |log pi_prox - log mu|

    def __add__(self, other: TokenSums) -> TokenSums:
        return TokenSums(*map(sum, zip(astuple(self), astuple(other), strict=True)))


class Reduced(Message, frozen=True):
    """This replica's vote on a step."""

    version: int
    failure: str  # why it does not hold the summed gradient; empty where it does
    compute_seconds: float
    exchange_seconds: float
    sums: TokenSums


class Trained(Message, frozen=True):
    """One step done."""

    version: int
    checksum: int  # of the published weights; 0 where nothing was published
    parameter_hash: int
    publish_seconds: float
    gradient_norm: float  # of the exchanged gradient, before clipping
    diverged: str = ""  # values that are not finite, or soon will not be; empty: none


class WarmedUp(Message, frozen=True):
    loss: float


class Published(Message, frozen=True):
    """The weights are ready for the engines."""

    version: int
    checksum: int
    diverged: str = ""  # as in `Trained`


class Rendezvous(Message, frozen=True):
    port: int  # 0: it cannot listen, and reports why when it enters a membership


class Entered(Message, frozen=True):
    generation: int
    failure: str  # why the membership did not come about; empty where it did


class StateDigest(Message, frozen=True):
    """The state that a replica holds."""

    number: int  # by the count of the followed core, or else of this replica; -1: none
    parameter_hash: int
    size: int  # bytes of the parameters that its processes hold; a moment of AdamW and a gradient are as large
    places: list[StatePlace]  # one for each process of the replica
    ready: bool = False  # to enter the requested membership
    behind: str = ""  # why it ceased to follow


class Serving(Message, frozen=True):
    ports: list[int]  # one for each process of the replica
    failure: str  # reason why it cannot be read there; empty where the relay listens


class Scored(Message, frozen=True):
    logprobs: list[list[float]]  # per token after the first


TrainerOrder = (
    StartTrainer | MeasureTraining | Train | Commit | Discard | HostRendezvous | Prepare | Enter | Serve | Identify
    | Follow | CatchUp | WarmUp | Publish | SaveCheckpoint | LoadCheckpoint | Score
)  # fmt: skip
TrainerAnswer = (
    TrainingMeasured | Reduced | Trained | WarmedUp | Published | Rendezvous | Entered | StateDigest | Serving | Scored
)
