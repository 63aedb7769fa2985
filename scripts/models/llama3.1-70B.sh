# Llama 3.1 70B. Sourced; the last of repeated flags wins: MODEL_ARGS+=(--rotary-base 10000)
MODEL_ARGS=(
   --num-layers 80
   --hidden-size 8192
   --ffn-hidden-size 28672
   --num-attention-heads 64
   --group-query-attention
   --num-query-groups 8
   --kv-channels 128
   --vocab-size 128256
   --swiglu
   --disable-bias-linear
   --normalization RMSNorm
   --norm-epsilon 1e-5
   --use-rotary-position-embeddings
   --rotary-base 500000
   --use-rope-scaling
   --rope-scaling-factor 8
   --untie-embeddings-and-output-weights
)
