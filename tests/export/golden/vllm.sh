# Qwen/Qwen3-14B on 2 x 8 A800: 8 GPUs train, 8 generate, 0 idle.
# Written by libra export --for vllm. The plan routes by cmlfq.
# Run each engine's line in its own shell: the engine serves until it is stopped.
# on a800-0: contexts of up to 8,192 tokens
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 vllm serve Qwen/Qwen3-14B --tensor-parallel-size 8 --max-num-seqs 512 --max-num-batched-tokens 8192 --max-model-len 8192 --gpu-memory-utilization 0.9 --port 8000
