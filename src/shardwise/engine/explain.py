"""Describe what an engine has made of a module: what is cut, what is sent between stages, what was not checked."""

from shardwise.engine.parts import Parts
from shardwise.errors import some


def explain(parts: Parts) -> str:
    """Return the plan, the stages and the values between them, and how layers are cut."""
    plan, split, tensor = parts.plan, parts.split, parts.sharded.tensor
    lines = [f"plan: {plan}"]
    if split.num_stages > 1:
        lines += [f"stage {stage}: {some(units)}" for stage, units in enumerate(split.units)]
        lines += [f"stage {one} to {other}: {some(split.between(one, other))}" for one, other in split.edges]
        if not parts.options.verify:
            lines.append("stages were not tried on a second batch: verify=False")
        elif parts.is_without_numbers:
            lines.append("stages were not tried on a second batch: the module was on the meta device")
    if parts.written:
        lines.append(f"buffers that forwards write: {some(sorted(parts.written))}")
    if split.left:
        lines.append(f"attributes that forwards write: {some([str(key) for _, key in split.left])}")
    lines += [] if tensor is None else [tensor.describe()]
    lines += parts.fused.lines()
    lines += [] if parts.sharded.fp8 is None else parts.sharded.fp8.describe()
    return "\n".join([*lines, f"the loss is {parts.kind.value}"])
