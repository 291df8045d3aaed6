"""The requested cuts: a dictionary from the user, the plan that comes with a Hugging Face model, or nothing.

    {"layers.*.mlp.up": "column", "layers.*.mlp.down": "row", "head": "vocabulary", "layers.0.attention": "whole"}

A star stands for one part of a name. In any case the channel-group analysis decides where the cuts are.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from shardwise.errors import ShardwiseError, nearest, unknown

KINDS = ("column", "row", "vocabulary", "whole")

#: Hugging Face's names for the same kinds. With the right cut, outputs need not be gathered.
_OF_PLANS = {
    "colwise": "column",
    "colwise_rep": "column",
    "colwise_gather_output": "column",
    "packed_colwise": "column",
    "rowwise": "row",
    "rowwise_rep": "row",
    "rowwise_split_input": "row",
    "packed_rowwise": "row",
}


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """The requested kind of each layer, by name. `only`: layers that are not named stay whole."""

    kinds: Mapping[str, str] = field(default_factory=dict)
    only: bool = False
    #: Modules whose parameters are the stacked matrices of experts.
    experts: tuple[str, ...] = ()
    #: Whether the names are the user's. Then a request that cannot be met is an error.
    is_users: bool = False


def read_tensor_plan(module: nn.Module, spec: Mapping[str, str] | None) -> TensorPlan:
    """Return the user's plan, or else the model's own plan, or else an empty one."""
    names = [name for name, _ in module.named_modules() if name]
    if spec is not None:
        for kind in spec.values():
            if kind not in KINDS:
                raise unknown("way to cut a layer", kind, KINDS)
        kinds = _expand(spec, names)
        return TensorPlan(kinds=kinds, only=any(kind != "whole" for kind in spec.values()), is_users=True)
    plan = getattr(module, "_tp_plan", None)
    if not isinstance(plan, Mapping) or not plan:
        return TensorPlan()
    layers: dict[str, str] = {}
    experts: list[str] = []
    for pattern, style in plan.items():
        matching = [name for name in names if _matches(pattern, name)]
        if style == "moe_tp_experts":
            experts += matching
        elif style in _OF_PLANS:
            layers |= dict.fromkeys(matching, _OF_PLANS[style])
    if "row" not in layers.values():  # Some plans name only the head, and leave the rest open.
        return TensorPlan(experts=tuple(experts))
    return TensorPlan(kinds=layers, only=True, experts=tuple(experts))


def _expand(spec: Mapping[str, str], names: list[str]) -> dict[str, str]:
    kinds: dict[str, str] = {}
    for pattern, kind in spec.items():
        matching = [name for name in names if _matches(pattern, name)]
        if not matching:
            near = nearest(pattern, [_like(pattern, name) for name in names])
            raise ShardwiseError(f"no layer of the module is named {pattern!r}", remedy=near and f'"{near}"')
        kinds |= dict.fromkeys(matching, kind)
    return kinds


def _like(pattern: str, name: str) -> str:
    """Return a name with stars where a pattern has them."""
    stars = [part == "*" for part in pattern.split(".")]
    parts = name.split(".")
    return ".".join("*" if star else part for part, star in zip(parts, stars + [False] * len(parts), strict=False))


def _matches(pattern: str, name: str) -> bool:
    parts, own = pattern.split("."), name.split(".")
    return len(parts) == len(own) and all(part in ("*", each) for part, each in zip(parts, own, strict=True))
