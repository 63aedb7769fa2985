"""On-policy distillation: a teacher says of every sampled token how likely it would have been to say that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vime.config.flags import flag


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """Formula: ``vime.algorithms.distillation``. It adds to what the advantage estimator makes of rewards."""

    use_opd: bool = flag(False, help="On-policy distillation: advantages pull the policy towards a teacher.")
    opd_type: Literal["megatron", "vllm"] | None = flag(
        None,
        help="Where the teacher is. megatron: its weights lie in the trainer, which has its architecture; vllm: on a "
        "server of any size, which has the tokenizer of the model.",
    )
    opd_kl_coef: float = flag(1.0, help="Weight of the teacher: what a nat between policy and teacher costs.")
    opd_teacher_load: str | None = flag(
        None, help="The teacher of --opd-type megatron: a torch_dist checkpoint or a Hugging Face folder."
    )
    opd_teacher_ckpt_step: int | None = flag(None, help="Which rollout of --opd-teacher-load is the teacher.")
    opd_teacher_url: str | None = flag(
        None, help="The teacher of --opd-type vllm: address of a vLLM server, http://HOST:PORT."
    )
