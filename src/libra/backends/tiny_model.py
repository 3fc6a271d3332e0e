"""A tiny Qwen3 with one token per character, as a directory in Hugging Face layout.

Invariant: the directory has a configuration and a tokenizer that vLLM and transformers load. The first trainer makes
the weights, from the run's seed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from libra.backends.transport.messages import DTYPE_BYTES, Dtype
from libra.config.input_file import read_input
from libra.config.run import ConfigError, ModelConfig

_SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>")
_VOCABULARY_MULTIPLE = 32  # rows of the embedding are a multiple of it, for vector units


def write_tiny_model(directory: Path, shape: ModelConfig, alphabet: str, longest_context: int) -> None:
    """Write `config.json` and `tokenizer.json`. Input and output embeddings are untied."""
    directory.mkdir(parents=True, exist_ok=True)
    tokens = [*_SPECIAL, *dict.fromkeys(alphabet)]
    size = -(-len(tokens) // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
    tokens += [f"<unused{index}>" for index in range(size - len(tokens))]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": 3 * shape.hidden_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": max(512, longest_context),
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")


class TokenizerCodec:
    """Converts text to token ids and back, with the `tokenizer.json` of a model directory."""

    def __init__(self, directory: Path) -> None:
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"model.directory: {path} does not exist; give a directory with a tokenizer.json")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001 - the library raises no narrower exception
            raise ConfigError(
                f"model.directory: {path} is not a tokenizer ({error}); save the model there again"
            ) from None

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False)


def kv_bytes_per_token(directory: Path, dtype: Dtype, gpus: int = 1) -> int:
    """Bytes of one token's keys and values of `dtype` in all layers, from `config.json`, on each of the `gpus` GPUs
    among which an engine divides the heads. Each GPU has at least one head."""
    config = _config(directory)
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return DTYPE_BYTES[dtype] * 2 * int(config["num_hidden_layers"]) * max(1, int(heads) // gpus) * int(head_dim)


def vocabulary(directory: Path) -> int:
    """Number of token ids of the model, from `config.json`."""
    return int(_config(directory)["vocab_size"])


def _config(directory: Path) -> Any:
    return json.loads(read_input(directory / "config.json"))
