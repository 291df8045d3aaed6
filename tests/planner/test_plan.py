"""The plan as a value, and its short and file forms."""

import inspect
import pickle
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from shardwise.errors import ShardwiseError
from shardwise.planner.plan import OF_PARALLELIZE, Offload, Plan

FULL = Plan(
    dp=2,
    tp=4,
    pp=2,
    chunks=2,
    schedule="zb-v",
    microbatches=8,
    layers=(3, 4, 4, 3),
    zero=1,
    recompute="full",
    offload=Offload(optimizer=0.5),
    precision="bf16",
)


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        ("dp=1", Plan()),
        ("pp=3,schedule=zb-v,microbatches=8", Plan(pp=3, schedule="zb-v", microbatches=8)),
        ("pp=2,layers=5+6", Plan(pp=2, layers=(5, 6))),
        ("tp=2,sp=true", Plan(tp=2, sp=True)),
        (
            "dp=4,cp=2,ep=4,context=all-to-all,zero=2,zero_group=4",
            Plan(dp=4, cp=2, ep=4, context="all-to-all", zero=2, zero_group=4),
        ),
        (
            "dp=2,tp=4,pp=2,chunks=2,schedule=zb-v,microbatches=8,layers=3+4+4+3,zero=1,recompute=full,"
            "offload.optimizer=0.5,precision=bf16",
            FULL,
        ),
    ],
)
def test_the_short_form_says_what_differs_from_the_default_and_reads_back(text: str, plan: Plan) -> None:
    assert str(plan) == text
    assert Plan.parse(text) == plan


def test_no_field_is_lost_on_its_way_to_text_and_to_a_file_and_back() -> None:
    plan = Plan(
        dp=2,
        tp=2,
        pp=2,
        cp=2,
        ep=2,
        sp=True,
        context="all-to-all",
        schedule="interleaved",
        chunks=3,
        microbatches=4,
        layers=(1, 2, 3, 4, 5, 6),
        zero=1,
        zero_group=2,
        recompute="full",
        recompute_layers=1,
        offload=Offload(optimizer=0.25, parameters=0.5, activations=0.75),
        precision="bf16",
        order="dp-pp-cp-tp",
        reasons={"pp": "why not"},
    )
    as_by_default = [each.name for each in fields(Plan) if getattr(plan, each.name) == getattr(Plan(), each.name)]
    assert not as_by_default, "a field that is new is to be said here too"
    assert Plan.parse(str(plan)) == Plan.from_toml(plan.to_toml()) == plan


def test_a_share_that_is_no_round_number_reads_back_exactly() -> None:
    plan = Plan(offload=Offload(activations=1 / 3))
    assert Plan.parse(str(plan)) == Plan.from_toml(plan.to_toml()) == plan


def test_spaces_order_and_a_comma_too_many_do_not_matter() -> None:
    assert Plan.parse(" microbatches = 8 , pp=3,") == Plan(pp=3, microbatches=8)
    assert Plan.parse("") == Plan()


def test_the_file_form_reads_back_with_its_reasons() -> None:
    reasons = {"pp": 'the model needs "91 GiB"\nand one device has 79', "offload.optimizer": "ÅÄÖ 🙂 \x7f"}
    plan = replace(FULL, reasons=reasons)
    again = Plan.from_toml(plan.to_toml())
    assert again == plan
    assert again.reasons == reasons


def test_the_file_form_is_meant_to_be_read() -> None:
    plan = Plan(pp=2, microbatches=8, layers=(5, 6), reasons={"dp": "one batch fits", "pp": "two devices"})
    assert plan.to_toml() == (
        "# pp=2,microbatches=8,layers=5+6: 2 ranks\n"
        "dp = 1\npp = 2\nmicrobatches = 8\nlayers = [5, 6]\n\n"
        '[reasons]\n"dp" = "one batch fits"\n"pp" = "two devices"\n'
    )


def test_a_file_is_loaded_and_one_that_is_missing_is_named(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(FULL.to_toml(), encoding="utf-8")
    assert Plan.load(path) == FULL
    with pytest.raises(ShardwiseError, match=r"nowhere\.toml cannot be read: No such file"):
        Plan.load(tmp_path / "nowhere.toml")


def test_a_plan_travels_to_other_processes_and_can_be_a_key() -> None:
    plan = Plan(pp=2, reasons={"pp": "why not"})
    again = pickle.loads(pickle.dumps(plan))
    assert again == plan
    assert again.reasons == plan.reasons
    assert {plan: 1}[again] == 1


def test_the_ranks_are_the_product_of_the_axes() -> None:
    assert Plan(dp=2, tp=3, pp=5, cp=7).num_ranks == 2 * 3 * 5 * 7


def test_experts_are_shared_out_among_ranks_that_are_there_anyway() -> None:
    assert Plan(dp=4, cp=3, ep=6, pp=2).num_ranks == 24


@pytest.mark.parametrize(
    ("text", "num_stages"),
    [
        ("pp=3", 3),
        ("pp=3,schedule=zb-v", 6),
        ("pp=2,schedule=interleaved,chunks=3", 6),
        ("pp=4,schedule=chimera,microbatches=4", 4),
        ("pp=4,schedule=auto", None),
    ],
)
def test_stages_are_ranks_times_chunks_of_one_copy_of_the_model(text: str, num_stages: int | None) -> None:
    assert Plan.parse(text).num_stages == num_stages


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("pq=2", "unknown plan key 'pq'; known: dp, tp, pp,"),
        ("microbatch=2", "try: microbatches"),
        ("pp", "'pp' in the plan 'pp' has no value\n  try: pp=2"),
        ("pp=2,pp=3", "the plan 'pp=2,pp=3' says pp twice: 2 and 3\n  try: pp=3"),
        ("pp=two", "pp=two in the plan wants a whole number\n  try: pp=2"),
        ("dp=2,pp=0", "pp=0: an axis has at least 1 rank (dp=2 x tp=1 x pp=0 x cp=1 = 0 ranks)\n  try: pp=1"),
        (
            "dp=3,ep=2",
            "ep=2 does not divide the 3 ranks that hold the same dense weights (dp=3 x cp=1)\n  try: ep=1",
        ),
        ("dp=4,zero=1,zero_group=3", "zero_group=3 does not divide the 4 replicas (dp=4 x cp=1)\n  try: zero_group=2"),
        ("sp=true", "sp=true cuts sequences over the ranks of tp, and tp=1\n  try: tp=2,sp=true"),
        ("tp=2,sp=yes", "sp=yes in the plan wants true or false\n  try: sp=true"),
        ("cp=2,context=rings", "unknown context 'rings'; known: ring, all-to-all\n  try: context=ring"),
        ("zero=4", "zero=4: the ZeRO stage is 0, 1, 2 or 3\n  try: zero=1"),
        ("schedule=zbv", "try: schedule=zb-v"),
        ("recompute=ful", "unknown recompute 'ful'; known: none, selective, full\n  try: recompute=full"),
        ("precision=fp4", "unknown precision 'fp4'; known: fp32, bf16, fp16, fp8, fp8-rows"),
        ("offload.optimizer=2", "offload.optimizer=2: a share is from 0 (none) to 1 (all)\n  try: offload.optimizer=1"),
        ("offload.optimizer=some", "wants a number from 0 to 1\n  try: offload.optimizer=0.5"),
        ("microbatches=0,pp=2", "microbatches=0: a step has at least 1\n  try: microbatches=4"),
        ("pp=3,schedule=chimera,microbatches=4", "try: pp=4"),
        ("pp=4,schedule=dualpipe-v,microbatches=4", "try: microbatches=8"),
        ("pp=2,schedule=zb-v,chunks=3", "try: chunks=2, or a schedule that takes any number"),
        (
            "pp=2,schedule=zb-v,layers=4+4",
            "layers=4+4 is for 2 stages, but pp=2 with schedule=zb-v and 2 chunks on a rank makes 4\n"
            "  try: layers=4+4+4+4",
        ),
    ],
)
def test_what_is_wrong_with_a_plan_alone_is_said_when_it_is_made(text: str, error: str) -> None:
    with pytest.raises(ShardwiseError) as caught:
        Plan.parse(text)
    assert error in str(caught.value)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("pp = ", "the plan is not TOML"),
        ("pp = true", "pp=True in the plan wants a whole number"),
        ("schedule = 1", 'schedule=1 in the plan wants a word\n  try: schedule = "1f1b"'),
        ("layers = 3", "layers=3 in the plan wants the units of each stage"),
        ("reasons = 3", "reasons = 3 in the plan is not a table"),
        ("[reasons]\nqp = 'x'", "unknown plan key with a reason 'qp'"),
        ("[offload]\noptimiser = 1", "try: offload.optimizer"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(text: str, error: str) -> None:
    with pytest.raises(ShardwiseError) as caught:
        Plan.from_toml(text)
    assert error in str(caught.value)


def test_another_number_of_processes_is_refused_with_the_product() -> None:
    with pytest.raises(ShardwiseError) as caught:
        Plan(dp=2, tp=4, pp=2).check_world(8)
    assert caught.value.problem == "plan dp=2,tp=4,pp=2 needs 16 ranks but there are 8"
    with pytest.raises(ShardwiseError, match="plan dp=1 needs 1 rank but there are 2"):
        Plan().check_world(2)
    Plan(dp=2, pp=2).check_world(4)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"dp": "two"}, "dp=two in the plan wants a whole number"),
        ({"dp": "2"}, "dp='2' of a plan is a text"),
        ({"tp": 2.5}, "tp=2.5 in the plan wants a whole number"),
        ({"pp": True}, "pp=True in the plan wants a whole number"),
        ({"layers": "4+4"}, "layers='4+4' of a plan is a text"),
        ({"schedule": 3}, "schedule=3 in the plan wants a word"),
        ({"sp": "yes"}, "sp=yes in the plan wants true or false"),
        ({"offload": 0.5}, "offload=0.5 is no Offload"),
    ],
    ids=str,
)
def test_a_value_of_another_kind_is_refused_in_python_too(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ShardwiseError, match=re.escape(said)):
        Plan(**given)


def test_what_parallelize_takes_is_no_key_of_a_plan() -> None:
    arguments = list(inspect.signature(sw.parallelize).parameters)
    assert sorted(OF_PARALLELIZE) == sorted(set(arguments) - {"module", "plan"})
