"""A model that follows a script, in the place of verl's rollout servers, and what an agent loop of verl needs.

The model calls the tool `double` until its prompt holds three returns of it, then answers.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from omegaconf import OmegaConf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.rollout.replica import TokenOutput

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "|{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
CALL = '<tool_call>{"name": "%s", "arguments": %s}</tool_call>|'


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte."""
    bytes_of = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({byte: number for number, byte in enumerate(bytes_of)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="|", pad_token="~", chat_template=TEMPLATE, clean_up_tokenization_spaces=False
    )


def config() -> Any:
    """The keys of verl that its client and its agent loops read."""
    rollout = {
        "name": "vllm",
        "full_determinism": False,
        "prompt_length": 4096,
        "response_length": 4096,
        "multi_turn": {
            "max_user_turns": 8,
            "max_assistant_turns": 8,
            "max_parallel_calls": 1,
            "max_tool_response_length": 100,
            "tool_response_truncate_side": "right",
            "format": "hermes",
        },
    }
    return OmegaConf.create(
        {"actor_rollout_ref": {"rollout": rollout}, "data": {}, "async_training": {"partial_rollout": True}}
    )


def loop_parts(server_manager: Any) -> dict[str, Any]:
    """The arguments with which verl makes an agent loop."""
    from verl.experimental.agent_loop.agent_loop import DictConfigWrap

    return {
        "trainer_config": DictConfigWrap(config()),
        "server_manager": server_manager,
        "tokenizer": tokenizer(),
        "processor": None,
        "dataset_cls": RLHFDataset,
        "data_config": DictConfigWrap(OmegaConf.create({})),
    }


@ray.remote(num_cpus=0, max_concurrency=64)
class ScriptedServer:
    """verl's rollout server. From `abort` on, each turn ends at once with half of its tokens."""

    def __init__(self, tool: str = "double", seconds: float = 0.0) -> None:
        self._tokenizer, self._tool, self._seconds = tokenizer(), tool, seconds
        self._aborted = asyncio.Event()

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        text = self._tokenizer.decode(prompt_ids)
        turn, _, said = text.rpartition("<assistant>")
        returns = turn.count("<tool>")
        reply = CALL % (self._tool, json.dumps({"number": returns})) if returns < 3 else "the end|"
        rest = self._tokenizer.encode(reply[len(said) :])  # an aborted turn goes on after what it said
        try:
            await asyncio.wait_for(self._aborted.wait(), self._seconds)
        except TimeoutError:
            return self._output(rest, "completed")
        return self._output(rest[: len(rest) // 2], "aborted")

    async def abort(self) -> None:
        self._aborted.set()

    def _output(self, ids: list[int], reason: str) -> TokenOutput:
        return TokenOutput(
            token_ids=ids, log_probs=[-1.0] * len(ids), stop_reason=reason, extra_fields={"global_steps": 4}
        )


@contextmanager
def ray_here() -> Iterator[None]:
    """A cluster of this machine, whose workers find what this process finds."""
    path = os.pathsep.join(filter(None, sys.path))
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": path}})
    try:
        yield
    finally:
        ray.shutdown()


def router_file(folder: Path, **keys: Any) -> str:
    """The path of a file for `router_config_path`."""
    path = folder / "router.yaml"
    path.write_text(json.dumps({"router_class": "libra.integrations.verl.Router", **keys}))
    return str(path)
