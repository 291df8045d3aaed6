"""What the planner says of plans in fp8."""

import pytest

from shardwise.errors import ShardwiseError
from shardwise.model.activations import narrow_bytes
from shardwise.model.load import load_model
from shardwise.model.share import Share
from shardwise.planner.account import account
from shardwise.planner.plan import Plan
from shardwise.planner.question import make_question


def test_layers_in_fp8_keep_less_and_are_faster() -> None:
    question = make_question("llama3.2-1b", cluster="1xh200", batch=4, sequence=4096)
    wide, narrow, rows = (account(question, Plan(precision=each)) for each in ("bf16", "fp8", "fp8-rows"))
    assert narrow.seconds < wide.seconds
    assert max(rank.total for rank in narrow.ranks) < max(rank.total for rank in wide.ranks)
    assert rows.seconds == narrow.seconds


def test_what_is_kept_for_a_matmul_alone_shrinks_and_what_attention_keeps_does_not() -> None:
    block = next(block for block, _ in load_model("llama3.2-1b").kinds if block.stack)
    # A row: two norms of 2048 and a gate of 8192 in one byte less; what attention gives, 2048, in one byte more.
    assert narrow_bytes(block.operations, Share()) == 2 * 2048 + 8192 - 2048


def test_gpus_without_8_bit_products_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHARDWISE_EMULATE_FP8", raising=False)
    question = make_question("llama3.2-1b", cluster="1xa100-80g", batch=4, sequence=4096)
    with pytest.raises(ShardwiseError, match=r"precision=fp8: a100-80g multiplies in bf16.*and not in 8 bits"):
        account(question, Plan(precision="fp8"))
