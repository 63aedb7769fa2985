# GLM-5 744B-A40B. Sourced; the last of repeated flags wins: MODEL_ARGS+=(--rotary-base 10000)
MODEL_ARGS=(
   --num-layers 78
   --hidden-size 6144
   --ffn-hidden-size 12288
   --num-attention-heads 64
   --vocab-size 154880
   --swiglu
   --disable-bias-linear
   --normalization RMSNorm
   --norm-epsilon 1e-5
   --qk-layernorm
   --use-rotary-position-embeddings
   --untie-embeddings-and-output-weights
   --multi-latent-attention
   --q-lora-rank 2048
   --kv-lora-rank 512
   --qk-head-dim 192
   --qk-pos-emb-head-dim 64
   --v-head-dim 256
   --num-experts 256
   --moe-ffn-hidden-size 2048
   --moe-router-topk 8
   --moe-layer-freq '[0]*3+[1]*75'
   --moe-shared-expert-intermediate-size 2048
   --moe-router-score-function sigmoid
   --moe-router-enable-expert-bias
   --moe-router-topk-scaling-factor 2.5
)
