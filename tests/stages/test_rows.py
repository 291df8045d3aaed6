"""What of a batch is cut along its rows, what is not, and what is refused because it could be either."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from shardwise.errors import ShardwiseError
from shardwise.stages.batch import cut_batch, length_of
from shardwise.stages.rows import RowRule, check_openable, rows, whole


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclass
class Target:
    labels: Tensor
    name: str = "t"


def test_rows_are_cut_wherever_they_are_and_containers_keep_their_kind() -> None:
    x = torch.arange(4)
    batch = {
        "x": x, "inner": {"y": x, "z": [x, {"deep": x}]}, "pair": Pair(x, torch.zeros(3)), "target": Target(x),
        "more": OrderedDict(y=x), "names": ["a", "b", "c", "d"], "table": torch.zeros(3), "number": 7,
    }  # fmt: skip
    first, last = cut_batch(batch, 2)
    assert last["x"].tolist() == last["inner"]["y"].tolist() == last["inner"]["z"][1]["deep"].tolist() == [2, 3]
    assert isinstance(last["pair"], Pair)
    assert last["pair"].first.tolist() == last["target"].labels.tolist() == last["more"]["y"].tolist() == [2, 3]
    assert last["pair"].second is batch["pair"].second  # type: ignore[attr-defined]
    assert (first["names"], last["names"]) == (["a", "b"], ["c", "d"])
    assert last["table"] is batch["table"]
    assert (last["number"], length_of(last), batch["target"].labels.tolist()) == (7, 2, [0, 1, 2, 3])  # type: ignore[attr-defined]


@pytest.mark.parametrize("given", [[1, 2, 3, 4], (1.0, 2.0, 3.0, 4.0), [torch.zeros(4)] * 4], ids=str)
def test_a_list_that_could_be_either_is_refused_until_it_is_marked(given: Any) -> None:
    with pytest.raises(ShardwiseError, match=r"is there one for each row") as refused:
        cut_batch({"x": torch.arange(4), "given": given}, 2)
    assert "sw.rows" in str(refused.value)
    assert len(cut_batch({"x": torch.arange(4), "given": rows(given)}, 2)[0]["given"]) == 2
    assert cut_batch({"x": torch.arange(4), "given": whole(given)}, 2)[0]["given"] is given


def test_what_was_no_rows_once_is_none_when_it_is_as_long_as_a_batch() -> None:
    rule, table = RowRule(), torch.zeros(4, 2)
    assert rule.look({"x": torch.zeros(8, 2), "y": torch.zeros(8), "table": table}).paths == {"x", "y"}
    assert rule.look({"x": torch.zeros(4, 2), "y": torch.zeros(4), "table": table}).paths == {"x", "y"}
    assert rule.uncut == {"table"}


def test_what_was_cut_and_is_not_as_long_as_a_later_batch_is_refused() -> None:
    rule, table = RowRule(), torch.zeros(4, 2)
    rule.look({"x": torch.zeros(4, 2), "y": torch.zeros(4), "table": table})
    with pytest.raises(ShardwiseError, match=r"table has 4 entries in a batch of 8 rows, .* was cut"):
        rule.look({"x": torch.zeros(8, 2), "y": torch.zeros(8), "table": table})


def test_a_batch_is_as_long_as_most_of_its_tensors_and_those_that_forward_takes() -> None:
    table = torch.zeros(3)
    assert RowRule().length({"table": table, "x": torch.zeros(8), "y": torch.zeros(8)}) == 8
    assert RowRule({"x": 1}).length({"table": table, "x": torch.zeros(8)}) == 8
    assert RowRule().length({"names": ["a"] * 5, "x": whole(table)}) == 5


@pytest.mark.parametrize("given", [pack_sequence([torch.zeros(2)]), type("Graph", (), {})()], ids=["packed", "object"])
def test_what_nobody_can_see_into_is_refused(given: Any) -> None:
    if not isinstance(given, tuple):
        given.nodes = torch.zeros(4)
    with pytest.raises(ShardwiseError, match="given is a"):
        check_openable({"x": torch.zeros(4), "given": given})


def test_tensors_in_a_list_alone_do_not_say_how_many_rows_there_are() -> None:
    with pytest.raises(ShardwiseError, match="has its tensors in a list"):
        RowRule().look({"images": [torch.zeros(3, 4, 4)] * 2})
