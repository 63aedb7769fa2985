"""Flags of vime that this version does not implement yet. Each is refused by name, never accepted silently."""

from __future__ import annotations

_BY_TOPIC = {
    "memory": "recompute-loss-function log-probs-chunk-size qkv-format "
    "balance-by-flops data-pad-size-multiplier async-save release-train",
    "data": "multimodal-keys disable-rollout-global-dataset",
    "algorithms": "use-rollout-entropy pg-loss-type",
    "training hooks": "model-name",
    "engines": "vllm-config vllm-enable-deterministic-inference vllm-weight-sync-packed prefill-num-servers "
    "rollout-external-engine-addrs",
    "watching": "load-debug-rollout-data-subsample save-debug-train-data dump-details check-weight-update-equal "
    "profile-target memory-recorder wandb-always-use-train-step log-reward-category "
    "log-correct-samples http-proxy",
    "weight updates": "update-weight-delta-encoding update-weight-delta-checksum "
    "update-weight-delta-local-checkpoint-dir",
}

UNIMPLEMENTED = frozenset(name for names in _BY_TOPIC.values() for name in names.split())
"""Names without the leading dashes; no pattern, so that a misspelt one still meets the nearest-name search."""
