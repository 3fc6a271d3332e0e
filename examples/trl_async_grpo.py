"""TRL's AsyncGRPO over vLLM servers behind one gateway, which learns how long trajectories become.

libra route --engine URL --engine URL --log trajectories.jsonl     # before servers with VLLM_SERVER_DEV_MODE=1
python examples/trl_async_grpo.py MODEL http://127.0.0.1:9000 100   # a directory that servers read, too; steps
"""

import sys

import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from libra.environments.calculator import Calculator
from libra.integrations.trl import FleetWeights, LibraRolloutWorker


class Arithmetic:
    """An environment of TRL: its public methods are tools."""

    def reset(self, **row: object) -> None:
        pass

    async def calculator(self, argument: str) -> str:
        """Compute one operation.

        Args:
            argument: such as 12+34
        """
        return await Calculator().calculate(argument)


def right(completions: list, answer: list, **_: object) -> list[float]:
    """1 for the answer, 0.1 for another one, 0 for none."""
    said = [str(each[-1].get("content", "")).rstrip(";") for each in completions]
    return [1.0 if s == f"A{a}" else 0.1 * s.startswith("A") for s, a in zip(said, answer, strict=True)]


def main(model: str, gateway: str, steps: int) -> None:
    tokenizer, cpu = AutoTokenizer.from_pretrained(model), not torch.cuda.is_available()
    prompts = Calculator().prompts("train", 256, seed=1)
    rows = [{"prompt": [{"role": "user", "content": each.text}], "answer": each.answer} for each in prompts]
    dataset, given = Dataset.from_list(rows), {"max_tool_calling_iterations": 4, "num_generations": 4}
    config = AsyncGRPOConfig(
        "runs/trl", vllm_server_base_url=gateway, max_steps=steps, per_device_train_batch_size=16, max_staleness=2,
        max_inflight_tasks=16, max_completion_length=16, token_budget=2048, logging_steps=1, report_to="none",
        save_strategy="no", use_cpu=cpu, bf16=not cpu, dtype="float32" if cpu else "bfloat16",
        gradient_accumulation_steps=1, gradient_checkpointing=False, learning_rate=1e-4, **given,
    )  # fmt: skip
    worker = LibraRolloutWorker(
        model_name=model, dataset=dataset, reward_funcs=[right], processing_class=tokenizer,
        eos_token_ids=[tokenizer.eos_token_id], environment_factory=Arithmetic, max_inflight_tasks=16,
        queue_maxsize=64, vllm_server_url=gateway, max_tokens=16, **given,
    )  # fmt: skip
    AsyncGRPOTrainer(
        model=model, args=config, reward_funcs=[right], train_dataset=dataset, processing_class=tokenizer,
        environment_factory=Arithmetic, rollout_worker=worker, weight_transfer=FleetWeights(gateway, "runs/weights"),
    ).train()  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
