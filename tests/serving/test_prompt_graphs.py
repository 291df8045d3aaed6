"""Pieces between attentions, of a fixed number of tokens: when they are captured, and that they give the same."""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from shardwise.serving.prompt_graphs import PATIENCE, SIZES, PromptGraphs


class TwoLayers:
    """Pieces that mix what they are given with the residual, each in its own way."""

    num_pieces = 3

    def run_piece(self, number: int, given: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        residual = given * 0 if residual is None else residual + given.mean(1, keepdim=True)
        wider = 6 if number < 2 else 4
        return (residual.sum(1, keepdim=True) + number + given[:, :1]).expand(-1, wider).clone(), residual


def ran(work: Callable[[], None]) -> Callable[[], None]:
    """What a capture is without a GPU: the work is done, and done again."""
    work()
    return work


def made(graphs: PromptGraphs, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """A step: attention sees the first numbers of the product, twice as large."""
    run, given, residual = graphs.runner(TwoLayers(), len(hidden)), hidden, None
    for number in range(2):
        product, residual = run(number, given, residual)
        given = product[:, :5] * 2
    return run(2, given, residual)


def graphs(capture: Callable[[Callable[[], None]], Callable[[], None]] = ran) -> PromptGraphs:
    return PromptGraphs(width=4, seen_width=5, like=torch.zeros(1), capture=capture)


def test_captured_pieces_give_what_the_pieces_give_whatever_is_left_over() -> None:
    told = graphs()
    for count in [70] * (PATIENCE + 1) + [64 + 1, 128, 3, 99]:
        hidden = torch.randn(count, 4)
        for one, other in zip(made(told, hidden), made(graphs(), hidden), strict=True):
            assert one.shape == other.shape == (count, 4)
            assert torch.equal(one, other)
    assert list(told._captured) == [128]


def test_a_size_is_captured_once_it_has_come_often() -> None:
    told = graphs()
    for _ in range(PATIENCE):
        told.runner(TwoLayers(), SIZES[0])
        told.runner(TwoLayers(), SIZES[-1] + 1)
    assert not told._captured
    told.runner(TwoLayers(), 1)
    assert list(told._captured) == [SIZES[0]]


def test_what_cannot_be_captured_runs_as_it_is() -> None:
    def refuse(_: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("no graph can hold this")

    told = graphs(refuse)
    with_warning = []
    for _ in range(PATIENCE + 2):
        hidden = torch.randn(9, 4)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for one, other in zip(made(told, hidden), made(graphs(), hidden), strict=True):
                assert torch.equal(one, other)
        with_warning += [str(each.message) for each in caught]
    assert with_warning == ["steps with prompts run without CUDA graphs (RuntimeError: no graph can hold this)"]
