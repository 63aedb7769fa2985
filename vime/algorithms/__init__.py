"""The mathematics of vime as pure functions: rewards, advantages, policy loss, KL, reductions.

Nothing here imports another part of vime, so each formula can be read, tested and reused alone. ``rewards`` and
``advantages`` load without torch, because the process that gathers rollouts has no other use for it.

    rewards         group-relative rewards, overlong penalty, groups without a signal
    advantages      estimators, one a file
    gae             rewards of tokens, returns and generalized advantage estimation along trained tokens
    whitening       of advantages, over all ranks
    ratio           log-ratios of tokens and of whole samples, clamped
    policy_loss     clipped by token (PPO), clipped by sample (GSPO), weighted (CISPO)
    corrections     importance weights, masks and vetoes against tokens of another policy
    kl              estimates of the divergence from a reference
    value_loss, sft the losses of a critic and of fine-tuning
    reduce          from the values of tokens to one number of the whole step

Shape suffixes of tensors:
    n: samples of the micro-batch
    t: response tokens of all samples of the micro-batch, one sample after the other without padding. Every sample is
       there as a whole, also under context parallelism, so a sum over one needs no other rank.

Log-probabilities are natural, of the sampled token, after division of the logits by the rollout temperature.
"""
