"""What others (TRL, transformers, verl, OpenRLHF, Megatron-LM) call things that have a flag of another name here."""

from __future__ import annotations

from collections.abc import Mapping

_MODEL = ("hf-checkpoint",)
_BATCH = ("rollout-batch-size", "global-batch-size")
_LR = ("lr",)
_SAMPLES = ("n-samples-per-prompt",)
_LENGTH = ("rollout-max-response-len",)
_PROMPT_LENGTH = ("rollout-max-prompt-len",)
_CONTEXT = ("rollout-max-context-len",)
_DATA = ("prompt-data",)
_SAVE = ("save",)
_EPOCHS = ("num-epoch", "num-rollout")
_KL = ("kl-loss-coef", "kl-coef")
_REWARD = ("rm-type", "custom-rm-path")

USUAL: Mapping[str, tuple[str, ...]] = {
    # the model
    "model": _MODEL,
    "model-path": _MODEL,
    "model-name-or-path": _MODEL,
    "pretrain": _MODEL,
    "hf-model": _MODEL,
    "tokenizer": _MODEL,
    "ref-model": ("ref-load",),
    "dtype": ("bf16", "fp16", "fp32"),
    # batches
    "batch-size": _BATCH,
    "train-batch-size": _BATCH,
    "ppo-mini-batch-size": ("global-batch-size",),
    "mini-batch-size": ("global-batch-size",),
    "gradient-accumulation-steps": ("global-batch-size",),
    "micro-train-batch-size": ("micro-batch-size",),
    "per-device-train-batch-size": ("micro-batch-size",),
    "ppo-max-token-len-per-gpu": ("max-tokens-per-gpu",),
    # the optimizer
    "learning-rate": _LR,
    "actor-learning-rate": _LR,
    "critic-learning-rate": ("critic-lr",),
    "lr-scheduler": ("lr-decay-style",),
    "lr-scheduler-type": ("lr-decay-style",),
    "warmup-steps": ("lr-warmup-iters",),
    "warmup-ratio": ("lr-warmup-fraction",),
    "max-grad-norm": ("clip-grad",),
    "grad-clip": ("clip-grad",),
    "gradient-checkpointing": ("recompute-granularity",),
    # prompts and answers
    "dataset": _DATA,
    "dataset-name": _DATA,
    "data": _DATA,
    "data-path": _DATA,
    "train-files": _DATA,
    "prompt-key": ("input-key",),
    "answer-key": ("label-key",),
    "val-files": ("eval-prompt-data",),
    "eval-data": ("eval-prompt-data",),
    "eval-steps": ("eval-interval",),
    "num-generations": _SAMPLES,
    "n-samples": _SAMPLES,
    "group-size": _SAMPLES,
    "max-new-tokens": _LENGTH,
    "max-tokens": _LENGTH,
    "generate-max-len": _LENGTH,
    "max-response-length": _LENGTH,
    "max-completion-length": _LENGTH,
    "max-prompt-length": _PROMPT_LENGTH,
    "prompt-max-len": _PROMPT_LENGTH,
    "max-length": _CONTEXT,
    "max-model-len": ("vllm-max-model-len",),
    "gpu-memory-utilization": ("vllm-gpu-memory-utilization",),
    "temperature": ("rollout-temperature",),
    "top-p": ("rollout-top-p",),
    "top-k": ("rollout-top-k",),
    "stop": ("rollout-stop",),
    "reward": _REWARD,
    "reward-fn": _REWARD,
    "reward-funcs": _REWARD,
    "reward-model": _REWARD,
    # the algorithm
    "algorithm": ("advantage-estimator",),
    "algo": ("advantage-estimator",),
    "adv-estimator": ("advantage-estimator",),
    "beta": _KL,
    "init-kl-coef": _KL,
    "clip-range": ("eps-clip",),
    "clip-ratio": ("eps-clip",),
    "cliprange": ("eps-clip",),
    "epsilon": ("eps-clip",),
    "lam": ("lambd",),
    "entropy-coeff": ("entropy-coef",),
    # the run
    "epochs": _EPOCHS,
    "num-epochs": _EPOCHS,
    "num-train-epochs": _EPOCHS,
    "total-epochs": _EPOCHS,
    "max-steps": ("num-rollout",),
    "num-steps": ("num-rollout",),
    "output-dir": _SAVE,
    "save-path": _SAVE,
    "ckpt-path": _SAVE,
    "save-steps": ("save-interval",),
    "save-freq": ("save-interval",),
    "resume-from-checkpoint": ("load",),
    "nnodes": ("actor-num-nodes",),
    "num-gpus": ("actor-num-gpus-per-node", "rollout-num-gpus"),
    "n-gpus-per-node": ("actor-num-gpus-per-node",),
    "tp": ("tensor-model-parallel-size",),
    "tensor-parallel-size": ("tensor-model-parallel-size", "rollout-num-gpus-per-engine"),
    "report-to": ("use-wandb", "tensorboard-dir"),
    "wandb": ("use-wandb",),
}
"""Names without dashes in front, on both sides."""
