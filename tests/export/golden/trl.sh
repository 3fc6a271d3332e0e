# Qwen/Qwen3-14B on 2 x 8 A800: 8 GPUs train, 8 generate, 0 idle.
# Written by libra export --for trl. The plan routes by cmlfq.
# The plan also assumes these settings, which are not in this file: recomputation of only norms and the gated product.
cat > accelerate.yaml <<'END'
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_cpu_ram_efficient_loading: true
mixed_precision: bf16
num_machines: 1
num_processes: 8
machine_rank: 0
rdzv_backend: static
main_training_function: main
END
cat > gateway.yaml <<'END'
engines:
- name: a800-0-8000
  url: http://a800-0:8000/v1
  max_model_len: 8192
  bucket: 0
limits:
- 8192
route: cmlfq
END
# Run each engine's line in its own shell: the engine serves until it is stopped.
# on a800-0: contexts of up to 8,192 tokens
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 VLLM_SERVER_DEV_MODE=1 vllm serve Qwen/Qwen3-14B --tensor-parallel-size 8 --max-num-seqs 512 --max-num-batched-tokens 8192 --max-model-len 8192 --gpu-memory-utilization 0.9 --weight-transfer-config '{"backend": "nccl"}' --logprobs-mode processed_logprobs --port 8000
# libra route gateway.yaml
# accelerate launch --config_file accelerate.yaml train.py, where train.py has AsyncGRPOConfig(
#   vllm_server_base_url='http://GATEWAY:9000',
#   num_generations=8,
#   per_device_train_batch_size=1,
#   gradient_accumulation_steps=8,
#   token_budget=8192,
#   gradient_checkpointing=True,
#   max_staleness=1,
#   max_inflight_tasks=128,
#   weight_sync_steps=1,
# )
