"""Whether weights of a run are weights of the model that an engine behind an agent was made of."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from libra.backends.transport.messages import Tensor
from libra.lend.backend.rollout_model import RolloutModel

SHAPES = {"embed.weight": (4, 2), "lm_head.weight": (4, 2)}
CONFIG = {"num_attention_heads": 2, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}


def layout(**changes: tuple[int, ...] | None) -> tuple[Tensor, ...]:
    """Of the model with other shapes; None: without that weight."""
    shapes = {**SHAPES, **{name.replace("__", "."): shape for name, shape in changes.items()}}
    return tuple(Tensor(name, shape, 0, "bfloat16") for name, shape in shapes.items() if shape is not None)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for name, shape in SHAPES.items():  # of several files, as large models are
        save_file({name: np.zeros(shape, np.float16)}, tmp_path / f"{name}.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    ("theirs", "config", "words"),
    [
        (layout(), CONFIG, None),
        (layout()[::-1], {**CONFIG, "torch_dtype": "float32", "vocab": 9}, None),
        (layout(lm_head__weight=(4, 3)), CONFIG, "lm_head.weight is [4, 2] in the lent engine and [4, 3] in the run"),
        (layout(lm_head__weight=None), CONFIG, "the run has no lm_head.weight"),
        (layout(norm=(2,)), CONFIG, "the lent engine has no norm"),
        (
            (Tensor("embed.weight", (4, 2), 0, "float32"), layout()[1]),
            CONFIG,
            "computes in bfloat16, the run in float32",
        ),
        (
            layout(),
            {**CONFIG, "num_attention_heads": 1},
            "num_attention_heads of config.json is 2 in the lent engine and 1",
        ),
    ],
)
def test_what_differs_is_named(
    directory: Path, theirs: tuple[Tensor, ...], config: dict[str, Any], words: str | None
) -> None:
    found = RolloutModel.read(directory, "bfloat16").difference(theirs, config)
    assert found is None if words is None else found is not None and words in found


def test_a_tied_output_layer_is_none(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": True}))
    found = RolloutModel.read(directory, "bfloat16").difference(layout(), CONFIG)
    assert found is not None and "no lm_head.weight (its model ties this weight to the embeddings)" in found


@pytest.mark.parametrize("missing", ["config.json", "*.safetensors"])
def test_a_directory_that_is_none_of_a_model(directory: Path, missing: str) -> None:
    for path in directory.glob(missing):
        path.unlink()
    with pytest.raises(ValueError, match=f"holds no {missing.replace('*', '.')}"):
        RolloutModel.read(directory, "bfloat16")


def test_a_fifo_in_place_of_the_configuration_is_not_waited_for(directory: Path) -> None:
    (directory / "config.json").unlink()
    os.mkfifo(directory / "config.json")
    with pytest.raises(ValueError, match="holds no config"):
        RolloutModel.read(directory, "bfloat16")
