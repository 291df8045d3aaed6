"""The traffic between the ranks of a plan in a step: bytes by axis, on every edge between two ranks.

tensor, context, data parallel    around a ring: every rank to the next, the last to the first
pipeline                          along a chain: activations down and gradients up; a ring where ranks have chunks
expert parallel                   from every rank of a group to every other
"""

from dataclasses import dataclass

import numpy as np

from shardwise.cost.constants import CONSTANTS
from shardwise.cost.numbers import Ints
from shardwise.cost.places import count_blocks, typical_places
from shardwise.cost.stage import Pricer, share_of
from shardwise.model.operations import Attention, Permutation
from shardwise.planner.account import layouts_of
from shardwise.planner.placement.grid import along, grid_of
from shardwise.planner.plan import Plan
from shardwise.planner.question import Question


@dataclass(frozen=True, slots=True, kw_only=True)
class Edges:
    """The edges of one axis: senders, receivers, and the bytes on each edge in a step."""

    axis: str
    senders: Ints
    receivers: Ints
    num_bytes: float


def edges_of(plan: Plan, num_bytes: dict[str, float]) -> list[Edges]:
    """Return the edges of a plan, given the bytes on an edge of each axis."""
    grid = grid_of(plan)
    groups = {
        "tp": along(grid, ("tp",)),
        "cp": along(grid, ("cp",)),
        "dp": along(grid, ("dp", "cp")),
        "pp": along(grid, ("pp",)),
        "ep": along(grid, ("dp", "cp")).reshape(-1, plan.ep),
    }
    found = []
    for axis, rows in groups.items():
        size = rows.shape[1]
        if size < 2 or not num_bytes.get(axis):
            continue
        if axis == "ep":
            first, second = np.nonzero(~np.eye(size, dtype=bool))
            senders, receivers = rows[:, first], rows[:, second]
        elif axis == "pp" and (plan.num_stages or plan.pp) <= plan.pp:
            senders, receivers = rows[:, :-1], rows[:, 1:]
        else:
            senders, receivers = rows, np.roll(rows, -1, axis=1)
        found.append(Edges(axis=axis, senders=senders.ravel(), receivers=receivers.ravel(), num_bytes=num_bytes[axis]))
    return found


def step_bytes_of(question: Question, plan: Plan) -> dict[str, float]:
    """Return the bytes on an edge of each axis in a step, for the rank with the most."""
    layouts, software = layouts_of(question, plan), question.software_in(plan.precision)
    pool, model = question.cluster.pools[0], question.model
    pricer = Pricer(model=model, pool=pool, software=software, constants=CONSTANTS, sequence=question.sequence)
    share = share_of(layouts, question.sequence, software)
    tp = cp = ep = 0.0
    for block, count in model.kinds:
        rows = float(np.ravel(share.num_rows(block.rows))[0])
        tp += count * 2 * rows * block.output_elements * software.width * block.num_reductions
        for operation in block.operations:
            if not isinstance(operation, (Attention, Permutation)):
                continue
            mine = float(np.ravel(share.num_rows(operation.rows))[0])
            if isinstance(operation, Attention):
                per_row = operation.kv_heads * (operation.qk_dim + operation.v_dim) * software.width / plan.tp
                cp += count * 3 * mine * per_row
            else:
                ep += count * 4 * mine * operation.elements * operation.top_k * software.width
    steps, per_stage = plan.microbatches, plan.microbatches / plan.pp
    places = typical_places(model, layouts, pricer.stages(layouts).dealt)
    counts = count_blocks(model, layouts, places, cuts_experts=software.cuts_experts)
    weights = float((counts.dense + counts.expert).max())
    replicas = plan.num_ranks // (plan.pp * plan.tp)
    ring = {name: (size - 1) / size for name, size in (("tp", plan.tp), ("dp", replicas))}
    often = {0: 2 * software.reduce_bytes, 1: software.reduce_bytes + software.width}
    often |= {2: steps * software.reduce_bytes + software.width}
    often |= {3: steps * (software.reduce_bytes + 2 * software.width)}
    hop = layouts.microbatch[0] * question.sequence / plan.cp * model.hidden * software.width
    return {
        "tp": 2 * ring["tp"] * tp * per_stage,
        "cp": (plan.cp - 1) * cp * per_stage,
        "dp": ring["dp"] * weights * often[plan.zero],
        "pp": 2 * steps * float(hop) * ((plan.num_stages or plan.pp) / plan.pp) / (plan.tp if plan.sp else 1),
        "ep": ep * per_stage / max(plan.ep, 1),
    }
