"""Which parameters are trained: --only-train-params-name-list and --freeze-params-name-list."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vime.config import Config
from vime.errors import UserError
from vime.models import ModelShape, weight_map
from vime.training.weights_io import global_parameters, unwrap

__all__ = ["Selection", "check_frozen", "frozen_names", "settle_frozen"]

_LAYER = re.compile(r"^decoder\.layers\.\d+\.")


@dataclass(frozen=True, slots=True)
class Selection:
    """Regular expressions that are searched for in the names of parameters, as Megatron calls them in the whole model
    (``decoder.layers.11.mlp.linear_fc1.weight``); so the choice does not depend on the layout."""

    flag: str
    patterns: tuple[str, ...]
    trains: bool  # whether those that match are trained, or those that do not

    @classmethod
    def of(cls, config: Config) -> Selection | None:
        """None: all parameters are trained."""
        ours = config.optimizer
        if ours.only_train_params_name_list:
            return cls("--only-train-params-name-list", ours.only_train_params_name_list, True)
        if ours.freeze_params_name_list:
            return cls("--freeze-params-name-list", ours.freeze_params_name_list, False)
        return None

    def apply(self, chunks: Sequence[Any], shape: ModelShape) -> None:
        """Freezes the other parameters of this rank's chunks, before they are wrapped for gradients. Collective.

        Raises:
            UserError: a pattern matches nothing in the whole model, or a rank has nothing left to train.
        """
        parameters = dict(_parameters(chunks, shape))
        matches = {name: {p for p in self.patterns if re.search(p, name)} for name in parameters}
        for name, copies in parameters.items():
            for parameter in copies:
                parameter.requires_grad = bool(matches[name]) is self.trains
        drafts = {name: copies for name, copies in parameters.items() if name.startswith("mtp.")}
        drafts_idle = bool(drafts) and not _has_trained(drafts)
        self._check_everywhere(set().union(*matches.values()), _has_trained(parameters), drafts_idle)

    def _check_everywhere(self, matched: set[str], trained: bool, drafts_idle: bool) -> None:
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, (matched, trained, drafts_idle))
        unused = set(self.patterns).difference(*(found for found, _, _ in ranks))
        if unused:
            raise UserError(
                f"{self.flag}: no parameter's name contains {', '.join(sorted(unused))}; names are Megatron's, such as "
                "embedding.word_embeddings.weight, decoder.layers.0.self_attention.linear_qkv.weight or "
                "output_layer.weight"
            )
        if any(frozen for _, _, frozen in ranks):
            raise UserError(f"{self.flag} freezes the layer that --enable-mtp-training is to train (mtp.*)")
        idle = [rank for rank, (_, some, _) in enumerate(ranks) if not some]
        if idle:
            raise UserError(
                f"{self.flag}: rank {', '.join(map(str, idle))} of {len(ranks)} would have no parameter to train; "
                "leave some on every pipeline stage, or use fewer stages"
            )


def settle_frozen(chunks: Sequence[Any], config: Config) -> None:
    """Makes training right where parameters are frozen, by a selection or by a model provider. Collective.

    Raises:
        UserError: what is trained differs from layer to layer, and checkpoints could not hold its moments.
    """
    for chunk in chunks:
        if not all(parameter.requires_grad for parameter in chunk.parameters()):
            _let_gradients_through(unwrap(chunk))
    checkpoint = config.checkpoint
    if checkpoint.save is not None and checkpoint.ckpt_format == "torch_dist" and not checkpoint.no_save_optim:
        _check_layers_alike(chunks)


def frozen_names(chunks: Sequence[Any]) -> list[str]:
    """The parameters of this rank that are not trained, by their names in the whole model."""
    parameters = global_parameters(chunks).items()
    return sorted(n for n, p in parameters if isinstance(p, torch.nn.Parameter) and not p.requires_grad)


def check_frozen(directory: Path | str, saved: Sequence[str], chunks: Sequence[Any]) -> None:
    """Raises a UserError unless optimizer state that was saved with those parameters frozen is this run's."""
    if list(saved) != frozen_names(chunks):
        raise UserError(
            f"{directory} was saved with other parameters frozen: resume with the same --freeze-params-name-list or "
            "--only-train-params-name-list, or start from its weights by --ref-load"
        )


def _check_layers_alike(chunks: Sequence[Any]) -> None:
    """A torch_dist checkpoint has a moment of all layers as one tensor, which cannot have gaps."""
    frozen = frozen_names(chunks)
    names = [name for name, each in global_parameters(chunks).items() if isinstance(each, torch.nn.Parameter)]
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, ({_kind(n) for n in frozen}, {_kind(n) for n in names if n not in frozen}))
    uneven = set().union(*(f for f, _ in ranks)) & set().union(*(t for _, t in ranks))
    if uneven:
        raise UserError(
            f"{min(uneven)} is trained in some layers and frozen in others, whose optimizer state --ckpt-format "
            "torch_dist cannot save: give --ckpt-format torch, or --no-save-optim"
        )


def _kind(name: str) -> str:
    return _LAYER.sub("decoder.layers.*.", name)


def _parameters(chunks: Sequence[Any], shape: ModelShape) -> Iterator[tuple[str, list[Tensor]]]:
    """Every parameter with its copies on this rank, such as the last stage's of an embedding that is the output too."""
    original = {copy: rule.megatron for rule in weight_map(shape) for copy in rule.copies}
    found: dict[str, list[Tensor]] = {}
    for name, tensor in global_parameters(chunks).items():
        if isinstance(tensor, torch.nn.Parameter):
            found.setdefault(original.get(name, name), []).append(tensor)
    return iter(found.items())


def _has_trained(parameters: Mapping[str, Sequence[Tensor]]) -> bool:
    return any(parameter.requires_grad for copies in parameters.values() for parameter in copies)


def _let_gradients_through(model: Any) -> None:
    """Recomputation and pipelines pass gradients on only where a layer's input asks for them; that of the first layer
    does not, once the embedding is frozen. Without this, no layer below the last one recomputed would learn."""
    if not model.pre_process:
        return

    def ask(module: torch.nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output.requires_grad_() if torch.is_grad_enabled() and not output.requires_grad else output

    model.embedding.register_forward_hook(ask)
