"""``--megatron-config-path``: flags of actor and critic that differ.

    megatron:
      - name: default          # for people; any text
        role: actor            # or critic, each at most once
        overrides:
          lr: 1e-6

Overrides win over the command line. Those of the actor become the run's flags; of the critic's, ``lr``, ``load`` and
``save`` become its own flags, and the others are kept apart (``Config.critic_overrides``). Both have the same model and
the same parallel layout, so neither can be overridden.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args

from vime.config.catalog import lookup
from vime.config.config import OWN_FLAGS
from vime.config.foreign.megatron_lm import WITHOUT_EFFECT
from vime.config.reading import Draft, Given, apply, yaml_entries
from vime.config.rules.expected import EXPECTED
from vime.errors import UserError
from vime.types import Role

__all__ = ["read_roles"]

ROLES: tuple[Role, ...] = get_args(Role)
OWN_NAMES = {"lr": "critic-lr", "load": "critic-load", "save": "critic-save"}
"""Flags that the critic has under names of its own."""

RECOMPUTATION = ("recompute_granularity", "recompute_method", "recompute_num_layers")
SELECTIONS = ("only_train_params_name_list", "freeze_params_name_list")
PIPELINES = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")


def read_roles(draft: Draft) -> Mapping[str, Any]:
    """Applies ``--megatron-config-path`` to the draft, and returns what it says of the critic alone."""
    path = draft.values.get(("vime", "megatron_config_path"))
    critic = Draft()
    if path is None:
        return {}
    try:
        for role, overrides in _entries(path):
            where = f"{path} ({role})"
            given = [each for name, raw in overrides.items() if (each := _given(role, name, raw, where, draft.errors))]
            own = [each for each in given if role == "actor" or each.target.attribute.startswith("critic_")]
            apply(draft, own)
            apply(critic, [each for each in given if each not in own])
    except UserError as error:
        draft.errors.append(str(error))
    draft.errors += critic.errors
    return {key: value for (_, key), value in critic.values.items()}


def _entries(path: str) -> Iterator[tuple[Role, Mapping[str, Any]]]:
    """Role and overrides of each entry. Raises UserError for what has another form."""
    content = {key: value for key, value, _ in yaml_entries(path)}
    entries = content.pop("megatron", None)
    if content or not isinstance(entries, list):
        raise UserError(f"{path}: expected one key, megatron, with a list of roles and their overrides")
    seen = set()
    for entry in entries:
        if not isinstance(entry, dict) or not {"role", "overrides"} <= entry.keys() <= {"name", "role", "overrides"}:
            raise UserError(f"{path}: each entry of megatron has role, overrides and perhaps a name, not {entry!r}")
        role, overrides = entry["role"], entry["overrides"]
        if role not in ROLES:
            raise UserError(f"{path}: role must be {' or '.join(ROLES)}, not {role!r}")
        if role in seen:
            raise UserError(f"{path}: role {role} stands there twice")
        if not isinstance(overrides, dict):
            raise UserError(f"{path} ({role}): overrides must be a mapping of flags to values, not {overrides!r}")
        seen.add(role)
        yield role, overrides


def _given(role: Role, name: Any, raw: Any, where: str, errors: list[str]) -> Given | None:
    """One override as a flag; None, with the reason among the errors, where it cannot be one."""
    kebab = str(name).replace("_", "-")
    try:
        target = lookup(OWN_NAMES.get(kebab, kebab) if role == "critic" else kebab)
    except UserError as error:
        errors.append(f"{where}: {str(error).replace('--', '')}")
        return None
    problem = _shared(target.store, target.key)
    if role == "critic" and target.key in SELECTIONS:
        problem = "is of the actor alone: a critic is trained as a whole"
    if problem is not None:
        errors.append(f"{where}: {name} {problem}")
        return None
    return Given(target=target, raw=raw, written=f"{where}: {name}", origin=where)


def _shared(store: str, key: str) -> str | None:
    """Why a flag cannot differ between actor and critic; None if it can."""
    section = OWN_FLAGS[key].section if store == "vime" and key in OWN_FLAGS else store
    if key in EXPECTED or key in WITHOUT_EFFECT:
        return "describes the model, which actor and critic share"
    if (section == "parallel" and key not in RECOMPUTATION) or key in PIPELINES:
        return "cannot differ: actor and critic have the same parallel layout and precision"
    movable = section in ("optimizer", "megatron") or key in RECOMPUTATION
    if movable or key in ("load", "save", "critic_lr", "critic_load", "critic_save"):
        return None
    return "is not a flag of one role: the optimizer's, recompute-*, load, save and Megatron's own are"
