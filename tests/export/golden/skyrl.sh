# Qwen/Qwen3-14B on 2 x 8 A800: 8 GPUs train, 8 generate, 0 idle.
# Written by libra export --for skyrl. The plan routes by sticky.
PLAN_ARGS=(
  trainer.placement.colocate_all=false
  trainer.placement.policy_num_nodes=1
  trainer.placement.policy_num_gpus_per_node=8
  trainer.policy.model.path=Qwen/Qwen3-14B
  trainer.strategy=fsdp
  trainer.policy.sequence_parallel_size=2
  trainer.policy.fsdp_config.reshard_after_forward=true
  trainer.gradient_checkpointing=false
  trainer.max_tokens_per_microbatch=8192
  trainer.train_batch_size=8
  trainer.policy_mini_batch_size=8
  generator.n_samples_per_prompt=8
  generator.inference_engine.num_engines=1
  generator.inference_engine.tensor_parallel_size=8
  generator.inference_engine.max_num_seqs=512
  generator.inference_engine.max_num_batched_tokens=8192
  generator.inference_engine.gpu_memory_utilization=0.9
  trainer.fully_async.enabled=true
  trainer.fully_async.max_staleness_steps=1
  trainer.fully_async.num_parallel_generation_workers=16
)
# give "${PLAN_ARGS[@]}" to your entry point, as examples/train/fully_async does
