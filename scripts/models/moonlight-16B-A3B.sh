# Moonlight 16B-A3B. Sourced; the last of repeated flags wins: MODEL_ARGS+=(--rotary-base 10000)
MODEL_ARGS=(
   --num-layers 27
   --hidden-size 2048
   --ffn-hidden-size 11264
   --num-attention-heads 16
   --vocab-size 163840
   --swiglu
   --disable-bias-linear
   --normalization RMSNorm
   --norm-epsilon 1e-5
   --qk-layernorm
   --use-rotary-position-embeddings
   --rotary-base 50000
   --untie-embeddings-and-output-weights
   --multi-latent-attention
   --kv-lora-rank 512
   --qk-head-dim 128
   --qk-pos-emb-head-dim 64
   --v-head-dim 128
   --num-experts 64
   --moe-ffn-hidden-size 1408
   --moe-router-topk 6
   --moe-layer-freq '[0]*1+[1]*26'
   --moe-shared-expert-intermediate-size 2816
   --moe-router-score-function sigmoid
   --moe-router-enable-expert-bias
   --moe-router-topk-scaling-factor 2.446
)
