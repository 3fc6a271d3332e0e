"""Shape of a language model. Parameters, FLOPs and KV bytes follow from its layers.

Invariant: a `ModelSpec` is complete and possible, and has as many parameters as the checkpoint. `model_file` reads
shapes; `decoder` makes shapes with the same attention in all layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from libra.hardware.attention import Attention
from libra.hardware.checks import require_at_least
from libra.hardware.latent import LatentAttention
from libra.hardware.layers import LayerKind, LayerParameters
from libra.hardware.mlp import Experts
from libra.hardware.stored_weights import WeightFormat


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only language model: the kinds of its layers, and the kind of each layer in order.

    Raises `ValueError` for an impossible shape. A `ModelSpec` excludes the layers that predict further tokens
    (DeepSeek-V3's MTP module), since policy-gradient training does not run them. It also excludes the bias on expert
    scores, which no gradient trains.
    """

    name: str
    hidden: int
    vocab: int
    tied: bool  # whether input and output embeddings are one matrix
    max_context: int  # tokens
    kinds: tuple[LayerKind, ...]
    order: tuple[int, ...]  # for each layer, the index of its kind in `kinds`
    tower: int = 0  # parameters of towers for images and sound, and of their projectors; never trained
    other: int = 0  # parameters outside layers, embeddings, the last norm and towers
    stored: WeightFormat | None = None  # format of the checkpoint's weights; None: 16 bits

    def __post_init__(self) -> None:
        require_at_least(1, layers=len(self.order), hidden=self.hidden, vocab=self.vocab, max_context=self.max_context)
        require_at_least(0, tower=self.tower, other=self.other)
        if set(self.order) != set(range(len(self.kinds))):
            raise ValueError(
                f"order must use each of the {len(self.kinds)} kinds of the model, and no others: correct it"
            )
        if len({kind.experts for kind in self.kinds if kind.experts}) > 1:
            raise ValueError("layers have experts of different shapes, but only one shape is supported")

    # Layers

    @property
    def layers(self) -> int:
        return len(self.order)

    @property
    def counted(self) -> tuple[tuple[LayerKind, int], ...]:
        """Every kind, with the number of its layers."""
        return tuple((kind, self.order.count(index)) for index, kind in enumerate(self.kinds))

    def count(self, chosen: Callable[[LayerKind], bool]) -> int:
        """Number of layers whose kind `chosen` accepts."""
        return sum(count for kind, count in self.counted if chosen(kind))

    def stage(self, pp: int, weight: Callable[[LayerKind], float] | None = None) -> tuple[tuple[LayerKind, int], ...]:
        """Kinds of the heaviest ceil(layers / pp) consecutive layers, with the number of layers of each. The default
        weight of a layer is its number of parameters. All pipeline stages are assumed to have this depth.
        """
        deep = -(-self.layers // pp)
        if len(self.kinds) == 1:
            return ((self.kinds[0], deep),)
        each = [weight(kind) if weight else kind.parameters(self.hidden).total for kind in self.kinds]
        sums = (0.0, *accumulate(each[index] for index in self.order))
        start = max(range(self.layers - deep + 1), key=lambda first: sums[first + deep] - sums[first])
        found = Counter(self.order[start : start + deep])
        return tuple((kind, found[index]) for index, kind in enumerate(self.kinds))

    @property
    def experts(self) -> Experts | None:
        """The experts, which are equal in all layers with experts; None if every MLP is dense."""
        return next((kind.experts for kind in self.kinds if kind.experts), None)

    @property
    def sparse_layers(self) -> int:
        """Number of layers with experts."""
        return self.count(lambda kind: kind.experts is not None)

    @property
    def dense_layers(self) -> int:
        """Number of layers with a dense MLP."""
        return self.count(lambda kind: kind.dense is not None)

    @property
    def intermediate(self) -> int:
        """Width of the widest dense MLP; 0 without one."""
        return max((kind.dense.intermediate for kind in self.kinds if kind.dense), default=0)

    @property
    def latent(self) -> bool:
        """Whether any layer keeps compressed vectors instead of keys and values."""
        return any(isinstance(kind.mixer, LatentAttention) for kind in self.kinds)

    @property
    def plain_attention(self) -> Attention | None:
        """The attention of all layers if it is plain, otherwise None. Plain attention is equal in all layers and sees
        every key. It has only projections, biases of queries, keys and values, and norms as wide as a head.
        """
        mixers = {kind.mixer for kind in self.kinds}
        first = next(iter(mixers))
        if len(mixers) > 1 or not isinstance(first, Attention):
            return None
        plain = Attention(first.heads, first.kv_heads, first.head_dim, qkv_bias=first.qkv_bias, qk_norm=first.qk_norm)
        return first if first == plain and first.qk_norm != "layer" else None

    # Parameters

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the input embedding and the language-model head."""
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def expert_parameters(self) -> int:
        """Parameters of one routed expert of one layer; 0 without experts."""
        return self.experts.of_one(self.hidden) if self.experts else 0

    @property
    def routed_parameters(self) -> int:
        """Parameters of all routed experts of all layers."""
        return self.sparse_layers * self.expert_parameters * (self.experts.count if self.experts else 0)

    @property
    def parameters(self) -> int:
        """All parameters of the checkpoint."""
        return self.trained_parameters + self.tower

    @property
    def trained_parameters(self) -> int:
        """The parameters of the language model, without towers."""
        layers = sum(count * int(kind.parameters(self.hidden).total) for kind, count in self.counted)
        return self.embedding_parameters + self.hidden + self.other + layers

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses, including both embeddings, as model cards count them."""
        idle = self.experts.count - self.experts.active if self.experts else 0
        return self.trained_parameters - self.sparse_layers * idle * self.expert_parameters

    def tp_refusal(self, tp: int) -> str | None:
        """Reason why the model cannot be divided over `tp` devices; None if it can."""
        if tp < 1:
            return f"tp is {tp}; set it to 1 or more"
        return next((why for kind in self.kinds if kind.mixer and (why := kind.mixer.tp_refusal(tp))), None)

    def device_parameters(self, tp: int = 1, pp: int = 1, ep: int = 1) -> LayerParameters:
        """Parameters on one device of the heaviest pipeline stage.

        `tp` devices divide every layer's heads and MLPs, the embeddings and the towers. `ep` data-parallel replicas
        also divide the routed experts. With several stages, the first has the input embedding and the last the output
        head. Raises `ValueError` if the degrees do not divide the model.
        """
        refusal = self.tp_refusal(tp)
        if refusal:
            raise ValueError(refusal)
        if not 1 <= pp <= self.layers:
            raise ValueError(f"pp is {pp}; set it to a number of pipeline stages from 1 to {self.layers}")
        count = self.experts.count if self.experts else 1
        if ep < 1 or count % ep:
            raise ValueError(f"ep is {ep}; it must divide the {count} experts")
        embedding = self.embedding_parameters if pp == 1 else self.vocab * self.hidden
        found = LayerParameters(plain=embedding / tp + self.hidden + self.other + self.tower / tp)
        for kind, layers in self.stage(pp, lambda kind: kind.parameters(self.hidden, tp, ep).total):
            found = found + kind.parameters(self.hidden, tp, ep) * layers
        return found

    # A sequence

    def kv_bytes(self, context: float, number: float, tp: int = 1, pp: int = 1) -> float:
        """Bytes of a sequence of `context` tokens on one of `tp` devices of the fullest pipeline stage. A number of KV
        has `number` bytes. Full attention grows with each token, a window up to its width, a state has a constant size,
        and an indexer adds its keys.
        """

        def weight(kind: LayerKind) -> float:
            return kind.kv_bytes(context, number, tp)

        return sum(layers * weight(kind) for kind, layers in self.stage(pp, weight))

    @property
    def even(self) -> bool:
        """Whether each token of a context adds the same number of bytes, at any length."""
        return all(part.grows for kind in self.kinds for part in kind.kept())

    def kv_bytes_per_token(self, number: float, tp: int = 1, pp: int = 1, context: float | None = None) -> float:
        """`kv_bytes` per token of a sequence of `context` tokens, by default the model's longest context. For an `even`
        model the result does not depend on the length.
        """
        if self.even:
            return self.kv_bytes(1, number, tp, pp)
        length = max(1.0, self.max_context if context is None else context)
        return self.kv_bytes(length, number, tp, pp) / length

    def forward_flops(self, tokens: float, context_sum: float) -> float:
        """FLOPs of a forward pass over `tokens` tokens, including the logits of each token.

        `context_sum` is the number of keys up to each token, summed over these tokens: n * (n + 1) / 2 for a causal
        sequence of n tokens. Each multiplied parameter takes 2 FLOPs per token. Each key that the layer's attention
        sees takes 2 FLOPs per head, and per dimension of the key and of the value (Narayanan et al. 2021, arXiv
        2104.04473, appendix, without the causal mask). A backward pass takes twice the forward FLOPs.
        """
        vocabulary = self.vocab * self.hidden
        multiplied = self.active_parameters - self.embedding_parameters + vocabulary
        mean = context_sum / tokens if tokens else 0.0
        return (2.0 * multiplied + self.token_flops) * tokens + self.key_flops(mean) * context_sum

    @property
    def token_flops(self) -> float:
        """FLOPs of states per token in a forward pass, in addition to the FLOPs of parameters."""
        return sum(count * kind.mixer.token_flops for kind, count in self.counted if kind.mixer)

    def key_flops(self, mean: float = 0.0) -> float:
        """FLOPs of a forward pass per key. `mean` is the mean number of a token's keys, including keys beyond its
        reach; 0 means that all keys are within reach.
        """
        return sum(count * kind.key_flops(mean) for kind, count in self.counted)


def arranged(layers: Sequence[LayerKind]) -> tuple[tuple[LayerKind, ...], tuple[int, ...]]:
    """`kinds` and `order` for a model with these layers."""
    kinds = tuple(dict.fromkeys(layers))
    index = {kind: number for number, kind in enumerate(kinds)}
    return kinds, tuple(index[kind] for kind in layers)
