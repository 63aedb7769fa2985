# Qwen3 30B-A3B. Sourced; the last of repeated flags wins: MODEL_ARGS+=(--rotary-base 10000)
MODEL_ARGS=(
   --num-layers 48
   --hidden-size 2048
   --ffn-hidden-size 6144
   --num-attention-heads 32
   --group-query-attention
   --num-query-groups 4
   --kv-channels 128
   --vocab-size 151936
   --swiglu
   --disable-bias-linear
   --normalization RMSNorm
   --norm-epsilon 1e-6
   --qk-layernorm
   --use-rotary-position-embeddings
   --rotary-base 1000000
   --untie-embeddings-and-output-weights
   --num-experts 128
   --moe-ffn-hidden-size 768
   --moe-router-topk 8
   --moe-layer-freq 1
   --moe-router-score-function softmax
)
