# GLM-4.5 355B-A32B. Sourced; the last of repeated flags wins: MODEL_ARGS+=(--rotary-base 10000)
MODEL_ARGS=(
   --num-layers 92
   --hidden-size 5120
   --ffn-hidden-size 12288
   --num-attention-heads 96
   --group-query-attention
   --num-query-groups 8
   --kv-channels 128
   --vocab-size 151552
   --swiglu
   --disable-bias-linear
   --add-qkv-bias
   --normalization RMSNorm
   --norm-epsilon 1e-5
   --qk-layernorm
   --use-rotary-position-embeddings
   --rotary-base 1000000
   --rotary-percent 0.5
   --untie-embeddings-and-output-weights
   --num-experts 160
   --moe-ffn-hidden-size 1536
   --moe-router-topk 8
   --moe-layer-freq '[0]*3+[1]*89'
   --moe-shared-expert-intermediate-size 1536
   --moe-router-score-function sigmoid
   --moe-router-enable-expert-bias
   --moe-router-topk-scaling-factor 2.5
)
