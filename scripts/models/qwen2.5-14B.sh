# Qwen2.5 14B. Sourced; the last of repeated flags wins: MODEL_ARGS+=(--rotary-base 10000)
# No --norm-epsilon: base and instruct models differ in it, and config.json of --hf-checkpoint decides.
MODEL_ARGS=(
   --num-layers 48
   --hidden-size 5120
   --ffn-hidden-size 13824
   --num-attention-heads 40
   --group-query-attention
   --num-query-groups 8
   --kv-channels 128
   --vocab-size 152064
   --swiglu
   --disable-bias-linear
   --normalization RMSNorm
   --use-rotary-position-embeddings
   --rotary-base 1000000
   --add-qkv-bias
   --untie-embeddings-and-output-weights
)
