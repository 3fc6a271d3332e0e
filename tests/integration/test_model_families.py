"""Models in Hugging Face layout, by family and with or without tied embeddings: engines and trainers agree on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from arithmetic import LOGPROB_GAP, PRECISION
from real_workers import start_engine, start_trainer
from shared_fork_server import SharedForkServer

from libra.backends.launch.handle import Handle
from libra.backends.transport.engine_messages import Generate, LoadWeights, Piece
from libra.backends.transport.trainer_messages import Commit, Reduced, Sample, Score, Scored, Train, Trained
from libra.backends.vllm.engine_handle import EngineHandle

pytestmark = pytest.mark.integration

PROMPT, TOKENS = [5, 6, 7, 8, 9, 10, 11], 24
SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}


def saved_model(directory: Path, family: str, tied: bool) -> Path:
    """A model with random weights, as transformers saves it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SHAPE, tie_word_embeddings=tied))
    model.save_pretrained(directory)
    return directory


def samples() -> list[Sample]:
    made = []
    for index in range(6):
        length = 8 + 5 * index
        tokens = [4 + (3 * index + 5 * position) % 50 for position in range(length)]
        own = [position >= 3 for position in range(length)]
        made.append(Sample(str(index), tokens, own, [-2.0] * length, [0] * length, 1.0 if index % 2 else -0.7))
    return made


async def turn(engine: EngineHandle, name: str) -> tuple[list[int], list[float]]:
    pieces: list[Piece] = []
    await engine.generate(Generate(name, PROMPT, TOKENS, 1.0, -1, 0, salt=name), pieces.append)
    return [token for it in pieces for token in it.tokens], [value for it in pieces for value in it.logprobs]


@pytest.mark.parametrize(("family", "tied"), [("qwen3", True), ("llama", True), ("llama", False)])
async def test_engine_and_trainer_agree_on_a_saved_model(
    fork_server: SharedForkServer, tmp_path: Path, family: str, tied: bool
) -> None:
    """After each step they agree within what their arithmetic rounds; the engine's last version differs by more."""
    model, batch = saved_model(tmp_path / "model", family, tied), samples()
    async with fork_server.open() as launcher:
        trainer = Handle(await launcher.spawn("trainer", 0), lambda name, why: None)
        ready = await trainer.start(start_trainer(model, 0))
        assert ("lm_head.weight" in {each.name for each in ready.layout}) != tied
        engine = EngineHandle(await launcher.spawn("engine", 1), lambda name, why: None)
        await engine.start(start_engine(model, ready))
        for version in range(1, 4):
            order = Train(version, batch, len(batch), sum(sum(it.generated) for it in batch), 60.0)
            await trainer.ask(order, Reduced)
            done = await trainer.ask(Commit(version, version % 2), Trained)
            old, of_old = await turn(engine, f"old-{version}")
            await engine.load(LoadWeights(version, version % 2, done.checksum))
            new, of_new = await turn(engine, f"new-{version}")
            scored = await trainer.ask(Score([PROMPT + old, PROMPT + new]), Scored)
            wanted = [each[len(PROMPT) - 1 :] for each in scored.logprobs]
            gaps = [
                max(abs(a - b) for a, b in zip(own, other, strict=True))
                for own, other in zip((of_old, of_new), wanted, strict=True)
            ]
            assert gaps[1] < LOGPROB_GAP[PRECISION] < gaps[0]
