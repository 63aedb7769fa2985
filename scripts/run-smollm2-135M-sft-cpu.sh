#!/usr/bin/env bash
# Supervised fine-tuning of SmolLM2-135M-Instruct on two CPU cores: the labels of the arithmetic task are the answers, and
# the loss on operand pairs that it never saw is evaluated. Further flags are passed on and win.
#   bash scripts/run-smollm2-135M-sft-cpu.sh --num-epoch 3
set -euo pipefail
cd "$(dirname "$0")/.."

MODEL=${MODEL:-models/SmolLM2-135M-Instruct}
TASK=${TASK:-data/arithmetic}
RUN=${RUN:-runs/smollm2-135M-sft-$(date +%Y%m%d-%H%M%S)}

CKPT_ARGS=(
   --hf-checkpoint "$MODEL"
   --save "$RUN"
)
SFT_ARGS=(
   --loss-type sft_loss
   --calculate-per-token-loss
   --prompt-data "$TASK/train.jsonl"
   --input-key prompt
   --label-key label
   --rollout-shuffle
   --num-epoch 4
   --rollout-batch-size 14
)
EVAL_ARGS=(
   --eval-interval 8
   --eval-prompt-data held-out "$TASK/eval.jsonl"
)
PERF_ARGS=(
   --actor-num-gpus-per-node 1
   --use-dynamic-batch-size
   --max-tokens-per-gpu 4096
)
OPTIMIZER_ARGS=(
   --optimizer adam
   --lr 3e-5
   --lr-decay-style cosine
   --weight-decay 0.0
   --adam-beta1 0.9
   --adam-beta2 0.98
)

exec "${PYTHON:-.venv/bin/python}" train.py "${CKPT_ARGS[@]}" "${SFT_ARGS[@]}" "${EVAL_ARGS[@]}" "${PERF_ARGS[@]}" \
   "${OPTIMIZER_ARGS[@]}" "$@"
