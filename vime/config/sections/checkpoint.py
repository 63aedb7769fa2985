"""Where the model comes from, and what is saved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vime.config.flags import flag, required


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Paths are roots of checkpoints, never one of their iter_* folders."""

    hf_checkpoint: str = required(
        help="Hugging Face folder: gives the model's shape and tokenizer, and starts the engines. Need not be current."
    )
    trust_remote_code: bool = flag(
        False, help="Run the Python code in --hf-checkpoint: of its tokenizer, and in the engines of its model."
    )
    load: str | None = flag(
        None,
        help="Checkpoint to resume from, or a Hugging Face folder. Where it is the folder of --save and has no "
        "checkpoint yet, training starts from --ref-load or --hf-checkpoint.",
    )
    ref_load: str | None = flag(None, help="The reference model: a torch_dist checkpoint or a Hugging Face folder.")
    save: str | None = flag(None, help="Folder for checkpoints. The last rollout is always saved there.")
    save_interval: int | None = flag(None, help="Save after every so many rollouts.")
    ckpt_step: int | None = flag(None, help="Resume from this rollout instead of the newest complete one.")
    ref_ckpt_step: int | None = flag(None, help="Which rollout of --ref-load is the reference.")
    ckpt_format: Literal["torch_dist", "torch"] = flag(
        "torch_dist", help="Format of saved checkpoints; torch_dist can be loaded under any parallel layout."
    )
    save_hf: str | None = flag(
        None, help="Also save in Hugging Face format to this folder; {rollout_id} stands for the number of the rollout."
    )
    no_save_optim: bool = flag(False, help="Leave the optimizer out of checkpoints; they cannot be resumed exactly.")
    start_rollout_id: int | None = flag(None, help="Number of the first rollout, instead of the checkpoint's next one.")
    vocab_size: int | None = flag(None, help="Rows of the vocabulary before padding; config.json says it otherwise.")
    make_vocab_size_divisible_by: int = flag(1, help="Pad the vocabulary to a multiple of this x tensor-parallel size.")
