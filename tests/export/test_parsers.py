"""The texts as parsers of the projects themselves read them, where these are installed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"


def serve_words(name: str) -> list[list[str]]:
    """Arguments of each `vllm serve` of a golden text."""
    commands = re.findall(r"^CUDA.* vllm serve (.*)$", (GOLDEN / name).read_text(encoding="utf-8"), re.MULTILINE)
    return [shlex.split(command) for command in commands]


@pytest.mark.parametrize("name", ["vllm.sh", "trl.sh"])
def test_vllm_reads_its_lines(name: str) -> None:
    pytest.importorskip("vllm")
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    lines = serve_words(name)
    assert lines
    for words in lines:
        read = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
        assert read.model_tag == "Qwen/Qwen3-14B"
        assert (read.max_num_batched_tokens, read.gpu_memory_utilization) == (8192, 0.9)


def test_accelerate_reads_its_file(tmp_path: Path) -> None:
    commands = pytest.importorskip("accelerate.commands.config.config_args")
    (body,) = re.findall(r"accelerate.yaml <<'END'\n(.*?)END\n", (GOLDEN / "trl.sh").read_text(), re.DOTALL)
    path = tmp_path / "accelerate.yaml"
    path.write_text(body)
    read = commands.load_config_from_file(str(path))
    assert (read.num_machines, read.num_processes, read.fsdp_config["fsdp_version"]) == (1, 8, 2)


def test_trl_takes_its_arguments() -> None:
    trl = pytest.importorskip("trl.experimental.async_grpo")
    arguments = (GOLDEN / "trl.sh").read_text().partition("AsyncGRPOConfig(\n")[2].replace("#", "")
    read = eval(f"config(output_dir='unused', use_cpu=True, bf16=False, {arguments}", {"config": trl.AsyncGRPOConfig})
    assert read.max_staleness == 1


def test_hydra_composes_the_overrides_of_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    verl = pytest.importorskip("verl")
    hydra = pytest.importorskip("hydra")
    root = Path(verl.__file__).parent
    monkeypatch.chdir(root.parent)  # Megatron's file looks for the others from here
    name, *overrides = shlex.split((GOLDEN / "verl.sh").read_text(), comments=True)[1:-1]
    with hydra.initialize_config_dir(str(root / "experimental/fully_async_policy/config"), version_base=None):
        read = hydra.compose(name.removeprefix("--config-name="), overrides)
    assert (read.trainer.nnodes, read.rollout.nnodes) == (1, 1)
