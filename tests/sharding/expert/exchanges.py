"""What ranks run in tests of the exchange itself: its order, its bytes, its drops."""

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from shardwise.nets.moe import MoE
from shardwise.nets.router import Choice
from shardwise.planner.plan import Plan
from shardwise.ranks.collectives import Pending, start_all_to_all
from shardwise.ranks.mesh import make_mesh
from shardwise.sharding.expert import Placement, dispatch, shard_experts
from shardwise.sharding.expert.dispatch import Dispatch
from shardwise.sharding.wrap_forward import wrap_forward
from tests.sharding.expert.models import IGNORED, make_batch, make_model, with_capacity
from tests.sharding.expert.programs import finish, loss_of, part_of, summed
from tests.stages.small import small_matrices


class Noting(nn.Module):
    """Experts that return their rows, and note how these lay."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[str] = []

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        assert counts.tolist() == [2, 2]
        self.rows = [f"{'ab'[int(row) // 10]}{int(row) % 10}" for row in rows.flatten()]
        return rows


def drawn() -> tuple[str, bool]:
    """The rows that experts of this rank see, of those drawn in `dispatch.py`; and if all came back as sent."""
    group = make_mesh(Plan.parse("dp=2,ep=2")).group("ep")
    rows, experts = torch.arange(4.0)[:, None] + 10 * group.rank, Noting()
    back, _ = Dispatch(group, Placement.even(4, 2)).exchange_sorted(experts, rows, torch.ones(4).long(), lambda: None)
    return " ".join(experts.rows), back.equal(rows)


def order_of_events(model: str, shared: str, overlap: bool) -> list[str]:
    """When rows of a layer depart and land, and when its shared expert is computed: forward, then backward."""
    events: list[str] = []

    class Noted(Pending):
        def finish(self) -> Tensor:
            events.append("land")
            return super().finish()

    def start(*args: Any) -> Pending:
        if not args[0].is_floating_point():
            return start_all_to_all(*args)  # Counts, which go ahead of the rows.
        events.append("depart")
        found = start_all_to_all(*args)
        return Noted(found._work, found._result, found._group, found._kind)

    with small_matrices():
        module = make_model(model)
        shard_experts(module, make_mesh(Plan.parse("dp=2,ep=2")), overlap=overlap)
        note = module.get_submodule(f"{shared}.up_proj")
        note.register_forward_hook(lambda *_: events.append("shared"))
        note.register_full_backward_hook(lambda *_: events.append("shared"))
        layer = module.get_submodule(shared.rpartition(".")[0])
        with patch.object(dispatch, "start_all_to_all", start):
            output = layer(torch.randn(2, 5, 32, requires_grad=True))
            output = output[0] if isinstance(output, tuple) else output
            events.append("|")
            output.sum().backward()
    return events


def bytes_of_an_even_load(plan: str) -> tuple[int, int, int]:
    """The bytes that this rank sends in forward and backward, where every expert is chosen as often by every rank.

    And the number of tokens and of layers.
    """

    def in_turn(router: Callable[[Tensor], Choice], tokens: Tensor) -> Choice:
        chosen = torch.arange(2 * len(tokens)).view(-1, 2) % 8
        scores = router(tokens).scores
        return Choice(chosen, scores.gather(1, chosen), scores)

    with small_matrices():
        mesh, module, batch = make_mesh(Plan.parse(plan)), make_model("ours like mixtral"), make_batch(8, 8)
        layers = [each for each in module.modules() if isinstance(each, MoE)]
        for layer in layers:
            wrap_forward(layer.router, in_turn)
        sharding = shard_experts(module, mesh)
        part = part_of(batch, mesh)
        sharding.group.traffic.clear()
        loss_of(module, part, 1).backward()  # type: ignore[no-untyped-call]
        return sharding.group.traffic.bytes["all_to_all"], part["input_ids"].numel(), len(layers)


def drops(capacity: float) -> tuple[float, float]:
    """With a capacity: how far loss and gradients are from those of one device that has the whole batch."""
    with small_matrices():
        mesh, module, batch = make_mesh(Plan.parse("dp=2,ep=2")), with_capacity(capacity), make_batch()
        num_labels = int((batch["labels"] != IGNORED).sum())
        reference = copy.deepcopy(module)
        wanted = loss_of(reference, batch, num_labels)
        wanted.backward()  # type: ignore[no-untyped-call]
        sharding = shard_experts(module, mesh)
        loss = loss_of(module, part_of(batch, mesh), num_labels)
        loss.backward()  # type: ignore[no-untyped-call]
        finish(module, sharding)
        worst = 0.0
        for (name, each), expected in zip(module.named_parameters(), reference.parameters(), strict=True):
            assert each.grad is not None
            assert expected.grad is not None
            error = (sharding.gather(name, each.grad) - expected.grad).norm() / expected.grad.norm().clamp(min=1e-6)
            worst = max(worst, float(error))
        return abs(float(summed(loss, mesh.group("dp"))) / float(wanted.detach()) - 1), worst
