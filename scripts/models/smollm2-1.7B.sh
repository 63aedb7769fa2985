# SmolLM2 1.7B. Sourced; the last of repeated flags wins: MODEL_ARGS+=(--rotary-base 10000)
MODEL_ARGS=(
   --num-layers 24
   --hidden-size 2048
   --ffn-hidden-size 8192
   --num-attention-heads 32
   --num-query-groups 32
   --kv-channels 64
   --vocab-size 49152
   --swiglu
   --disable-bias-linear
   --normalization RMSNorm
   --norm-epsilon 1e-5
   --use-rotary-position-embeddings
   --rotary-base 130000
)
