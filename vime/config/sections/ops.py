"""Running and watching."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vime.config.flags import derived, flag


@dataclass(frozen=True, kw_only=True)
class Ops:
    """Where a run writes, who watches, and what to leave out for debugging."""

    run_dir: str = derived("save, else runs/DATE-TIME", help="Folder for metrics, logs and the resolved config.")
    tensorboard_dir: str = derived("run-dir/tensorboard", help="Folder for TensorBoard's event files.")
    use_wandb: bool = flag(False, help="Also report to Weights & Biases.")
    wandb_project: str | None = flag(None, help="Weights & Biases project.")
    wandb_group: str | None = flag(None, help="Weights & Biases group.")
    wandb_key: str | None = flag(
        None, help="Weights & Biases key; the environment's WANDB_API_KEY is safer.", secret=True
    )
    wandb_mode: Literal["online", "offline", "disabled"] | None = flag(None, help="Weights & Biases mode.")
    wandb_dir: str | None = flag(None, help="Folder for Weights & Biases' own files.")
    wandb_host: str | None = flag(None, help="Address of a Weights & Biases server.")
    wandb_team: str | None = flag(None, help="Weights & Biases team.")
    wandb_run_id: str | None = flag(None, help="Weights & Biases run to continue.")
    wandb_always_use_train_step: bool = flag(
        False, help="Draw every curve there over optimizer steps; else only train/... is, and the rest over rollouts."
    )
    log_passrate: bool = flag(False, help="Log pass@k of rollouts, for k = 1, 2, 4 … up to the size of a group.")
    debug_rollout_only: bool = flag(False, help="Only generate; no training processes.")
    debug_train_only: bool = derived(
        "only with load-debug-rollout-data",
        help="Only train, on --load-debug-rollout-data or the dialogues of sft_loss; no engines.",
    )
    save_debug_rollout_data: str | None = flag(
        None,
        help="File for the samples of each rollout with all their fields, as JSON, a line for each group; {rollout_id} "
        "stands for the number of the rollout.",
    )
    load_debug_rollout_data: str | None = flag(
        None,
        help="Train on the files of --save-debug-rollout-data: no prompts, engines or evaluations. Implies "
        "--debug-train-only.",
    )
    log_multi_turn: bool = flag(
        False, help="Log turns, tool calls and their errors of samples with several turns, as rollout/multi_turn/..."
    )
    custom_config_path: str | None = flag(None, help="YAML whose entries are added to the args of custom functions.")
