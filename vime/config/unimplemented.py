"""Flags of vime that this version does not implement. Each is refused by name, never accepted silently."""

from __future__ import annotations

from collections.abc import Mapping

_LATER = ""
_WHOLE = "a weight sync carries all weights: --update-weight-mode full"
_ENGINES = "vime starts its engines, all of one kind: --rollout-num-gpus, --rollout-num-gpus-per-engine"

UNIMPLEMENTED: Mapping[str, str] = {
    # training
    "log-probs-chunk-size": "log-probs are always computed in blocks of bounded size",
    "balance-by-flops": "--balance-data spreads samples by their tokens",
    "data-pad-size-multiplier": "packs are filled up only to what tensor and context parallelism need",
    "async-save": _LATER,
    "release-train": _LATER,
    "use-rollout-entropy": _LATER,
    "pg-loss-type": _LATER,
    "model-name": "config.json of --hf-checkpoint says which model it is",
    # prompts
    "multimodal-keys": "prompts are texts",
    "disable-rollout-global-dataset": "prompts from elsewhere come by --data-source-path",
    # engines
    "vllm-config": _LATER,
    "vllm-enable-deterministic-inference": _LATER,
    "prefill-num-servers": _ENGINES,
    "rollout-external-engine-addrs": _ENGINES,
    "update-weight-delta-encoding": _WHOLE,
    "update-weight-delta-checksum": _WHOLE,
    "update-weight-delta-local-checkpoint-dir": _WHOLE,
    # watching
    "load-debug-rollout-data-subsample": _LATER,
    "save-debug-train-data": _LATER,
    "dump-details": _LATER,
    "profile-target": _LATER,
    "memory-recorder": "the metrics memory/... tell what holds how much",
    "log-reward-category": _LATER,
    "log-correct-samples": _LATER,
    "http-proxy": _LATER,
}
"""Names without the leading dashes, and what there is instead; no pattern, so that a misspelt one still meets the
nearest-name search."""


def refusal(name: str) -> str | None:
    """Why a flag cannot be given; None of one that is not in the table."""
    bare = name if name in UNIMPLEMENTED else name.removeprefix("no-")
    if bare not in UNIMPLEMENTED:
        return None
    reason = UNIMPLEMENTED[bare]
    return f"--{name} is a flag of vime, but this version does not implement it{f': {reason}' if reason else ' yet'}"
