"""GLM-4-0414 and GLM-Z1 (9B, 32B): GLM-4 with a norm also behind attention and MLP."""

from __future__ import annotations

import functools

from vime.models.families import glm
from vime.models.family import Family

FAMILY = Family(architecture="Glm4ForCausalLM", read=functools.partial(glm.read, post_norms=True), rules=glm.rules)
