"""Shape of a language model, and its parameters, FLOPs and KV bytes, by arithmetic on its layers.

Invariant: a `ModelSpec` is complete and possible, and its parameter counts are exact: those of the checkpoint.
`model_file` reads shapes.
"""

from __future__ import annotations

from dataclasses import dataclass

from libra.hardware.stored_weights import WeightFormat

_MATRICES = 3  # of a gated MLP: gate, up, down


def require_at_least(minimum: int, **fields: int) -> None:
    """Raise ValueError naming the first of `fields` that is below `minimum`."""
    for field, value in fields.items():
        if value < minimum:
            raise ValueError(f"{field} is {value}; set it to {minimum} or more")


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixture of experts. `layers` of the model's layers route each token to `active` of `count` experts."""

    count: int
    active: int
    intermediate: int  # width of one expert
    shared_intermediate: int  # width of the experts that every token takes; 0 where there are none
    layers: int
    groups: int = 1  # equal parts of the experts
    active_groups: int = 1  # groups that have all experts of one token

    def __post_init__(self) -> None:
        require_at_least(1, groups=self.groups, active_groups=self.active_groups)
        require_at_least(1, count=self.count, active=self.active, intermediate=self.intermediate, layers=self.layers)
        require_at_least(0, shared_intermediate=self.shared_intermediate)
        if self.active > self.count:
            raise ValueError(f"active is {self.active}, but there are {self.count} experts; lower it")
        if self.count % self.groups or self.active_groups > self.groups:
            raise ValueError(
                f"groups is {self.groups} and active_groups {self.active_groups}; take groups that divide the"
                f" {self.count} experts, and as many or fewer of them"
            )
        if self.active * self.groups > self.count * self.active_groups:
            raise ValueError(f"active is {self.active}, more than {self.active_groups} groups have; lower it")


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): one compressed KV vector a token and layer."""

    q_rank: int  # 0: queries are not compressed
    kv_rank: int
    nope_dim: int  # per head, without position
    rope_dim: int  # per head, with position; one key of it is shared by all heads
    value_dim: int  # per head

    def __post_init__(self) -> None:
        require_at_least(0, q_rank=self.q_rank)
        require_at_least(
            1, kv_rank=self.kv_rank, nope_dim=self.nope_dim, rope_dim=self.rope_dim, value_dim=self.value_dim
        )


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Layer shapes of a decoder-only transformer with gated MLPs (three matrices each).

    Raises ValueError where a shape is impossible. Not part of it: layers that predict further tokens (DeepSeek-V3's MTP
    module), which policy-gradient training does not run, and its bias on expert scores, which no gradient trains.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int  # of queries and keys
    intermediate: int  # of the dense layers; 0 where every layer has experts
    vocab: int
    tied: bool  # input and output embeddings are one matrix
    max_context: int  # tokens
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: Experts | None = None
    latent: LatentAttention | None = None
    stored: WeightFormat | None = None  # of the checkpoint; None: 16 bits

    def __post_init__(self) -> None:
        require_at_least(1, layers=self.layers, hidden=self.hidden, heads=self.heads, kv_heads=self.kv_heads)
        require_at_least(1, head_dim=self.head_dim, vocab=self.vocab, max_context=self.max_context)
        require_at_least(1 if self.dense_layers else 0, intermediate=self.intermediate)
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads is {self.kv_heads}; it must divide the {self.heads} heads")
        if self.sparse_layers > self.layers:
            raise ValueError(f"experts.layers is {self.sparse_layers}, but there are {self.layers} layers; lower it")

    @property
    def sparse_layers(self) -> int:
        """Layers with experts."""
        return self.experts.layers if self.experts else 0

    @property
    def dense_layers(self) -> int:
        return self.layers - self.sparse_layers

    @property
    def embedding_parameters(self) -> int:
        """Input embedding and language-model head."""
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def norm_parameters(self) -> int:
        """The two norms of one layer; every device of a tensor-parallel group has them."""
        return 2 * self.hidden

    @property
    def dense_mlp_parameters(self) -> int:
        """The MLP of one dense layer."""
        return _MATRICES * self.hidden * self.intermediate

    @property
    def expert_parameters(self) -> int:
        """One routed expert of one layer; 0 without experts."""
        return _MATRICES * self.hidden * self.experts.intermediate if self.experts else 0

    @property
    def shared_expert_parameters(self) -> int:
        """The experts of one layer that every token takes."""
        return _MATRICES * self.hidden * self.experts.shared_intermediate if self.experts else 0

    @property
    def routed_parameters(self) -> int:
        """All routed experts of all layers."""
        return self.sparse_layers * self.expert_parameters * (self.experts.count if self.experts else 0)

    @property
    def router_parameters(self) -> int:
        """The router of one layer; every device of a tensor-parallel group has it."""
        return self.hidden * self.experts.count if self.experts else 0

    def attention_parameters(self, tp: int = 1) -> float:
        """The attention of one layer, on one of `tp` devices: heads are divided, what all heads share is repeated.

        KV heads are repeated where there are fewer than devices (Megatron-LM and vLLM); with latent attention the
        down-projections are.
        """
        kv_devices = min(tp, self.kv_heads)
        if self.latent is None:
            query = self.heads * self.head_dim
            key_value = 2 * self.kv_heads * self.head_dim
            bias = query / tp + key_value / kv_devices if self.qkv_bias else 0
            norms = 2 * self.head_dim if self.qk_norm else 0
            return self.hidden * (2 * query / tp + key_value / kv_devices) + bias + norms
        latent = self.latent
        query = self.heads * (latent.nope_dim + latent.rope_dim)
        key_value = self.heads * (latent.nope_dim + latent.value_dim)
        down = self.hidden * (latent.kv_rank + latent.rope_dim) + latent.kv_rank  # with its norm
        if latent.q_rank:
            down += self.hidden * latent.q_rank + latent.q_rank
        up = query * (latent.q_rank or self.hidden) + key_value * latent.kv_rank
        return down + (up + self.heads * latent.value_dim * self.hidden) / tp

    @property
    def parameters(self) -> int:
        """All parameters: those that the checkpoint holds."""
        return self._parameters(self.experts.count if self.experts else 0)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses, both embeddings included, as model cards count them."""
        return self._parameters(self.experts.active if self.experts else 0)

    def _parameters(self, experts: int) -> int:
        sparse = experts * self.expert_parameters + self.shared_expert_parameters + self.router_parameters
        return (
            self.embedding_parameters
            + self.hidden
            + self.layers * (int(self.attention_parameters()) + self.norm_parameters)
            + self.dense_layers * self.dense_mlp_parameters
            + self.sparse_layers * sparse
        )

    def tp_refusal(self, tp: int) -> str | None:
        """Why the model cannot be divided over `tp` devices; None where it can."""
        if tp < 1:
            return f"tp is {tp}; it is 1 or more"
        if self.heads % tp:
            return f"tp is {tp}; it must divide the {self.heads} heads"
        if self.kv_heads % tp and tp % self.kv_heads:
            return f"tp is {tp}; it must divide the {self.kv_heads} KV heads or be a multiple of them"
        return None

    def device_parameters(self, tp: int = 1, pp: int = 1, ep: int = 1) -> float:
        """Parameters on one device of the heaviest pipeline stage.

        `tp` devices divide every layer's heads and MLPs and the embeddings; `ep` of the data-parallel replicas also
        divide the routed experts. The heaviest stage is taken to have ceil(layers / pp) layers, the heaviest of all,
        and, of several stages, one of the two embeddings: the first stage has one, the last the other.
        Raises ValueError where the degrees do not divide the model.
        """
        refusal = self.tp_refusal(tp)
        if refusal:
            raise ValueError(refusal)
        if not 1 <= pp <= self.layers:
            raise ValueError(f"pp is {pp}; the model has 1 to {self.layers} pipeline stages")
        count = self.experts.count if self.experts else 1
        if ep < 1 or count % ep:
            raise ValueError(f"ep is {ep}; it must divide the {count} experts")
        layers = -(-self.layers // pp)
        experts = (self.expert_parameters * count / ep + self.shared_expert_parameters) / tp + self.router_parameters
        kinds = ((self.dense_mlp_parameters / tp, self.dense_layers), (experts, self.sparse_layers))
        (heavy, most), (light, _) = sorted(kinds, reverse=True)
        embedding = self.embedding_parameters if pp == 1 else self.vocab * self.hidden
        return (
            embedding / tp
            + self.hidden
            + layers * (self.attention_parameters(tp) + self.norm_parameters)
            + min(layers, most) * heavy
            + max(0, layers - most) * light
        )

    def device_attention_parameters(self, tp: int = 1, pp: int = 1) -> float:
        """The part of `device_parameters` in attention."""
        return -(-self.layers // pp) * self.attention_parameters(tp)

    def device_shared_parameters(self, tp: int = 1, pp: int = 1) -> float:
        """The part of `device_parameters` in experts that every token takes."""
        return min(-(-self.layers // pp), self.sparse_layers) * self.shared_expert_parameters / tp

    def device_routed_parameters(self, tp: int = 1, pp: int = 1, ep: int = 1) -> float:
        """The part of `device_parameters` in routed experts."""
        layers = min(-(-self.layers // pp), self.sparse_layers)
        return layers * self.expert_parameters * (self.experts.count if self.experts else 0) / ep / tp

    def unquantized_parameters(self, tp: int = 1, pp: int = 1) -> float:
        """The part of `device_parameters` that no quantisation narrows: embeddings, output head, norms of layers and
        routers."""
        layers = -(-self.layers // pp)
        embedding = self.embedding_parameters if pp == 1 else self.vocab * self.hidden
        routers = min(layers, self.sparse_layers) * self.router_parameters
        return embedding / tp + self.hidden + layers * self.norm_parameters + routers

    def kv_bytes_per_token(self, dtype_bytes: float, tp: int = 1, pp: int = 1) -> float:
        """Bytes that one token of context takes in the KV cache of one of `tp` devices: all layers of the pipeline
        stage that has most, ceil(layers / pp).

        A latent vector belongs to all heads, so every device keeps it; so does each device that shares a KV head.
        """
        layers = -(-self.layers // pp)
        if self.latent is not None:
            return layers * (self.latent.kv_rank + self.latent.rope_dim) * dtype_bytes
        return layers * 2 * max(1.0, self.kv_heads / tp) * self.head_dim * dtype_bytes

    def forward_flops(self, tokens: float, context_sum: float) -> float:
        """FLOPs of a forward pass over `tokens` tokens, logits of each included.

        `context_sum` is the sum over these tokens of the keys each sees: n * (n + 1) / 2 for a causal sequence of n.
        Two per multiplied parameter and token, and per head, layer and key 2 for each dimension of the key and of the
        value (Narayanan et al. 2021, arXiv 2104.04473, appendix; there without the causal mask). Backward is twice it.
        """
        vocabulary = self.vocab * self.hidden
        multiplied = self.active_parameters - self.embedding_parameters + vocabulary
        dims = 2 * self.head_dim if self.latent is None else self.head_dim + self.latent.value_dim
        return 2.0 * multiplied * tokens + 2.0 * dims * self.heads * self.layers * context_sum
