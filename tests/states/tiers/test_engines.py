"""Plans with a host: the same training bit for bit, the bytes that the planner says, and a refusal where it is full."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.engine.engine import Engine
from shardwise.errors import ShardwiseError
from shardwise.model.load import load_model
from shardwise.nets.hf.catalogue import config_for
from shardwise.planner.account import hold
from shardwise.planner.plan import Plan
from shardwise.planner.question import make_question
from shardwise.ranks.spawn import Ranks
from shardwise.states import host as room
from tests.crowd import Crowds
from tests.engine import going_on
from tests.stages.small import small_matrices

HOST = "offload.optimizer=1,offload.activations=1"


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    with small_matrices():
        yield


def run(plan: str, optimizer: str = "adamw") -> tuple[list[float], dict[str, Tensor], dict[str, Any], int]:
    """Losses, weights, what optimizers remember, and the bytes on the host."""
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    # Four layers where there are as many stages.
    model = "dense" if "zb-v" in plan else "two layers"
    with going_on.make_engine(plan, model, optimizer) as engine:
        losses = going_on.train(engine, 0, 3)
        weights = {name: each.clone() for name, each in engine.state_dict().items()}
        return losses, weights, engine.optimizer_state_dict(), engine.host_bytes


def assert_same(ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> None:
    assert ours[0] == theirs[0]
    assert all(torch.equal(each, theirs[1][name]) for name, each in ours[1].items())
    assert ours[2]["param_groups"] == theirs[2]["param_groups"]
    for name, entries in theirs[2]["state"].items():
        assert ours[2]["state"][name].keys() == entries.keys()
        assert all(torch.equal(ours[2]["state"][name][key], each) for key, each in entries.items()), name


@pytest.mark.parametrize(
    ("plan", "host"),
    [
        ("dp=1", HOST),
        ("pp=2,microbatches=2", "offload.optimizer=0.5"),
        ("pp=2,schedule=zb-v,microbatches=4", HOST),
        ("pp=2,schedule=pipedream-2bw,microbatches=2", HOST),
        ("microbatches=2,precision=bf16", HOST),
        ("pp=2,microbatches=2,recompute=full", "offload.optimizer=1"),
    ],
)
def test_one_process_trains_to_the_same_bits(plan: str, host: str) -> None:
    ours, theirs = run(f"{plan},{host}"), run(plan)
    assert_same(ours, theirs)
    assert ours[3] > 0 == theirs[3]


@pytest.mark.parametrize(
    ("plan", "optimizer"),
    [
        ("dp=2,zero=3", "adamw"),
        pytest.param("dp=2,tp=2,zero=1", "muon", marks=pytest.mark.whole),
        ("dp=2,pp=2,schedule=zb-h1,microbatches=4,zero=2", "adafactor"),
        ("pp=2,microbatches=4", "sgd"),
    ],
)
def test_ranks_train_to_the_same_bits(plan: str, optimizer: str, crowds: Crowds) -> None:
    ranks = crowds.of(Plan.parse(plan).num_ranks)
    ours, theirs = ranks.run(run, f"{plan},{HOST}", optimizer), ranks.run(run, plan, optimizer)
    for mine, other in zip(ours, theirs, strict=True):
        assert_same(mine, other)
        assert mine[3] > 0


def bytes_on_host(plan: str) -> int:
    with going_on.make_engine(plan, "dense", "adamw") as engine:
        going_on.train(engine, 0, 1)
        return engine.host_bytes


@pytest.mark.parametrize(
    "plan",
    [
        "dp=4",
        "dp=4,zero=1",
        pytest.param("tp=2,dp=2,zero=3", marks=pytest.mark.whole),
        "pp=4,microbatches=4,layers=1x4",
    ],
)
def test_the_planner_counts_what_the_engines_keep_there(plan: str, four: Ranks) -> None:
    text = f"{plan.replace('layers=1x4', 'layers=1+1+1+1')},offload.optimizer=1"
    family, config = config_for(going_on.MODELS["dense"], None)
    question = make_question(load_model(config), cluster="4xcpu", batch=8, sequence=8)
    expected = [rank.on_host for rank in hold(question, Plan.parse(text))]
    found = four.run(bytes_on_host, text)
    assert family.name
    if "pp" in plan:
        # Stages of the engines are cut by units, of the planner by layers: the ends may lie elsewhere.
        assert sum(found) == pytest.approx(sum(expected), rel=0.1)
    else:
        assert found == pytest.approx([expected[0]] * 4, rel=0.02)


def test_a_step_that_is_not_finite_leaves_all_as_it_was() -> None:
    with going_on.make_engine(f"dp=1,{HOST}", "two layers", "adamw") as engine:
        going_on.train(engine, 0, 2)
        before = {name: each.clone() for name, each in engine.state_dict().items()}
        name, parameter = next(iter(engine.parameters.items()))
        with torch.no_grad():
            parameter.view(-1)[0] = torch.nan
        engine.train_step(going_on.batch(2))
        assert not engine.was_finite
        with torch.no_grad():
            parameter.copy_(before[name])
        engine.train_step(going_on.batch(2))
        ours = {name: each.clone() for name, each in engine.state_dict().items()}
    theirs = run("dp=1")[1]
    assert all(torch.equal(each, theirs[name]) for name, each in ours.items())


def optimizer_bytes(engine: Engine) -> float:
    engine.train_step(going_on.batch(0), trace=True)
    assert engine.trace is not None
    return sum(each.num_bytes for each in engine.trace.holdings if each.owner == "optimizer")


def test_a_trace_tells_of_the_device_and_not_of_the_host() -> None:
    found = []
    for plan in ("dp=1", "dp=1,offload.optimizer=1"):
        with going_on.make_engine(plan, "dense", "adamw") as engine:
            engine.train_step(going_on.batch(0))
            found.append((optimizer_bytes(engine), engine.host_bytes))
    (here, none), (left, away) = found
    assert none == 0
    assert here - left == away
    assert left < 0.01 * here  # Counts of steps.


def refused(plan: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "available_bytes", lambda: 5000)
        with pytest.raises(ShardwiseError) as caught:
            going_on.make_engine(plan, "dense", "adamw")
    return f"{caught.value.problem}; {caught.value.remedy}"


def test_a_host_without_room_is_refused_by_all_ranks_before_a_step(four: Ranks) -> None:
    said = four.run(refused, "dp=4,offload.optimizer=1")
    assert len(set(said)) == 1
    assert said[0].startswith("offload.optimizer=1 of 4 ranks of this machine needs ")
    assert said[0].endswith(", or zero=1")
    assert "which has 4.9 KiB available" in refused("dp=1,offload.optimizer=1")
