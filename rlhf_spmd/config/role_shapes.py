"""The shape of each model of a preset without weights: one for all (`llama-7b`), or one by role
(`actor=llama-70b,critic=llama-7b`)."""

from collections.abc import Mapping

from rlhf_spmd.errors import UserError
from rlhf_spmd.pages.option_suggestions import check_known
from rlhf_spmd.plan.workflow import Role
from rlhf_spmd.plan.workload import SHAPES


def shapes_by_role(text: str, roles: Mapping[str, Role], default: str = "") -> dict[str, str]:
    """Returns the shape of each role; empty where none is known. A role that is not named has the shape of the role
    that it starts from first, else the default. Raises UserError for unknown names."""
    shapes: dict[str, str] = {}
    for part in text.split(",") if "=" in text or "," in text else []:
        role, equals, shape = map(str.strip, part.partition("="))
        if not equals or role in shapes:
            raise UserError(
                f"shape={text} is not ROLE=SHAPE, each role once, e.g. shape=actor=llama-70b,critic=llama-7b"
            )
        check_known("role in the option shape", role, roles)
        shapes[role] = shape
    for shape in shapes.values() or filter(None, [text]):
        check_known("shape", shape, SHAPES)
    if not shapes:
        return dict.fromkeys(roles, text or default)

    def shape_of(role: str) -> str:
        first = next((other for other in roles[role].starts_from if other in roles and other != role), None)
        return shapes.get(role) or (shape_of(first) if first else default)

    return {role: shape_of(role) for role in roles}


def shape_text(shapes: Mapping[str, str]) -> str:
    """Returns the option that gives each role its shape."""
    if len({*shapes.values()}) == 1:
        return next(iter(shapes.values()))
    return ",".join(f"{role}={shape}" for role, shape in shapes.items() if shape)
