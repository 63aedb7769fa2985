"""A config.json, read strictly: what is missing or unsupported is said by name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from vime.errors import UserError
from vime.files import read_json_object
from vime.models.shape import RopeScaling, YarnScaling

_MISSING = object()
_MOST = {
    "num_hidden_layers": 2_000, "num_nextn_predict_layers": 2_000, "first_k_dense_replace": 2_000,
    "num_experts": 8_192, "n_routed_experts": 8_192, "num_local_experts": 8_192,
}  # fmt: skip
"""Of what is counted one by one; far more than any model has, and few enough to end."""
_MOST_OF_ANYTHING = 2**31 - 1


class HfConfig:
    """The values of one config.json and the path to name in messages."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self.values = values

    @classmethod
    def read(cls, hf_dir: Path) -> HfConfig:
        """Reads ``hf_dir/config.json``.

        Raises:
            UserError: there is no such folder, no config.json in it, or the file is not a JSON object.
        """
        path = hf_dir / "config.json"
        if not hf_dir.is_dir():
            raise UserError(
                f"{hf_dir}: no such folder; a local HuggingFace model folder is needed (`hf download` makes one)"
            )
        if not path.is_file():
            raise UserError(f"{hf_dir}: there is no config.json in it, so it is not a HuggingFace model folder")
        return cls(path, read_json_object(path))

    @property
    def architecture(self) -> str:
        names = self.values.get("architectures") or []
        if not isinstance(names, list) or len(names) != 1:
            raise UserError(f"{self.path}: 'architectures' must name exactly one architecture, not {names!r}")
        return str(names[0])

    def integer(self, key: str, default: Any = _MISSING) -> int:
        """A positive integer. A key that is absent or null takes the default, and without one is an error."""
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"{self.path}: {key!r} must be a positive integer, not {_short(value)}")
        most = _MOST.get(key, _MOST_OF_ANYTHING)
        if value > most:
            raise UserError(f"{self.path}: {key!r} is {_short(value)}; no model has more than {most}")
        return value

    def count(self, key: str) -> int:
        """A number of things, of which there are none where the key is absent or null."""
        return self.integer(key) if self.values.get(key) else 0

    def number(self, key: str, default: Any = _MISSING) -> float:
        """A positive number; absent keys as in ``integer``."""
        value = self._get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
            raise UserError(f"{self.path}: {key!r} must be a positive number, not {_short(value)}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        return bool(self._get(key, default))

    def refuse_unless(self, key: str, allowed: Collection[Any], default: Any) -> None:
        """Raises a UserError when the value of ``key`` is not among those which are implemented."""
        value = self._get(key, default)
        if value not in allowed:
            supported = " or ".join(repr(item) for item in allowed)
            raise UserError(f"{self.path}: {key}={value!r} is not supported, only {supported}")

    def dtype(self) -> str:
        """The dtype of the weights: ``dtype`` since transformers 5, ``torch_dtype`` before."""
        return str(self._get("dtype", self._get("torch_dtype", "float32")))

    def rotary(self) -> tuple[float, RopeScaling | YarnScaling | None]:
        """Base and scaling of the rotary positions.

        transformers 5 writes both into ``rope_parameters``; before, they were ``rope_theta`` and ``rope_scaling``.
        """
        rope = self._rope()
        base = rope.number("rope_theta", self.values.get("rope_theta") or 10000.0)
        readers: dict[str, Callable[[], RopeScaling | YarnScaling | None]]
        readers = {"default": lambda: None, "llama3": rope._llama3, "yarn": lambda: rope._yarn(self)}
        kind = rope.values.get("rope_type") or rope.values.get("type") or "default"
        if kind not in readers:
            raise UserError(f"{self.path}: rope_type={kind!r} is not supported, only 'default', 'llama3' or 'yarn'")
        return base, readers[kind]()

    def rotary_percent(self, default: float = 1.0) -> float:
        """The part of a head's channels that is rotated; transformers 5 writes it into ``rope_parameters`` too."""
        return self._rope().number("partial_rotary_factor", self.values.get("partial_rotary_factor") or default)

    def _rope(self) -> HfConfig:
        values = self._get("rope_parameters", None) or self._get("rope_scaling", None) or {}
        if not isinstance(values, dict):
            raise UserError(f"{self.path}: 'rope_parameters' or 'rope_scaling' must be an object, not {_short(values)}")
        return HfConfig(self.path, values)

    def _llama3(self) -> RopeScaling:
        return RopeScaling(
            factor=self.number("factor"),
            low_freq_factor=self.number("low_freq_factor"),
            high_freq_factor=self.number("high_freq_factor"),
            original_max_position_embeddings=self.integer("original_max_position_embeddings"),
        )

    def _yarn(self, model: HfConfig) -> YarnScaling:
        longest = model.integer("max_position_embeddings")
        original = self.integer("original_max_position_embeddings", longest)
        return YarnScaling(
            factor=self.number("factor", longest / original),
            original_max_position_embeddings=original,
            beta_fast=self.number("beta_fast", 32.0),
            beta_slow=self.number("beta_slow", 1.0),
            mscale=self._number_or_none("mscale"),
            mscale_all_dim=self._number_or_none("mscale_all_dim"),
            given_attention_factor=self._number_or_none("attention_factor"),
            truncate=self.flag("truncate", True),
        )

    def _number_or_none(self, key: str) -> float | None:
        """A positive number; None where it is absent, null or 0."""
        return self.number(key) if self.values.get(key) else None

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is _MISSING:
            raise UserError(f"{self.path}: {key!r} is missing")
        return default


def _short(value: Any) -> str:
    """A wrong value, of which a message shows so much."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
