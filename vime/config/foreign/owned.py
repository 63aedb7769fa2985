"""Foreign flags that vime decides itself, and what to use instead."""

from __future__ import annotations

from collections.abc import Mapping

_ENGINE_PORTS = "vime gives each engine a free port on its own"
_ENGINE_ADDRESS = "engines listen on loopback, or on the node's address in a cluster"
_ENGINE_WEIGHTS = "vime carries the weights itself"
_ENGINE_SLOTS = "the slots of an engine share its tensors: use --rollout-num-gpus-per-engine"
_PLACEMENT = "use --rollout-num-gpus and --rollout-num-gpus-per-engine"
_DISAGGREGATION = "separate prefill and decode servers are not supported by this version"
_SHARED_LAYOUT = "use --tensor-model-parallel-size and its kin"
_WINDOW = "attention is over the whole sample: no supported model has a window"
_CAPACITY = "no token is dropped: engines drop none either"
_ROUTES = "use --use-rollout-routing-replay"
_OBJECT = "no flag can give it: it is a Python object"

OWNED: Mapping[str, Mapping[str, str]] = {
    "vllm": {
        "model": "use --hf-checkpoint",
        "tokenizer": "use --hf-checkpoint",
        "served-model-name": "the model is served under the path of --hf-checkpoint",
        "tensor-parallel-size": "use --rollout-num-gpus-per-engine",
        "pipeline-parallel-size": _ENGINE_SLOTS,
        "prefill-context-parallel-size": _ENGINE_SLOTS,
        "data-parallel-size": _PLACEMENT,
        "data-parallel-rank": _PLACEMENT,
        "device-ids": _PLACEMENT,
        "nnodes": _PLACEMENT,
        "node-rank": _PLACEMENT,
        "master-addr": _ENGINE_ADDRESS,
        "master-port": _ENGINE_PORTS,
        "port": _ENGINE_PORTS,
        "grpc-port": _ENGINE_PORTS,
        "host": _ENGINE_ADDRESS,
        "uds": _ENGINE_ADDRESS,
        "enable-scale-out": "it is always on: requests and answers are token ids",
        "headless": _ENGINE_ADDRESS,
        "grpc": "vime speaks HTTP with its engines",
        "api-key": "engines listen on loopback, or within the cluster",
        "ssl-keyfile": "vime speaks plain HTTP with its engines",
        "ssl-certfile": "vime speaks plain HTTP with its engines",
        "seed": "use --rollout-seed",
        "logprobs-mode": "it is processed_logprobs: the trainer uses the same definition",
        "weight-transfer-config": _ENGINE_WEIGHTS,
        "worker-extension-cls": _ENGINE_WEIGHTS,
        "enable-return-routed-experts": _ROUTES,
        "aux-output-config": _ROUTES + "; engines keep the routes of as many tokens as their cache holds",
        "skip-tokenizer-init": "engines need the tokenizer to stop at texts",
    },
    "router": {
        "host": "use --vllm-router-ip",
        "port": "use --vllm-router-port",
        "worker-urls": "the router gets the engines that vime starts",
        "service-discovery": "the router gets the engines that vime starts",
        "prometheus-port": "vime gives the router a free port for its metrics",
        "mini-lb": _DISAGGREGATION,
        "vllm-pd-disaggregation": _DISAGGREGATION,
        "prefill": _DISAGGREGATION,
        "decode": _DISAGGREGATION,
        "prefill-policy": _DISAGGREGATION,
        "decode-policy": _DISAGGREGATION,
    },
    "megatron": {
        "variable-seq-lengths": "samples are always packed",
        "hybrid-context-parallel": _SHARED_LAYOUT,
        "pipeline-model-parallel-layout": _SHARED_LAYOUT,
        "params-dtype": "use --bf16, --fp16 or --fp32",
        "pipeline-dtype": "use --bf16, --fp16 or --fp32",
        "autocast-dtype": "use --bf16, --fp16 or --fp32",
        "activation-func": "config.json of --hf-checkpoint says it",
        "use-cpu-initialization": "weights are loaded, never drawn",
        "perform-initialization": "weights are loaded, never drawn",
        "window-size": _WINDOW,
        "window-attn-skip-freq": _WINDOW,
        "moe-latent-size": "no supported model has experts on latents",
        "moe-expert-capacity-factor": _CAPACITY,
        "moe-pad-expert-input-to-capacity": _CAPACITY,
        "moe-router-force-load-balancing": "tokens go to the experts that the router chooses, as in the engines",
        "use-custom-fsdp": "this version shards by tensor and pipeline parallelism only",
        "use-megatron-fsdp": "this version shards by tensor and pipeline parallelism only",
    },
}


def why_owned(program: str, name: str, kind: str) -> str | None:
    """What to use instead of a foreign flag, or None where the flag may be given."""
    reason = OWNED[program].get(name)
    return _OBJECT if reason is None and kind == "object" else reason
