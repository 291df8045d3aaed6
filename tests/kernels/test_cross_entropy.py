"""Cross entropy, and the head with its loss in one."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Lock
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from shardwise import ShardwiseError, kernels
from shardwise.kernels.linear_cross_entropy import Ranks
from shardwise.kernels.loss_terms import chunk_tokens
from tests.kernels.against import assert_alike, outputs_of, random_of

LABELS = torch.tensor([0, 36, -100, 5, 7, -100, 20], device="cuda" if torch.cuda.is_available() else "cpu")
TERMS: list[dict[str, Any]] = [
    {},
    {"reduction": "sum", "label_smoothing": 0.2},
    {"softcap": 3.0},
    {"z_loss": 0.01, "ignore_index": 5},
    {"label_smoothing": 0.1, "softcap": 5.0, "z_loss": 0.1},
]


@pytest.mark.parametrize("terms", TERMS)
def test_losses_are_those_of_the_definition(terms: dict[str, Any]) -> None:
    labels = LABELS.clamp(min=0) if "ignore_index" in terms else LABELS
    assert_alike(kernels.cross_entropy, (random_of(7, 37), labels), **terms)
    given = random_of(7, 37, dtype=torch.bfloat16), labels
    assert_alike(kernels.cross_entropy, given, weight=torch.rand(37), **terms)
    head = random_of(7, 16), random_of(37, 16), labels
    assert_alike(
        kernels.linear_cross_entropy,
        head,
        class_weight=torch.rand(37),
        token_weight=torch.rand(7),
        chunk_bytes=3 * 37 * 4,
        **terms,
    )


def test_each_token_has_its_loss() -> None:
    assert_alike(kernels.cross_entropy, (random_of(7, 37), LABELS), reduction="none", z_loss=0.1)
    assert_alike(kernels.cross_entropy, (random_of(7, 37, dtype=torch.float16), LABELS), reduction="none")


def test_more_words_than_a_program_takes_at_a_time() -> None:
    words = 5000
    logits = random_of(3, 2 * words).detach()[:, :words].requires_grad_()  # The left half of a matrix.
    assert_alike(kernels.cross_entropy, (logits, torch.tensor([4999, 0, 4096])), label_smoothing=0.1)


def test_no_tokens_and_none_that_count() -> None:
    assert_alike(kernels.cross_entropy, (random_of(0, 9), torch.empty(0, dtype=torch.int64)), reduction="sum")
    assert_alike(kernels.cross_entropy, (random_of(2, 9), torch.tensor([-100, -100])), reduction="sum")
    empty = random_of(0, 4), random_of(9, 4), torch.empty(0, dtype=torch.int64)
    assert_alike(kernels.linear_cross_entropy, empty, reduction="sum")


def test_words_that_are_ruled_out_and_numbers_that_are_none() -> None:
    logits = torch.randn(5, 6000)
    logits[0, :4500] = -torch.inf  # All that a program takes first.
    logits[1, 7], logits[2, 8], logits[3, :] = torch.nan, torch.inf, -torch.inf
    labels = torch.tensor([5000, 7, 9, 1, 2])
    assert_alike(kernels.cross_entropy, (logits.requires_grad_(), labels), reduction="none")


def test_a_label_that_is_no_word_gives_nan() -> None:
    made = kernels.cross_entropy(random_of(2, 9), torch.tensor([3, 9]), reduction="none")
    assert made.isnan().tolist() == [False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.whole)])
@pytest.mark.parametrize("chunk", [2, 3, 100])
def test_the_head_makes_its_logits_chunk_by_chunk(chunk: int, dtype: torch.dtype) -> None:
    x, weight = random_of(7, 16, dtype=dtype), random_of(37, 16, dtype=dtype)
    assert_alike(kernels.linear_cross_entropy, (x, weight, LABELS), chunk_bytes=chunk * 37 * x.element_size())


def test_gradients_are_right_for_any_incoming_one_and_for_a_second_backward() -> None:
    x, weight = random_of(7, 16), random_of(37, 16)

    def gradients(factors: list[float], has_kernel: bool) -> list[Tensor]:
        loss = kernels.linear_cross_entropy(x, weight, LABELS, reduction="sum", kernels=has_kernel)
        return [
            each.clone()
            for factor in factors
            for each in torch.autograd.grad(loss * factor, (x, weight), retain_graph=True)
        ]

    for factors in ([1.0], [-0.37], [0.5, 0.5, 1.0], [0.0, 0.0], [2.0, 3.0]):
        torch.testing.assert_close(gradients(factors, True), gradients(factors, False), rtol=2e-5, atol=2e-6)


def test_gradients_that_were_copied_meanwhile_are_right_too() -> None:
    """As where what is kept for a backward goes to the host and comes back: each backward is given another copy."""
    x, weight = random_of(7, 16), random_of(37, 16)
    with torch.autograd.graph.saved_tensors_hooks(lambda each: each.clone(), lambda each: each.clone()):
        loss = kernels.linear_cross_entropy(x, weight, LABELS, reduction="sum")
    wanted = torch.autograd.grad(
        kernels.linear_cross_entropy(x, weight, LABELS, reduction="sum", kernels=False) * 0.5, (x, weight)
    )
    for _ in range(2):
        found = torch.autograd.grad(loss * 0.5, (x, weight), retain_graph=True)
        torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-6)


def test_the_first_gradients_stay_when_a_second_backward_comes() -> None:
    x, weight = random_of(7, 16), random_of(37, 16)
    loss = kernels.linear_cross_entropy(x, weight, LABELS)
    first = torch.autograd.grad(loss * 2.0, (x, weight), retain_graph=True)
    kept = [each.clone() for each in first]
    torch.autograd.grad(loss * 3.0, (x, weight))
    assert all(torch.equal(one, other) for one, other in zip(first, kept, strict=True))


def test_what_learns_nothing_costs_nothing() -> None:
    x, weight = random_of(7, 16), random_of(37, 16)
    for given in ((x, weight.detach()), (x.detach(), weight), (x.detach(), weight.detach())):
        assert_alike(kernels.linear_cross_entropy, (*given, LABELS))


@pytest.mark.parametrize("terms", [{}, {"label_smoothing": 0.1, "softcap": 4.0, "z_loss": 0.1}])
@pytest.mark.parametrize(("num_ranks", "num_tokens"), [(2, 7), (3, 4)], ids=["one chunk", "two chunks"])
def test_words_over_ranks_give_the_loss_of_all_words(num_ranks: int, num_tokens: int, terms: dict[str, Any]) -> None:
    """The ranks are threads of one process, which meet at every collective."""
    words, size = 37, -(-37 // num_ranks)
    x, weight, classes = random_of(7, 16), random_of(words, 16), torch.rand(words)
    wanted = outputs_of(
        lambda x, w: kernels.linear_cross_entropy(x, w, LABELS, class_weight=classes, kernels=False, **terms),
        (x, weight),
    )
    padded = torch.cat((weight.detach(), torch.randn(num_ranks * size - words, 16)))
    # Triton's interpreter keeps the program it is at in one place for the whole process: a thread at a time.
    meeting, turn, table = Barrier(num_ranks, timeout=30), Lock(), [torch.empty(0)] * num_ranks

    def rank_of(rank: int) -> list[Tensor]:
        def over(reduce: Any) -> Any:
            def together(mine: Tensor) -> Tensor:
                table[rank] = mine.clone()
                turn.release()
                meeting.wait()
                found = cast(Tensor, reduce(torch.stack(table), 0))
                meeting.wait()
                turn.acquire()
                return mine.copy_(found)  # In place, as collectives do it.

            return together

        ranks = Ranks(first=rank * size, words=words, maximum=over(torch.amax), total=over(torch.sum))
        part = padded[rank * size : (rank + 1) * size].clone().requires_grad_()
        with turn, np.errstate(all="ignore"):
            return outputs_of(
                lambda x, w: kernels.linear_cross_entropy(
                    x, w, LABELS, class_weight=classes, ranks=ranks, chunk_bytes=num_tokens * size * 4, **terms
                ),
                (x.detach().requires_grad_(), part),
            )

    with ThreadPoolExecutor(num_ranks) as threads:
        made = list(threads.map(rank_of, range(num_ranks)))
    for rank, (loss, dx, dw) in enumerate(made):
        torch.testing.assert_close(loss, wanted[0])
        torch.testing.assert_close(dx, wanted[1], rtol=2e-5, atol=2e-6)
        own = wanted[2][rank * size : (rank + 1) * size]
        torch.testing.assert_close(dw[: len(own)], own, rtol=2e-5, atol=2e-6)
        assert not dw[len(own) :].any(), "words that are padding learn nothing"


def test_chunks_are_even_and_fit() -> None:
    assert chunk_tokens(8192, 131_072, 2, 256 * 2**20) == 1024
    assert chunk_tokens(16_384, 128_256, 2, 256 * 2**20) == 1024
    assert chunk_tokens(100, 1000, 4, 2**20) == 100
    assert chunk_tokens(1000, 1000, 4, 2**20) == 256
    assert chunk_tokens(10, 1000, 4, 100) == 1
    for tokens in (1, 127, 128, 129, 5000):
        for most in (1, 100, 128, 700):
            size = chunk_tokens(tokens, 10, 2, 20 * most)
            assert 1 <= size <= max(most, 1)


def test_what_cannot_be_meant_is_refused() -> None:
    x, weight = random_of(7, 16), random_of(37, 16)
    with pytest.raises(ShardwiseError, match="returns one number"):
        kernels.linear_cross_entropy(x, weight, LABELS, reduction="none")
    with pytest.raises(ShardwiseError, match="unknown reduction 'average'"):
        kernels.cross_entropy(x, LABELS, reduction="average")
    with pytest.raises(ShardwiseError, match=r"softcap=0 is not above 0"):
        kernels.cross_entropy(x, LABELS, softcap=0)
    with pytest.raises(ShardwiseError, match=r"label_smoothing=2 is not between"):
        kernels.cross_entropy(x, LABELS, label_smoothing=2)
    with pytest.raises(ShardwiseError, match=r"logits of shape \(2, 3, 4\) and labels of shape \(2, 3\)"):
        kernels.cross_entropy(torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64))
