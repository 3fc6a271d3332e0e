# Qwen/Qwen3-14B on 2 x 8 A800: 8 GPUs train, 8 generate, 0 idle.
# Written by libra export --for areal. The plan routes by round-robin.
PLAN_ARGS=(
  cluster.n_nodes=2
  cluster.n_gpus_per_node=8
  rollout.backend=sglang:d1t8
  actor.backend=fsdp:d4p1t1c2
  rollout.max_head_offpolicyness=1
  train_dataset.batch_size=8
  gconfig.n_samples=8
  actor.path=Qwen/Qwen3-14B
  actor.ppo_n_minibatches=1
  actor.mb_spec.max_tokens_per_mb=8192
  actor.gradient_checkpointing=false
  sglang.context_length=8192
  sglang.max_running_requests=512
  sglang.mem_fraction_static=0.9
)
# python3 YOUR_SCRIPT.py --config YOUR_CONFIG.yaml "${PLAN_ARGS[@]}"
