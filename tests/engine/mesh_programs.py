"""What ranks run in tests of the mesh and of collectives."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.planner.plan import Plan
from shardwise.ranks import collectives as together
from shardwise.ranks.collectives import Group
from shardwise.ranks.mesh import make_mesh


def with_ep(axes: str, ep: int) -> str:
    """A plan of 8 ranks with so many for experts, whether a plan counts those among its replicas or beside them."""
    inside = Plan.parse(f"{axes},ep={ep}")
    return f"{axes},ep={ep}" if inside.num_ranks == 8 else f"{axes.replace('dp=2', 'dp=1')},ep={ep}"


def places(text: str) -> dict[str, tuple[int, ...]]:
    mesh = make_mesh(Plan.parse(text))
    return {name: mesh.ranks(name) for name in mesh.groups}


def pipelines(text: str) -> tuple[tuple[int, ...], ...]:
    return make_mesh(Plan.parse(text)).pipelines


def sums(text: str) -> tuple[bool, dict[str, float]]:
    mesh = make_mesh(Plan.parse(text))
    found = {}
    for name in ("tp", "world"):
        number = torch.tensor([float(mesh.rank)])
        found[name] = float(together.start_all_reduce(number, mesh.group(name)).finish())
    return mesh.group("dp") is mesh.group("cp"), found


def disagree(culprit: int) -> None:
    make_mesh(Plan(dp=8) if dist.get_rank() == culprit else Plan(tp=8))


def differentiated(kind: str) -> tuple[float, dict[str, int]]:
    """A collective's gradient against that of the same thing computed by one rank that has everything."""
    group = Group(dist.group.WORLD)
    size, rank = group.size, group.rank
    torch.manual_seed(0)
    everyone = [torch.randn(4 * size, 6, dtype=torch.float64).requires_grad_() for _ in range(size)]
    weights = [torch.randn(16 * size, 6 * size, dtype=torch.float64) for _ in range(size)]
    mine = everyone[rank].detach().clone().requires_grad_()
    result = _ours(kind, mine, group)
    _weighed(result, weights[rank if kind not in ("sum", "gather alike") else 0]).backward()  # type: ignore[no-untyped-call]
    total = torch.zeros((), dtype=torch.float64)
    for other in range(size):
        if kind in ("sum", "gather alike") and other:
            break  # All compute the same from it: one of them counts.
        total = total + _weighed(_by_one(kind, everyone, other), weights[other])
    total.backward()  # type: ignore[no-untyped-call]
    expected = everyone[0].grad if kind in _OF_ONE else everyone[rank].grad
    assert expected is not None
    assert mine.grad is not None
    assert torch.allclose(result, _by_one(kind, everyone, rank))
    return float((mine.grad - expected).abs().max()), dict(group.traffic.bytes)


#: All ranks have the same.
_OF_ONE = ("copy", "scatter", "scatter unevenly")


def _uneven(size: int, rank: int) -> int:
    """A rank's rows of one row less than four each."""
    return 3 if rank == size - 1 else 4


def _weighed(result: Tensor, weight: Tensor) -> Tensor:
    return (result * weight[: result.shape[0], : result.shape[1]]).sum()


def _sizes(size: int, rank: int) -> list[int]:
    """Rows that a rank sends to each: together all of its rows, one of them another number to each."""
    return [
        (4 * size // size) + (1 if other == (rank + 1) % size else -1 if other == rank else 0) for other in range(size)
    ]


def _ours(kind: str, mine: Tensor, group: Group) -> Tensor:
    ways: dict[str, Any] = {
        "copy": lambda: together.copy(mine, group),
        "sum": lambda: together.sum_over(mine, group),
        "gather": lambda: together.gather(mine, group, 1, used_alike=False),
        "gather alike": lambda: together.gather(mine, group, 0, used_alike=True),
        "scatter": lambda: together.scatter(mine, group, 0),
        "scatter unevenly": lambda: together.scatter(mine[:-1], group, 0),
        "gather unevenly": lambda: together.gather(
            mine[: _uneven(group.size, group.rank)], group, 0, used_alike=False, length=4 * group.size - 1
        ),
        "exchange": lambda: together.exchange(
            mine,
            group,
            _sizes(group.size, group.rank),
            [_sizes(group.size, other)[group.rank] for other in range(group.size)],
        ),
    }
    if kind in _OF_ONE:
        dist.broadcast(mine.data, 0)
    result: Tensor = ways[kind]()
    return result


def _by_one(kind: str, everyone: list[Tensor], rank: int) -> Tensor:
    size = len(everyone)
    if kind == "copy":
        return everyone[0]
    if kind == "scatter":
        return everyone[0].chunk(size)[rank]
    if kind == "scatter unevenly":
        return everyone[0][4 * rank : 4 * rank + _uneven(size, rank)]
    if kind == "gather unevenly":
        return torch.cat([each[: _uneven(size, other)] for other, each in enumerate(everyone)])
    if kind == "gather":
        return torch.cat(everyone, 1)
    if kind == "gather alike":
        return torch.cat(everyone, 0)
    if kind == "exchange":
        return torch.cat([torch.split(each, _sizes(size, other))[rank] for other, each in enumerate(everyone)])
    return torch.stack(everyone).sum(0)
