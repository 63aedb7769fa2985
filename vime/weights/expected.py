"""What an engine expects of a weight plan: the tensors of the Hugging Face folder that it serves.

vLLM's own loader skips names that it does not know and leaves parameters as they are when nothing comes for them, so a
wrong plan would end as wrong log-probs. The headers of the folder's safetensors files say what must come.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime.weights.plan import PlanMismatch, TensorSpec, WeightPlan

DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16", "F8_E4M3": "float8_e4m3fn"}
"""safetensors' names of dtypes → torch's."""

LAYER_NUMBER = re.compile(r"\.layers\.(\d+)\.")
SHOWN = 5  # names in one message


@dataclass(frozen=True, kw_only=True)
class ExpectedWeights:
    """Shapes and stored dtypes by name, and the dtype that the engine computes in."""

    tensors: Mapping[str, tuple[tuple[int, ...], str]]
    optional: frozenset[str]  # may be sent or not: a tied output layer, layers that only draft models use
    dtype: str

    @classmethod
    def of_folder(cls, folder: Path, dtype: str) -> ExpectedWeights:
        """Reads config.json and the headers of all safetensors files; no tensor data.

        Raises:
            PlanMismatch: the folder has no safetensors files, so nothing can be checked.
        """
        tensors = read_headers(folder)
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        optional = frozenset(name for name in tensors if _is_optional(name, config))
        return cls(tensors=tensors, optional=optional, dtype=dtype)

    def check(self, plan: WeightPlan) -> None:
        """Raises PlanMismatch with every kind of difference, each naming its first tensors."""
        sent = plan.by_name
        tied = "lm_head.weight" in sent and "lm_head.weight" not in self.tensors
        unknown = [n for n in sent if n not in self.tensors and not (tied and n == "lm_head.weight")]
        missing = [n for n in self.tensors if n not in sent and n not in self.optional]
        wrong = [told for spec in plan.tensors if (told := self._difference(spec))]
        problems = [("missing tensors", missing), ("unknown tensors", unknown), ("wrong tensors", wrong)]
        told = "; ".join(f"{what}: {_some(items)}" for what, items in problems if items)
        if told:
            raise PlanMismatch(f"the weight plan does not fit the served model: {told}")

    def _difference(self, spec: TensorSpec) -> str:
        """How a tensor of the plan differs from the served one; nothing if it does not, or is unknown anyway.

        The dtype must be the engine's or the one stored in the folder (a few tensors stay float32 in bfloat16 models).
        """
        if spec.name not in self.tensors:
            return ""
        shape, stored = self.tensors[spec.name]
        if spec.shape != shape:
            return f"{spec.name} has shape {list(spec.shape)} instead of {list(shape)}"
        if spec.dtype not in (self.dtype, stored):
            return f"{spec.name} is {spec.dtype}, the engine serves {self.dtype}"
        return ""


def read_headers(folder: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """name → (shape, dtype) of every tensor in the folder's safetensors files.

    Raises:
        PlanMismatch: there are no such files.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise PlanMismatch(f"{folder} has no safetensors files to check the weight plan against")
    tensors: dict[str, tuple[tuple[int, ...], str]] = {}
    for file in files:
        for name, entry in _header(file).items():
            if name != "__metadata__":
                tensors[name] = (tuple(entry["shape"]), DTYPES.get(entry["dtype"], entry["dtype"]))
    return tensors


def _header(file: Path) -> dict[str, Any]:
    """A safetensors file starts with the length of its JSON header: 8 bytes, little-endian."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header: dict[str, Any] = json.loads(stream.read(length))
        return header


def _is_optional(name: str, config: Mapping[str, Any]) -> bool:
    if name == "lm_head.weight":
        return bool(config.get("tie_word_embeddings"))
    if name.endswith("rotary_emb.inv_freq") or name.startswith("mtp."):
        return True
    layer = LAYER_NUMBER.search(name)  # layers past the last one belong to multi-token prediction
    return layer is not None and int(layer[1]) >= int(config.get("num_hidden_layers", 1 << 30))


def _some(items: list[str]) -> str:
    rest = len(items) - SHOWN
    return ", ".join(items[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")
