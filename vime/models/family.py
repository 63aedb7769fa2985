"""A family of models is how to read its config.json and how its weights map; the registry finds the families."""

from __future__ import annotations

import functools
import importlib
import pkgutil
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from vime.errors import UserError
from vime.models.hf_config import HfConfig
from vime.models.mtp import copy_rules
from vime.models.rules import HfTensor, WeightRule
from vime.models.shape import ModelShape

_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One supported architecture."""

    architecture: str  # the name in config.json
    read: Callable[[HfConfig], ModelShape]
    rules: Callable[[ModelShape], Iterable[WeightRule]]
    carries: str | None = None  # pattern of the names of HF tensors that have no part in training


@functools.cache
def families() -> Mapping[str, Family]:
    """All families by architecture: the ``FAMILY`` of each module in ``vime.models.families``."""
    from vime.models import families as package

    modules = (importlib.import_module(f"{package.__name__}.{m.name}") for m in pkgutil.iter_modules(package.__path__))
    return {module.FAMILY.architecture: module.FAMILY for module in modules}


def load_shape(hf_dir: Path | str) -> ModelShape:
    """The shape of the model in a HuggingFace folder.

    Raises:
        UserError: no such folder, no config.json, an unsupported architecture, or an unsupported value in it.
    """
    config = HfConfig.read(Path(hf_dir))
    family = families().get(config.architecture)
    if family is None:
        supported = ", ".join(sorted(families()))
        raise UserError(f"{config.path}: architecture {config.architecture!r} is not supported; these are: {supported}")
    return family.read(config)


def weight_map(shape: ModelShape) -> tuple[WeightRule, ...]:
    """The rules of all parameters, in HF order. A tied output layer has none: it is the embedding."""
    return tuple(families()[shape.architecture].rules(shape))


def export_map(shape: ModelShape, names: Collection[str]) -> tuple[WeightRule, ...]:
    """The rules of all that is written in the place of a folder with tensors of these ``names``."""
    rules = weight_map(shape)
    return (*rules, *copy_rules(shape, rules, names))


def hf_tensors(shape: ModelShape) -> list[HfTensor]:
    """All tensors of the HF model, in HF order."""
    return [tensor for rule in weight_map(shape) for tensor in rule.hf]


def is_carried(shape: ModelShape, name: str) -> bool:
    """Whether an HF tensor that has no rule is carried along: not trained, not sent to engines, and exported as the
    origin has it.

    So are the layers behind the last one, which predict further tokens, unless they are trained, and what a family
    says.
    """
    layer, pattern = _LAYER.match(name), families()[shape.architecture].carries
    behind = layer is not None and int(layer[1]) >= shape.num_layers
    return behind or (pattern is not None and re.search(pattern, name) is not None)
