"""Files, engine lines and arguments for TRL's AsyncGRPO: accelerate.yaml, gateway.yaml and `AsyncGRPOConfig`.

Keys: TRL 1.16.0, `trl/experimental/async_grpo/async_grpo_config.py` and `trl/accelerate_configs/fsdp2.yaml`, whose keys
are accelerate's (1.15). The trainer uses one URL. It needs the engines' control endpoints (VLLM_SERVER_DEV_MODE) and
weight transfer by NCCL, as in `docs/source/async_grpo_trainer.md`.
"""

from __future__ import annotations

import yaml

from libra.export.gateway_file import gateway_file
from libra.export.serve_line import Flag, script, serve_lines
from libra.export.shell import file
from libra.export.split import DeviceSplit

_GATEWAY = "http://GATEWAY:9000"


def emit(split: DeviceSplit) -> str:
    """A script of bash: two files, the engines' lines, and the arguments of `AsyncGRPOConfig` as a comment."""
    transfer: dict[str, Flag] = {"weight-transfer-config": {"backend": "nccl"}, "logprobs-mode": "processed_logprobs"}
    lines = serve_lines(split, {"VLLM_SERVER_DEV_MODE": "1"}, transfer)
    accelerate = yaml.safe_dump(_accelerate(split), sort_keys=False)
    gateway = yaml.safe_dump(gateway_file(lines, split.recipe.router), sort_keys=False, width=120)
    arguments = "".join(f"#   {key}={value!r},\n" for key, value in config(split).items())
    return (
        file("accelerate.yaml", accelerate)
        + file("gateway.yaml", gateway)
        + script(lines)
        + "# libra route gateway.yaml\n"
        + "# accelerate launch --config_file accelerate.yaml train.py, where train.py has AsyncGRPOConfig(\n"
        + f"{arguments}# )\n"
    )


def config(split: DeviceSplit) -> dict[str, object]:
    """Arguments of `AsyncGRPOConfig` that the plan sets."""
    recipe, layout = split.recipe, split.layout
    return {
        "vllm_server_base_url": _GATEWAY,
        "num_generations": recipe.samples_per_prompt,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": recipe.batch // layout.dp,
        "token_budget": max(layout.micro_tokens, recipe.max_length),
        "gradient_checkpointing": layout.recompute != "none",
        "max_staleness": recipe.staleness,
        "max_inflight_tasks": recipe.concurrency or recipe.batch * (1 + recipe.staleness),
        "weight_sync_steps": 1,
    }


def _accelerate(split: DeviceSplit) -> dict[str, object]:
    nodes, _ = split.train_shape
    own = sorted(gpu for replica in split.replicas for gpu in replica.gpus)
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": split.layout.sharding == "zero3",
            "fsdp_state_dict_type": "FULL_STATE_DICT",
            "fsdp_cpu_ram_efficient_loading": True,
        },
        "mixed_precision": split.recipe.dtype if split.recipe.dtype != "fp32" else "no",
        "num_machines": nodes,
        "num_processes": split.train_gpus,
        # A single node is divided by GPUs; several nodes are divided as whole nodes.
        **({"gpu_ids": ",".join(map(str, own))} if split.nodes == 1 else {}),
        "machine_rank": 0,
        "rdzv_backend": "static",
        "main_training_function": "main",
    }
