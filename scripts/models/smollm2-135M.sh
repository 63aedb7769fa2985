# SmolLM2 135M. Sourced; the last of repeated flags wins: MODEL_ARGS+=(--rotary-base 10000)
MODEL_ARGS=(
   --num-layers 30
   --hidden-size 576
   --ffn-hidden-size 1536
   --num-attention-heads 9
   --group-query-attention
   --num-query-groups 3
   --kv-channels 64
   --vocab-size 49152
   --swiglu
   --disable-bias-linear
   --normalization RMSNorm
   --norm-epsilon 1e-5
   --use-rotary-position-embeddings
   --rotary-base 100000
)
