# Qwen2.5 72B. Sourced; the last of repeated flags wins: MODEL_ARGS+=(--rotary-base 10000)
# No --norm-epsilon: base and instruct models differ in it, and config.json of --hf-checkpoint decides.
MODEL_ARGS=(
   --num-layers 80
   --hidden-size 8192
   --ffn-hidden-size 29568
   --num-attention-heads 64
   --group-query-attention
   --num-query-groups 8
   --kv-channels 128
   --vocab-size 152064
   --swiglu
   --disable-bias-linear
   --add-qkv-bias
   --normalization RMSNorm
   --use-rotary-position-embeddings
   --rotary-base 1000000
   --untie-embeddings-and-output-weights
)
