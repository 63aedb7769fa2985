"""On-policy distillation: a dense signal from a teacher for tokens that the student sampled itself."""

from __future__ import annotations

from torch import Tensor

__all__ = ["distilled", "teacher_gap"]


def distilled(advantages_t: Tensor, gap_t: Tensor, coef: float) -> Tensor:
    """``A - c (log π - log π_teacher)``, float32 [t].

    The expectation of the gap over the student's samples is its KL divergence from the teacher, KL(π ‖ π_teacher). So
    where rewards give advantages of 0, the policy gradient is that of the reverse KL at each token, given what was
    sampled before, and without regard to what follows: https://arxiv.org/abs/2306.13649, section 3, with the student's
    own samples.

    Args:
        advantages_t: float32 [t], of whatever estimator.
        gap_t: float32 [t], what ``teacher_gap`` says.
        coef: c, --opd-kl-coef.
    """
    return advantages_t - coef * gap_t


def teacher_gap(log_probs_t: Tensor, teacher_log_probs_t: Tensor) -> Tensor:
    """``log π - log π_teacher`` of each sampled token [t] in nats, at one temperature, without gradient."""
    return (log_probs_t - teacher_log_probs_t).detach()
