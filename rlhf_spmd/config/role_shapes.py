"""The shape of each model of a preset without weights: one for all (`llama-7b`), or one by role
(`actor=llama-70b,critic=llama-7b`)."""

from collections.abc import Mapping

from rlhf_spmd.errors import UserError
from rlhf_spmd.pages.option_suggestions import check_known
from rlhf_spmd.plan.workflow import Role
from rlhf_spmd.plan.workload import SHAPES


def named_shapes(text: str, roles: Mapping[str, Role]) -> dict[str, str]:
    """Returns the shapes that the option gives by role; empty if it gives one for all. Raises UserError for unknown
    names."""
    parts = [part.partition("=") for part in text.split(",")] if "=" in text or "," in text else []
    if any(not equals for _, equals, _ in parts):
        raise UserError(f"shape={text} is not ROLE=SHAPE, e.g. shape=actor=llama-70b,critic=llama-7b")
    found = {role.strip(): shape.strip() for role, _, shape in parts}
    if len(found) < len(parts):
        raise UserError(f"shape={text} names a role twice; drop one of the two")
    for role in found:
        check_known("role in the option shape", role, roles)
    for shape in found.values() or filter(None, [text]):
        check_known("shape", shape, SHAPES)
    return found


def shapes_by_role(text: str, roles: Mapping[str, Role], default: str = "") -> dict[str, str]:
    """Returns the shape of each role; empty where none is known. A role that is not named has the shape of the role
    that it starts from first, else the default. Raises UserError for unknown names."""
    named = named_shapes(text, roles)
    if not named:
        return dict.fromkeys(roles, text or default)

    def shape_of(role: str) -> str:
        first = next((other for other in roles[role].starts_from if other in roles and other != role), None)
        return named.get(role) or (shape_of(first) if first else default)

    return {role: shape_of(role) for role in roles}


def shape_text(shapes: Mapping[str, str]) -> str:
    """Returns the option that gives each role its shape."""
    known = {role: shape for role, shape in shapes.items() if shape}
    one_for_all = len(set(known.values())) == 1 and len(known) == len(shapes)
    return next(iter(known.values())) if one_for_all else ",".join(f"{role}={shape}" for role, shape in known.items())
