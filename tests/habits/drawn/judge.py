"""Cases on the ranks of a plan, each held against plain torch."""

import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.errors import ShardwiseError
from shardwise.parity.problem import microbatches_of
from shardwise.planner.plan import Plan
from shardwise.ranks.wires import make_wires
from tests.habits.drawn.cases import Case, make_module
from tests.habits.drawn.trainings import LOSSES, OPTIMIZERS, UNEVEN_LOSSES, batch
from tests.stages.small import small_matrices

STEPS = 4
#: How far apart numbers may be, of the largest of their tensor; and in double precision, where rounding is no matter.
TOLERANCE, IN_DOUBLE = 1e-5, 1e-8
_LIMIT_SECONDS = 60.0

#: What may come of a case, the worst last. `unfit`: plain torch cannot train it, so there is nothing to compare.
KINDS = ("equal", "refused", "unfit", "late", "crash", "wrong")
_EVERY_LOSS = {**LOSSES, **UNEVEN_LOSSES}
FAILS = ("late", "crash", "wrong")


@dataclass
class Verdict:
    """What came of a case, and what was said or differs."""

    kind: str
    said: str = ""
    worst: float = 0.0
    #: Layers that a warning says are whole.
    warned: int = 0


def judge(cases: Sequence[Case]) -> list[Verdict]:
    """Cases on this rank of several; every rank has the same verdicts. Those of one plan share their wires."""
    found: dict[int, Verdict] = {}
    with small_matrices():
        for plan in dict.fromkeys(each.plan for each in cases):
            wires: Any = None
            for number, case in enumerate(cases):
                if case.plan != plan:
                    continue
                if wires is None:
                    wires = make_wires(Plan.parse(plan), limit_seconds=_LIMIT_SECONDS)
                found[number], is_alike = _judged(case, wires)
                if not is_alike or found[number].kind not in ("equal", "unfit"):
                    wires.watch.close()
                    wires = None
            if wires is not None:
                wires.watch.close()
    return [found[number] for number in range(len(cases))]


def _judged(case: Case, wires: Any) -> tuple[Verdict, bool]:
    """The joint verdict of all ranks, and whether all came to one kind."""
    # Attention that rounds to float32 by itself may round otherwise where a matmul has other rows.
    in_double = 100 * IN_DOUBLE if "'softmax': 'float'" in str(case.blocks) else IN_DOUBLE
    for dtype, tolerance in ((torch.float32, TOLERANCE), (torch.float64, in_double)):
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, _tried(case, dtype, tolerance, wires))
        verdict = max(told, key=lambda each: KINDS.index(each.kind))
        is_alike = len({each.kind for each in told}) == 1
        if {each.kind for each in told} >= {"equal", "refused"}:
            verdict.kind = "crash"
            verdict.said = f"refused by some ranks alone: {verdict.said}"
        # What differs in one precision and not in double is rounding.
        if verdict.kind != "wrong" or not verdict.worst < 0.3:
            break
    return verdict, is_alike


def _tried(case: Case, dtype: torch.dtype, tolerance: float, wires: Any) -> Verdict:
    try:
        wanted = _plainly(case, dtype)
    except Exception as error:
        return Verdict("unfit", f"{type(error).__name__}: {error}")
    if not all(torch.isfinite(each).all() for each in wanted.values() if each.is_floating_point()):
        return Verdict("unfit", "not finite")
    came: dict[str, Tensor] = {}
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            _under_plan(case, dtype, wires, came)
        verdict = _compared(came, wanted, tolerance)
        verdict.warned = sum("whole on every rank" in str(each.message) for each in warned)
        return verdict
    except ShardwiseError as error:
        return Verdict("late" if len(came) > 1 else "refused", str(error))
    except Exception:
        return Verdict("crash", traceback.format_exc())


def _under_plan(case: Case, dtype: torch.dtype, wires: Any, came: dict[str, Tensor]) -> None:
    module = make_module(case, dtype)
    example = _batch(case, 0, dtype)
    more: dict[str, Any] = {}
    if "cp" in case.plan:
        more = {"positions": None, "entries": {"x": 1, "weights": None}}
    engine = sw.parallelize(
        module, case.plan, loss=_EVERY_LOSS[case.loss].of, example=example, clip=case.clip, wires=wires,
        optimizer=lambda parameters: OPTIMIZERS[case.optimizer](module, list(parameters)), **more,
    )  # fmt: skip
    with engine:
        for step in range(STEPS):
            came[f"loss {step}"] = torch.tensor(engine.train_step(_batch(case, step, dtype)), dtype=torch.float64)
        came.update({name: each for name, each in engine.state_dict().items() if isinstance(each, Tensor)})


def _batch(case: Case, step: int, dtype: torch.dtype) -> dict[str, Tensor]:
    return batch(1000 * case.seed + step, takes_ids=case.takes_ids, dtype=dtype)


def _plainly(case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    """Plain torch: the loss of a batch is that of all its microbatches, each of all replicas together."""
    module, plan = make_module(case, dtype), Plan.parse(case.plan)
    optimizer = OPTIMIZERS[case.optimizer](module, list(module.parameters()))
    # A batch norm sees the rows of one replica, as under DDP; its statistics are those of all in turn.
    has_statistics = any(isinstance(each, nn.BatchNorm1d) for each in module.modules())
    counts = any(each.kind == "Buffers" for block in case.blocks for each in block)
    counts = counts or any(name == "spectral_norm" for name, _ in case.hangs)
    if has_statistics and plan.dp > 1 and counts:
        raise ValueError("one device that has all replicas in turn would count too often")
    if has_statistics and plan.dp * plan.microbatches > 1 and case.loss in UNEVEN_LOSSES:
        raise ValueError("a batch norm sees the rows of one part, and the loss that the user meant is of all")
    if plan.microbatches > 1 and counts and case.loss in UNEVEN_LOSSES:
        raise ValueError("what the user meant is one forward of the whole batch, and microbatches are counted")
    if plan.microbatches > 1 and _writes_twice(case):
        raise ValueError("a second forward writes to buffers, before or after that of other microbatches")
    found: dict[str, Tensor] = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        pieces = microbatches_of(_batch(case, step, dtype), plan, apart=has_statistics)
        if case.loss in UNEVEN_LOSSES:  # What the user meant is the loss of the whole batch.
            pieces = [_batch(case, step, dtype)]
        made = [_EVERY_LOSS[case.loss].of(module(each["x"]), each) for each in pieces]
        if isinstance(made[0], tuple):
            loss = sum(each[0] for each in made) / sum(each[1] for each in made)
        else:
            loss = sum(made) / len(made)
        loss.backward()
        if case.clip is not None:
            nn.utils.clip_grad_norm_([each for each in module.parameters() if each.requires_grad], case.clip)
        optimizer.step()
        found[f"loss {step}"] = loss.detach()
    return found | {name: each.detach() for name, each in module.state_dict().items() if isinstance(each, Tensor)}


def _writes_twice(case: Case) -> bool:
    """Whether a checkpoint may be around what writes to a buffer: then the order of microbatches counts."""
    arounds = {each.choices.get("around", each.choices.get("how")) for block in case.blocks for each in block}
    checkpoints = not arounds.isdisjoint(("checkpoint", "reentrant", "checkpointed"))
    return checkpoints and any(name == "spectral_norm" for name, _ in case.hangs)


def _compared(came: Mapping[str, Tensor], wanted: Mapping[str, Tensor], tolerance: float) -> Verdict:
    if came.keys() != wanted.keys():
        return Verdict("wrong", f"{sorted(came.keys() ^ wanted.keys())} on one side alone", float("inf"))
    verdict = Verdict("equal")
    for name, value in wanted.items():
        one, other = came[name].detach().double().cpu(), value.double()
        if one.shape != other.shape:
            return Verdict("wrong", f"{name} is {list(one.shape)}, not {list(other.shape)}", float("inf"))
        apart = float((one - other).abs().max() / other.abs().max().clamp_min(1e-3)) if one.numel() else 0.0
        if not apart <= verdict.worst:
            verdict.worst = apart
            if not apart <= tolerance:
                verdict.kind, verdict.said = "wrong", f"{name} is {apart:.2g} of its largest number from plain torch"
    return verdict
