"""Model families: config.json → Megatron's configuration, and a declarative weight map both ways.

Neither megatron nor transformers is imported here. A new family is one file in ``families/``.
"""

from vime.models.family import hf_tensors, load_shape, weight_map
from vime.models.rules import HfTensor, WeightRule
from vime.models.shape import MlaShape, ModelShape, MoeShape, RopeScaling, YarnScaling

__all__ = [
    "HfTensor",
    "MlaShape",
    "ModelShape",
    "MoeShape",
    "RopeScaling",
    "WeightRule",
    "YarnScaling",
    "hf_tensors",
    "load_shape",
    "weight_map",
]
