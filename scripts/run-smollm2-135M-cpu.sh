#!/usr/bin/env bash
# GRPO on SmolLM2-135M-Instruct, on two CPU cores: the demo. Further flags are passed on and win.
#   bash scripts/run-smollm2-135M-cpu.sh --num-rollout 30
set -euo pipefail
cd "$(dirname "$0")/.."

MODEL=${MODEL:-models/SmolLM2-135M-Instruct}
TASK=${TASK:-data/arithmetic}
RUN=${RUN:-runs/smollm2-135M-$(date +%Y%m%d-%H%M%S)}

CLUSTER_ARGS=(
   --actor-num-gpus-per-node 1
   --colocate
)
CKPT_ARGS=(
   --hf-checkpoint "$MODEL"
   --save "$RUN"
)
ROLLOUT_ARGS=(
   --prompt-data "$TASK/train.jsonl"
   --input-key prompt
   --label-key label
   --apply-chat-template
   --rollout-shuffle
   --rm-type last_number
   --num-rollout 24
   --rollout-batch-size 8
   --n-samples-per-prompt 8
   --rollout-max-response-len 8
   --rollout-temperature 1
   --global-batch-size 64
)
EVAL_ARGS=(
   --eval-interval 24
   --eval-config scripts/eval-arithmetic.yaml
)
GRPO_ARGS=(
   --advantage-estimator grpo
   --eps-clip 0.2
   --eps-clip-high 0.28
)
PERF_ARGS=(
   --use-dynamic-batch-size
   --max-tokens-per-gpu 4096
)
OPTIMIZER_ARGS=(
   --optimizer adam
   --lr 3e-5
   --lr-decay-style constant
   --weight-decay 0.0
   --adam-beta1 0.9
   --adam-beta2 0.98
)
VLLM_ARGS=(
   --vllm-max-model-len 256
   --vllm-max-num-seqs 64
)

exec .venv/bin/python train.py \
   "${CLUSTER_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" "${GRPO_ARGS[@]}" \
   "${PERF_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${VLLM_ARGS[@]}" "$@"
