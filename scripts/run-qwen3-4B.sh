#!/usr/bin/env bash
# GRPO for Qwen3-4B on one node with 8 GPUs, which trainer and engines share. Further flags are passed on and win.
#   ROOT=/data bash scripts/run-qwen3-4B.sh --num-rollout 100
# It has not been run yet. ROOT holds Qwen3-4B, Qwen3-4B_torch_dist, dapo-math-17k and aime-2024.
set -euo pipefail
cd "$(dirname "$0")/.."

ROOT=${ROOT:-/root}
export CUDA_DEVICE_MAX_CONNECTIONS=1  # for trainers; engines do not get it

source scripts/models/qwen3-4B.sh

CLUSTER_ARGS=(
   --actor-num-nodes 1
   --actor-num-gpus-per-node 8
   --colocate
)

CKPT_ARGS=(
   --hf-checkpoint "$ROOT/Qwen3-4B"
   --ref-load "$ROOT/Qwen3-4B_torch_dist"
   --load "$ROOT/Qwen3-4B_vime"  # starts from --ref-load until there is a checkpoint in it
   --save "$ROOT/Qwen3-4B_vime"
   --save-interval 20
)

ROLLOUT_ARGS=(
   --prompt-data "$ROOT/dapo-math-17k/dapo-math-17k.jsonl"
   --input-key prompt
   --label-key label
   --apply-chat-template
   --rollout-shuffle
   --rm-type deepscaler
   --num-rollout 3000
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --rollout-max-response-len 8192
   --rollout-temperature 1
   --global-batch-size 256  # = 32 x 8: one optimizer step a rollout
   --balance-data
)

EVAL_ARGS=(
   --eval-interval 20
   --eval-prompt-data aime "$ROOT/aime-2024/aime-2024.jsonl"
   --n-samples-per-eval-prompt 16
   --eval-max-response-len 16384
   --eval-top-p 1
)

GRPO_ARGS=(
   --advantage-estimator grpo
   --use-kl-loss
   --kl-loss-coef 0.00  # only watched
   --kl-loss-type low_var_kl
   --entropy-coef 0.00
   --eps-clip 0.2
   --eps-clip-high 0.28
)

PERF_ARGS=(
   --tensor-model-parallel-size 2
   --sequence-parallel
   --pipeline-model-parallel-size 1
   --context-parallel-size 1
   --recompute-granularity full
   --recompute-method uniform
   --recompute-num-layers 1
   --use-dynamic-batch-size
   --max-tokens-per-gpu 9216
)

OPTIMIZER_ARGS=(
   --optimizer adam
   --lr 1e-6
   --lr-decay-style constant
   --weight-decay 0.1
   --adam-beta1 0.9
   --adam-beta2 0.98
)

VLLM_ARGS=(
   --rollout-num-gpus-per-engine 2
   --vllm-gpu-memory-utilization 0.7
)

exec "${PYTHON:-python3}" train.py \
   "${MODEL_ARGS[@]}" \
   "${CLUSTER_ARGS[@]}" \
   "${CKPT_ARGS[@]}" \
   "${ROLLOUT_ARGS[@]}" \
   "${EVAL_ARGS[@]}" \
   "${GRPO_ARGS[@]}" \
   "${PERF_ARGS[@]}" \
   "${OPTIMIZER_ARGS[@]}" \
   "${VLLM_ARGS[@]}" \
   "$@"
