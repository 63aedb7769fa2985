# GLM-4.5-Air 106B-A12B. Sourced; the last of repeated flags wins: MODEL_ARGS+=(--rotary-base 10000)
MODEL_ARGS=(
   --num-layers 46
   --hidden-size 4096
   --ffn-hidden-size 10944
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
   --use-rotary-position-embeddings
   --rotary-base 1000000
   --rotary-percent 0.5
   --untie-embeddings-and-output-weights
   --num-experts 128
   --moe-ffn-hidden-size 1408
   --moe-router-topk 8
   --moe-layer-freq '[0]*1+[1]*45'
   --moe-shared-expert-intermediate-size 1408
   --moe-router-score-function sigmoid
   --moe-router-enable-expert-bias
)
