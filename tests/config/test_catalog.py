"""Which flags exist."""

from __future__ import annotations

import pytest

from vime.config.catalog import lookup, own_targets, suggestion
from vime.config.foreign import manifest
from vime.config.foreign.sglang import INSTEAD
from vime.config.foreign.usual import USUAL
from vime.config.unimplemented import UNIMPLEMENTED, refusal
from vime.errors import UserError

GUIDE = """
actor-num-gpus-per-node actor-num-nodes adam-beta1 adam-beta2 advantage-estimator
apply-chat-template balance-data buffer-filter-path calculate-per-token-loss ckpt-format ckpt-step
colocate context-parallel-size critic-load critic-lr critic-num-gpus-per-node critic-num-nodes
critic-save custom-convert-samples-to-train-data-path custom-eval-rollout-log-function-path
custom-generate-function-path custom-loss-function-path custom-megatron-before-log-prob-hook-path
custom-megatron-before-train-step-hook-path custom-megatron-init-path
custom-pg-loss-reducer-function-path custom-reward-post-process-path custom-rm-path
custom-rollout-log-function-path custom-tis-function-path data-source-path debug-rollout-only
debug-train-only dynamic-sampling-filter-path enable-mtp-training entropy-coef eps-clip
eps-clip-high eval-function-path eval-interval eval-max-response-len eval-prompt-data eval-top-p
expert-model-parallel-size expert-tensor-parallel-size global-batch-size group-rm hf-checkpoint
input-key kl-coef kl-loss-coef kl-loss-type label-key load load-debug-rollout-data lr lr-decay-style
max-tokens-per-gpu megatron-config-path metadata-key mtp-loss-scaling-factor mtp-num-layers
n-samples-per-eval-prompt n-samples-per-prompt normalize-advantages num-rollout
num-steps-per-rollout optimizer over-sampling-batch-size partial-rollout
pipeline-model-parallel-size prefill-num-servers prompt-data recompute-granularity recompute-method
recompute-num-layers ref-load rm-type rm-url rollout-batch-size rollout-data-postprocess-path
rollout-function-path rollout-health-check-first-wait rollout-health-check-interval
rollout-health-check-timeout rollout-max-response-len rollout-num-gpus rollout-num-gpus-per-engine
rollout-sample-filter-path rollout-shuffle rollout-temperature rollout-top-p rotary-base
router-balance-abs-threshold save save-debug-rollout-data save-interval sequence-parallel
tensor-model-parallel-size tensorboard-dir train-backend use-dynamic-batch-size use-fault-tolerance
use-kl-loss use-rollout-routing-replay use-routing-replay use-wandb value-clip vllm-config
vllm-gpu-memory-utilization vllm-max-model-len vllm-router-ip vllm-router-port
vllm-speculative-config vocab-size wandb-group wandb-key wandb-project weight-decay
"""


@pytest.mark.parametrize("name", GUIDE.split())
def test_every_flag_of_the_user_guide_is_accepted_or_refused_by_name(name):
    try:
        lookup(name)
    except UserError as error:
        assert str(error) == refusal(name)


def test_no_flag_is_both_implemented_and_not():
    assert not set(UNIMPLEMENTED) & set(own_targets())


def test_fields_of_megatron_that_have_a_flag_of_ours_set_ours():
    shared = set(manifest("megatron")) & set(own_targets())
    assert {"lr", "tensor-model-parallel-size", "recompute-granularity", "clip-grad"} <= shared
    assert all(lookup(name).store == "vime" for name in shared)


@pytest.mark.parametrize("name", USUAL)
def test_usual_names_of_others_are_no_flags_and_stand_for_flags_of_ours(name):
    with pytest.raises(UserError):
        lookup(name)
    assert suggestion(name) == f"; did you mean {' or '.join(f'--{each}' for each in USUAL[name])}?"
    for meant in USUAL[name]:
        assert lookup(meant)


@pytest.mark.parametrize("name", INSTEAD.values())
def test_what_is_advised_instead_of_a_flag_of_another_engine_exists(name):
    lookup(name)
