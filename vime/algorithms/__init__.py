"""The mathematics of vime as pure functions: rewards, advantages, policy loss, KL, reductions.

Nothing here imports another part of vime, so each formula can be read, tested and reused alone. ``rewards`` and
``advantages`` load without torch, because the process that gathers rollouts has no other use for it.

Shape suffixes of tensors:
    n: samples of the micro-batch
    t: response tokens of all samples of the micro-batch, one sample after the other without padding. Under context
       parallelism a rank holds its share of each sample, and t counts that share.

Log-probabilities are natural, of the sampled token, after division of the logits by the rollout temperature.
"""
