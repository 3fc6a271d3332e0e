"""Messages between the controller and a training replica.

Invariant: no message contains a tensor. Weights go through shared memory, and gradients through a process group
(`elastic.py`). A joiner reads a core's state from its board (`publication.py`), or through a relay (`relay.py`).
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
    temperature: float  # of sampling; the trained policy is softmax(logits / temperature)
    micro_batch_tokens: int
    precision: Precision
    seed: int
    share: float  # of one core, for all of its processes together
    cores: tuple[int, ...]
    processes: int = 1
    sharding: Sharding = "none"
    device: DeviceKind = "cpu"
    memory: float = 1.0  # share of its GPU's memory
    hashed: bool = False  # published weights get a hash of the device, so no other node can check them by CRC


class MeasureTraining(Message, frozen=True):
    """Measure steps on samples of these lengths, `repeats` times. The state is restored afterwards."""

    batches: list[list[int]]
    repeats: int


class Sample(msgspec.Struct, frozen=True):
    """Training data of one trajectory. The four lists have one entry per token."""

    id: str
    tokens: list[int]
    generated: list[bool]  # the loss mask: True for tokens that the policy generated
    logprobs: list[float]  # under the behaviour policy; 0 for tokens that were not generated
    versions: list[int]  # of the weights that generated each token; -1 for tokens that were not generated
    advantage: float


class Train(Message, frozen=True):
    """Back-propagate this replica's share of a batch, and sum the gradients of all replicas; then await the verdict.

    `sequences` and `tokens` are this replica's part of the loss denominator. They count every trajectory of the batch,
    also those of groups without a signal, which are not sent.
    """

    version: int  # the version that this step makes
    samples: list[Sample]
    sequences: int
    tokens: int
    patience: float  # seconds to wait for the other replicas


class Commit(Message, frozen=True):
    """Step the optimiser, since all replicas have the summed gradient of this version."""

    version: int
    publish_to: int  # buffer index; -1: this replica does not publish


class Discard(Message, frozen=True):
    """Drop the gradient that awaits a verdict, since no step is made. The state is that before `Train`."""


# Time to form a membership. All replicas get the order within milliseconds, so a replica that has not joined by then
# will not join. A replica that enters waits at most this long for the others.
FORMING_SECONDS = 20.0


class HostRendezvous(Message, frozen=True):
    """Listen as the rendezvous of the replicas. The answer is `Rendezvous`."""

    host: str  # address of this replica's node to listen at
    port: int  # 0: any free port
    token: str  # that the other replicas send


class Prepare(Message, frozen=True):
    """Form a membership of `size` replicas, this one with rank `rank`, while the current membership continues."""

    generation: int
    rank: int
    size: int
    address: str  # of this replica's node, at which the others reach it
    host: str  # address of the rendezvous, at which the replica of rank 0 listens
    port: int  # 0: that replica cannot listen
    token: str  # to be sent there


class Enter(Message, frozen=True):
    """Exchange gradients in the prepared membership from now on. A replica that follows a core stops following it."""

    generation: int


class StatePlace(msgspec.Struct, frozen=True, tag=True):
    """Memory in which one process of a replica publishes its part of the state, on its own node: an open file of
    process `pid`."""

    pid: int
    descriptor: int  # in that process


TOKEN_BYTES = 32  # length of a token in ASCII


class RelayPlace(msgspec.Struct, frozen=True, tag=True):
    """Address at which another node reads a replica's state: that of a relay, which serves one reader with the
    token."""

    host: str
    port: int
    token: str


class Serve(Message, frozen=True):
    """Start a relay for the reader with this token. It copies the published state until the reader joins or leaves."""

    host: str  # address of this replica's node to listen at
    token: str
    cores: tuple[int, ...]  # of this node, for the relay


class Identify(Message, frozen=True):
    """Report the state that this replica has."""


class Follow(Message, frozen=True):
    """Copy the state published at `places`, and follow it until `Enter`. Answer once this state is reached."""

    places: list[StatePlace | RelayPlace]  # one per process of the replica


class CatchUp(Message, frozen=True):
    """Answer once state `number` of the followed core is reached and membership `generation` can be entered, or after
    `seconds`."""

    number: int
    generation: int
    seconds: float


class WarmUp(Message, frozen=True):
    """Make one supervised step on demonstrations: (tokens, mask of generated tokens) per sequence."""

    batch: list[tuple[list[int], list[bool]]]
    learning_rate: float


class Publish(Message, frozen=True):
    version: int
    buffer: int


class SaveCheckpoint(Message, frozen=True):
    directory: str
    optimiser: bool  # whether to include its moments, which are needed to continue training


class LoadCheckpoint(Message, frozen=True):
    directory: str


class Score(Message, frozen=True):
    """Compute log-probs of these sequences under the current weights at the sampling temperature, for comparison with
    the engines."""

    sequences: list[list[int]]


# --- from a worker ---------------------------------------------------------------------------------------------------


class TrainingMeasured(Message, frozen=True):
    """(tokens, seconds of forward and backward) for each batch, and mean seconds of the work done once per step."""

    batches: list[tuple[int, float]]
    step_seconds: float  # for clipping, optimiser and hash
    exchange_seconds: float
    failure: str = ""  # reason why nothing was measured; empty if it was


class TokenSums(msgspec.Struct, frozen=True):
    """Sums over a share or a part of it: some over all tokens that the model processed, some over generated tokens."""

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
    failure: str  # reason why it lacks the summed gradient; empty if it has it
    compute_seconds: float
    exchange_seconds: float
    sums: TokenSums


class Trained(Message, frozen=True):
    """One step was made."""

    version: int
    checksum: int  # of the published weights; 0 if none were published
    parameter_hash: int
    publish_seconds: float
    gradient_norm: float  # of the exchanged gradient, before clipping
    diverged: str = ""  # values that are not finite, or soon will not be; empty if there are none


class WarmedUp(Message, frozen=True):
    loss: float


class Published(Message, frozen=True):
    """The weights are published for the engines."""

    version: int
    checksum: int
    diverged: str = ""  # as in `Trained`


class Rendezvous(Message, frozen=True):
    port: int  # 0: the replica cannot listen, and reports the reason when it enters a membership


class Entered(Message, frozen=True):
    generation: int
    failure: str  # reason why the membership was not formed; empty if it was


class StateDigest(Message, frozen=True):
    """The state that a replica has."""

    number: int  # in the count of the followed core, or else of this replica; -1: no whole state
    parameter_hash: int
    size: int  # bytes of the parameters of its processes; a moment of AdamW, or a gradient, has as many
    places: list[StatePlace]  # one per process of the replica
    ready: bool = False  # whether the requested membership can be entered
    behind: str = ""  # reason why it stopped following; empty if it follows


class Serving(Message, frozen=True):
    ports: list[int]  # one per process of the replica
    failure: str  # reason why no relay could be started; empty if it listens


class Scored(Message, frozen=True):
    logprobs: list[list[float]]  # of each token after the first


TrainerOrder = (
    StartTrainer | MeasureTraining | Train | Commit | Discard | HostRendezvous | Prepare | Enter | Serve | Identify
    | Follow | CatchUp | WarmUp | Publish | SaveCheckpoint | LoadCheckpoint | Score
)  # fmt: skip
TrainerAnswer = (
    TrainingMeasured | Reduced | Trained | WarmedUp | Published | Rendezvous | Entered | StateDigest | Serving | Scored
)
