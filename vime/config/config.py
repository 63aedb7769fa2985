"""The resolved configuration: frozen, picklable, and aware of where each value came from."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from vime.config import sections
from vime.config.flags import Flag, flags_of
from vime.config.sections import SECTIONS

V = TypeVar("V")

OWN_FLAGS: dict[str, Flag] = {each.name: each for name, cls in SECTIONS.items() for each in flags_of(name, cls)}
"""Every flag of vime itself, by attribute name, in the order of the sections."""

MASK = "***"


class FrozenMap(Mapping[str, V], Generic[V]):
    """A mapping that cannot be changed, and that pickles (which the standard library's proxy does not)."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, V] | None = None) -> None:
        self._items = dict(items or {})

    def __getitem__(self, key: str) -> V:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return repr(self._items)


class Args:
    """The read-only flat view of all flags that custom functions get as ``args``.

    Every flag is an attribute (``args.rollout_batch_size``); flags of vLLM and of the router that were given are there
    as ``args.vllm_max_model_len`` and ``args.router_policy``. Values known only at run time and those of
    ``--custom-config-path`` are added by ``extended``.
    """

    __slots__ = ("_values",)
    _values: dict[str, Any]

    def __init__(self, values: Mapping[str, Any]) -> None:
        object.__setattr__(self, "_values", dict(values))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_values":  # half-built while it is unpickled
            raise AttributeError(name)
        if name in self._values:
            return self._values[name]
        near = difflib.get_close_matches(name, self._values, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise AttributeError(f"args has no {name}{hint}")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"args is read-only: {name} cannot be set")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"args is read-only: {name} cannot be deleted")

    def __dir__(self) -> list[str]:
        return sorted(self._values)

    def __repr__(self) -> str:
        return f"Args({', '.join(self._values)})"

    def __reduce__(self) -> tuple[type[Args], tuple[dict[str, Any]]]:
        return (Args, (self._values,))

    def extended(self, **values: Any) -> Args:
        """A view that also has ``values``, e.g. the router's address once it is known."""
        return Args(self._values | values)


@dataclass(frozen=True, kw_only=True)
class Config:
    """All flags by section, plus what is passed through to Megatron, vLLM and the router (only what the user gave)."""

    cluster: sections.Cluster
    checkpoint: sections.Checkpoint
    data: sections.Data
    rollout: sections.Rollout
    sampling: sections.Sampling
    batch: sections.Batch
    algorithm: sections.Algorithm
    critic: sections.Critic
    asynchrony: sections.Asynchrony
    off_policy: sections.OffPolicy
    distillation: sections.Distillation
    optimizer: sections.Optimizer
    parallel: sections.Parallel
    reward: sections.Reward
    agent: sections.Agent
    evaluation: sections.Evaluation
    engine: sections.Engine
    ops: sections.Ops
    hooks: sections.Hooks
    megatron: Mapping[str, Any] = field(default_factory=FrozenMap)  # by the name of Megatron-core's field
    vllm: Mapping[str, Any] = field(default_factory=FrozenMap)  # max_model_len, without the prefix
    router: Mapping[str, Any] = field(default_factory=FrozenMap)
    custom: Mapping[str, Any] = field(default_factory=FrozenMap)  # from --custom-config-path, for plug-ins only
    critic_overrides: Mapping[str, Any] = field(default_factory=FrozenMap)  # by attribute name; --megatron-config-path
    origins: Mapping[str, str] = field(default_factory=FrozenMap)  # by attribute name in ``args``

    @property
    def has_engines(self) -> bool:
        """Whether the run samples answers."""
        return not (self.algorithm.is_sft or self.ops.debug_train_only)

    @property
    def args(self) -> Args:
        """The flat view for custom functions."""
        return Args(dict(self.custom) | self.flat())

    def flat(self) -> dict[str, Any]:
        """Every value by its attribute name in ``args``, without those of ``--custom-config-path``."""
        values = dict(self.megatron)
        values |= {f"vllm_{name}": value for name, value in self.vllm.items()}
        values |= {f"router_{name}": value for name, value in self.router.items()}
        for section in SECTIONS:
            part = getattr(self, section)
            values |= {item.name: getattr(part, item.name) for item in dataclasses.fields(part)}
        return values

    def to_dict(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Section → flag → {value, origin}, ready for JSON; secrets are masked."""
        known: dict[str, dict[str, Any]] = {part: {} for part in [*SECTIONS, "megatron", "vllm", "router", "custom"]}
        for name, value in self.flat().items():
            known[self._section_of(name)][name] = {
                "value": shown(name, value),
                "origin": self.origins.get(name, "default"),
            }
        for name, value in self.custom.items():
            known["custom"][name] = {"value": shown(name, value), "origin": self.ops.custom_config_path}
        known["critic overrides"] = {
            name: {"value": shown(name, value), "origin": self.critic.megatron_config_path}
            for name, value in self.critic_overrides.items()
        }
        return {section: entries for section, entries in known.items() if entries}

    def _section_of(self, name: str) -> str:
        if name in OWN_FLAGS:
            return OWN_FLAGS[name].section
        return next((p for p in ("vllm", "router") if name.startswith(f"{p}_")), "megatron")


SECRET_ENDINGS = ("api_key", "_token", "_secret", "_password")


def shown(name: str, value: Any) -> Any:
    """A value as it may be printed and stored: secrets are masked, also inside a mapping of environment variables."""
    secret = (name in OWN_FLAGS and OWN_FLAGS[name].secret) or name.lower().endswith(SECRET_ENDINGS)
    if secret and value is not None:
        return MASK
    if isinstance(value, Mapping):
        return {key: shown(key, each) for key, each in value.items()}
    return value
