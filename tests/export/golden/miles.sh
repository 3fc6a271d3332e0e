# Qwen/Qwen3-14B on 2 x 8 A800: 8 GPUs train, 8 generate, 0 idle.
# Written by libra export --for miles. The plan routes by least-loaded.
cat > sglang.yaml <<'END'
sglang:
- name: actor
  update_weights: true
  server_groups:
  - worker_type: regular
    num_gpus: 8
    num_gpus_per_engine: 8
    overrides: {max_running_requests: 512, context_length: 8192}
END
PLAN_ARGS=(
  --actor-num-nodes 1 --actor-num-gpus-per-node 8
  --rollout-num-gpus 8 --num-gpus-per-node 8
  --sglang-config sglang.yaml --sglang-mem-fraction-static 0.9
  --rollout-batch-size 8 --n-samples-per-prompt 8
  --global-batch-size 64 --rollout-max-context-len 8192
  --tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --context-parallel-size 1 --expert-model-parallel-size 1
  --sequence-parallel
  --use-distributed-optimizer
  --use-dynamic-batch-size --max-tokens-per-gpu 8192
  --recompute-granularity selective --recompute-modules layernorm
)
# python3 train_async.py "${PLAN_ARGS[@]}" with your model's, data's and optimiser's arguments
