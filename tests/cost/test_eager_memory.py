"""Peak memory of one training step against Transformers' own Qwen3, whose tensors are counted as they come and go.

The tensors have no values (`FakeTensorMode`): shapes, types and lifetimes are real, and so is the peak."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
from oracles.reshaped import heads_of

from libra.config.recipe import TrainingBytes
from libra.cost.train_memory import LOGIT_CHUNK, training_memory
from libra.hardware.decoder import decoder
from libra.hardware.model import ModelSpec
from libra.hardware.parallel import ParallelLayout, Recompute

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

STATES = {torch.bfloat16: TrainingBytes(2, 2, 4), torch.float32: TrainingBytes(4, 4, 8, compute=2)}
TALL = decoder("tall", 8, 512, 8, 4, 64, 1536, 32_000, True, 40960, qk_norm=True)
UNTIED = decoder("untied", 4, 1024, 8, 8, 128, 4096, 16_000, False, 40960, qk_norm=True)


def counted(model: ModelSpec, dtype: Any, recompute: Recompute, tokens: int) -> float:
    """Bytes at the fullest moment of forward and backward, AdamW's moments among them."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves
    from torch.utils.checkpoint import checkpoint
    from transformers import AutoModelForCausalLM, Qwen3Config

    class Peak(TorchDispatchMode):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.now = self.most = 0
            self.live: set[int] = set()

        def count(self, tensor: Any) -> None:
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in self.live:
                self.live.add(key)
                self.now += size
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self.gone, key, size)

        def gone(self, key: int, size: int) -> None:
            self.live.discard(key)
            self.now -= size

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self.count(leaf)
            return result

    config = Qwen3Config(
        vocab_size=model.vocab,
        hidden_size=model.hidden,
        intermediate_size=model.intermediate,
        num_hidden_layers=model.layers,
        num_attention_heads=heads_of(model).heads,
        num_key_value_heads=heads_of(model).kv_heads,
        head_dim=heads_of(model).head_dim,
        tie_word_embeddings=model.tied,
        attn_implementation="sdpa",
        use_cache=False,
    )
    with FakeTensorMode(allow_non_fake_inputs=True):
        module = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
        if recompute == "full":
            module.gradient_checkpointing_enable()
        peak = Peak()
        for parameter in module.parameters():
            peak.count(parameter)
        peak.now *= 3
        with peak:
            # A mask of this kind is none: attention is causal by itself, as on a GPU.
            ids, none = torch.zeros(1, tokens, dtype=torch.long), {"full_attention": None}
            with torch.autocast("cpu", torch.bfloat16):
                hidden = module.model(ids, attention_mask=none).last_hidden_state
                loss: Any = 0
                for chunk in hidden.flatten(0, 1).split(LOGIT_CHUNK):

                    def lost(chunk: Any) -> Any:
                        wanted = torch.zeros(len(chunk), dtype=torch.long)
                        logits = module.lm_head(chunk).float()
                        return torch.nn.functional.cross_entropy(logits, wanted, reduction="sum")

                    loss = loss + checkpoint(lost, chunk, use_reentrant=False)
            loss.backward()
        return float(peak.most)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("dtype", list(STATES), ids=str)
@pytest.mark.parametrize(("model", "tokens"), [(TALL, 16_384), (UNTIED, 4096)], ids=["tall", "untied"])
def test_the_fullest_moment_is_that_of_the_modules(
    model: ModelSpec, tokens: int, dtype: Any, recompute: Recompute
) -> None:
    layout = ParallelLayout(1, 1, 1, 1, 1, tokens, recompute, "zero1", True)
    found = training_memory(model, layout, tokens, 80e9, STATES[dtype], "none", "eager", accumulated=False)
    assert found.total - found.margin == pytest.approx(counted(model, dtype, recompute, tokens), rel=0.03)
