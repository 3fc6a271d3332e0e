# Qwen/Qwen3-14B on 2 x 8 A800: 8 GPUs train, 8 generate, 0 idle.
# Written by libra export --for verl. The plan routes by least-loaded.
PLAN_ARGS=(
  --config-name=fully_async_ppo_trainer
  trainer.nnodes=1
  trainer.n_gpus_per_node=8
  rollout.nnodes=1
  rollout.n_gpus_per_node=8
  rollout.n=8
  data.train_batch_size=0
  data.gen_batch_size=1
  actor_rollout_ref.hybrid_engine=false
  actor_rollout_ref.model.path=Qwen/Qwen3-14B
  actor_rollout_ref.model.enable_gradient_checkpointing=false
  actor_rollout_ref.rollout.tensor_model_parallel_size=8
  actor_rollout_ref.rollout.n=8
  actor_rollout_ref.rollout.gpu_memory_utilization=0.9
  actor_rollout_ref.rollout.max_num_seqs=512
  actor_rollout_ref.rollout.max_num_batched_tokens=8192
  actor_rollout_ref.rollout.max_model_len=8192
  actor_rollout_ref.actor.ppo_mini_batch_size=8
  actor_rollout_ref.actor.use_dynamic_bsz=true
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096
  actor_rollout_ref.actor.strategy=fsdp2
  actor_rollout_ref.actor.fsdp_config.fsdp_size=-1
  actor_rollout_ref.actor.fsdp_config.reshard_after_forward=true
  actor_rollout_ref.actor.ulysses_sequence_parallel_size=2
  actor_rollout_ref.actor.entropy_from_logits_with_chunking=false
  async_training.staleness_threshold=1.0
  async_training.trigger_parameter_sync_step=1
  async_training.require_batches=1
  async_training.partial_rollout=true
)
# python3 -m verl.experimental.fully_async_policy.fully_async_main "${PLAN_ARGS[@]}" with your model's, data's and reward's overrides
