# GLM-4 9B (0414). Sourced; the last of repeated flags wins: MODEL_ARGS+=(--rotary-base 10000)
MODEL_ARGS=(
   --num-layers 40
   --hidden-size 4096
   --ffn-hidden-size 13696
   --num-attention-heads 32
   --group-query-attention
   --num-query-groups 2
   --kv-channels 128
   --vocab-size 151552
   --swiglu
   --disable-bias-linear
   --add-qkv-bias
   --normalization RMSNorm
   --post-self-attn-layernorm
   --post-mlp-layernorm
   --use-rotary-position-embeddings
   --rotary-base 10000
   --rotary-percent 0.5
   --rotary-interleaved
   --untie-embeddings-and-output-weights
)
