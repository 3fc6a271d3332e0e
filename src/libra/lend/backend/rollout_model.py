"""The model of an engine behind an agent, and whether a run's weights fit it.

Invariant: an engine loads a run's weights only if they have the names, shapes and types of its own weights, and none is
missing. The two configurations must have no known difference that changes the meaning of the numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from libra.backends.transport.messages import Dtype, Tensor
from libra.config.input_file import read_input

# Keys of config.json that do not change what a forward pass computes.
_BOOKKEEPING = {
    *("_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache", "max_position_embeddings"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "initializer_range"),
}
_OUTPUT = "lm_head.weight"
_REMEDY = "lend an engine of the run's own model"


@dataclass(frozen=True, slots=True)
class RolloutModel:
    shapes: Mapping[str, tuple[int, ...]]  # of its weights, by name
    dtype: Dtype
    config: Mapping[str, Any]  # config.json

    @classmethod
    def read(cls, directory: Path, dtype: Dtype) -> RolloutModel:
        """Read the model of a directory. Raises ValueError if the directory has no model."""
        path = directory / "config.json"
        try:
            config = json.loads(read_input(path))
        except (OSError, ValueError, RecursionError):
            config = None
        if not isinstance(config, dict):
            raise ValueError(f"{directory} holds no config.json; give the directory of a model")
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise ValueError(f"{directory} holds no *.safetensors; save the model's weights there")
        shapes: dict[str, tuple[int, ...]] = {}
        for file in files:
            with safe_open(file, "numpy") as weights:
                shapes |= {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
        if config.get("tie_word_embeddings", False):
            shapes.pop(_OUTPUT, None)
        return cls(shapes, dtype, config)

    def difference(self, layout: Sequence[Tensor], config: Mapping[str, Any]) -> str | None:
        """Reason why weights with this layout and config.json do not fit this model; None: they fit."""
        theirs = {tensor.name: tensor for tensor in layout}
        for name in sorted(theirs.keys() | self.shapes.keys()):
            if name not in self.shapes:
                tied = " (its model ties this weight to the embeddings)" if name == _OUTPUT else ""
                return f"layouts that differ: the lent engine has no {name}{tied}; {_REMEDY}"
            if name not in theirs:
                return f"layouts that differ: the run has no {name}; {_REMEDY}"
            tensor, shape = theirs[name], self.shapes[name]
            if tensor.shape != shape:
                return (
                    f"layouts that differ: {name} is {list(shape)} in the lent engine and {list(tensor.shape)} in the"
                    f" run; {_REMEDY}"
                )
            if tensor.dtype != self.dtype:
                return (
                    f"layouts that differ: the lent engine computes in {self.dtype}, the run in {tensor.dtype}; set"
                    " rollout.dtype of the loan, or training.precision of the run"
                )
        for key in sorted((self.config.keys() & config.keys()) - _BOOKKEEPING):
            if self.config[key] != config[key]:
                return (
                    f"models that differ: {key} of config.json is {self.config[key]} in the lent engine and"
                    f" {config[key]} in the run; {_REMEDY}"
                )
        return None
