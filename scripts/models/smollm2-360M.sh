# SmolLM2 360M. Sourced; the last of repeated flags wins: MODEL_ARGS+=(--rotary-base 10000)
MODEL_ARGS=(
   --num-layers 32
   --hidden-size 960
   --ffn-hidden-size 2560
   --num-attention-heads 15
   --group-query-attention
   --num-query-groups 5
   --kv-channels 64
   --vocab-size 49152
   --swiglu
   --disable-bias-linear
   --normalization RMSNorm
   --norm-epsilon 1e-5
   --use-rotary-position-embeddings
   --rotary-base 100000
)
