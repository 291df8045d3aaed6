"""What a loss is a mean over, found with numbers: from outside, by what `tests/habits/losses.py` trains."""

import random
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm

from shardwise.errors import ShardwiseError
from shardwise.stages.carried_over import find_carried
from shardwise.stages.label_counts import LabelCounts
from shardwise.stages.loss_kind import LossKind, Tried
from shardwise.stages.loss_trial import try_loss
from shardwise.stages.losses import WeighedLoss
from shardwise.stages.rows import RowRule
from shardwise.stages.split.python_draws import seed_python
from shardwise.stages.token_trial import try_tokens
from shardwise.stages.trial_run import Trial


def example(num_rows: int = 4) -> dict[str, Tensor]:
    torch.manual_seed(0)
    made = {"input": torch.randn(num_rows, 5, 6), "labels": torch.randint(1, 7, (num_rows, 5))}
    return {**made, "mask": torch.ones(num_rows, 5)}


def tokens(output: Tensor, batch: Any, **how: Any) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), **how)


def by_mask(output: Tensor, batch: Any) -> Any:
    return (tokens(output, batch, reduction="none") * batch["mask"].flatten()).sum() / batch["mask"].sum()


CASES: dict[LossKind, Any] = {
    LossKind.LABELS: tokens,
    LossKind.SUM: lambda output, batch: tokens(output, batch, reduction="sum"),
    LossKind.ROWS: lambda output, batch: tokens(output, batch, reduction="none").mean(),
    LossKind.ENTRY: by_mask,
    LossKind.EVEN: lambda output, batch: tokens(output, batch) + output.square().mean(),
    LossKind.PAIR: lambda output, batch: (tokens(output, batch, reduction="sum"), batch["labels"].numel()),
}


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("num_rows", [1, 2, 4])
def test_the_kind_of_a_loss_is_found_from_few_rows(kind: LossKind, num_rows: int) -> None:
    tried = try_loss(nn.Linear(6, 8), CASES[kind], example(num_rows), RowRule({"input": None}))
    assert (tried.kind, tried.problem) == (kind, None)


def test_the_module_and_random_numbers_are_as_they_were() -> None:
    module = nn.Sequential(nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(6, 8))
    given, before = example(), {name: each.clone() for name, each in module.state_dict().items()}
    state = torch.get_rng_state()
    try_loss(module, tokens, given, RowRule({"input": None}))
    assert module.training
    assert all(torch.equal(each, before[name]) for name, each in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_loss_that_hangs_on_other_rows_is_refused_with_its_numbers() -> None:
    def contrast(output: Tensor, _: Any) -> Tensor:
        rows = output.flatten(1)
        return functional.cross_entropy(rows @ rows.T, torch.arange(len(rows)))

    tried = try_loss(nn.Linear(6, 8), contrast, example(), RowRule({"input": None}))
    assert tried.problem is not None
    assert "neither their mean by rows nor their sum" in tried.problem


def test_means_that_the_module_computes_count_if_the_loss_reads_them() -> None:
    class Own(nn.Linear):
        def forward(self, input: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
            made = super().forward(input)
            return made, tokens(made, {"labels": labels})

    losses: list[tuple[int, Any]] = [
        (0, lambda output, batch: tokens(output[0], batch)),
        # The other mean decides at first.
        (1, lambda output, batch: torch.minimum(output[1], tokens(output[0], batch) - 1)),
        (1, lambda output, batch: torch.maximum(output[1], tokens(output[0], batch) + 1)),
    ]
    for inside, loss in losses:
        assert Trial(Own(6, 8), loss, nullcontext).begin(example()).inside == inside


def test_a_mean_over_no_label_is_nothing_and_passes_nothing_back() -> None:
    scores = torch.randn(3, 8, requires_grad=True)
    with LabelCounts() as counts:
        loss = functional.cross_entropy(scores, torch.full((3,), -100))
    loss.backward()  # type: ignore[no-untyped-call]
    assert (float(loss.detach()), float(counts.found[0].number)) == (0.0, 0.0)
    assert scores.grad is not None
    assert not scores.grad.any()


@pytest.mark.parametrize(
    "how",
    [{}, {"label_smoothing": 0.1}, {"weight": torch.arange(1.0, 9.0)}, {"ignore_index": 3}],
    ids=["plain", "smoothed", "weighted", "ignoring"],
)
def test_a_mean_that_is_counted_is_torchs_own(how: dict[str, Any]) -> None:
    scores, labels = (
        torch.randn(6, 8),
        torch.tensor([1, 3, 3, 7, -100, 2] if "ignore_index" not in how else [1, 3, 3, 7, 0, 2]),
    )
    with LabelCounts():
        counted = functional.cross_entropy(scores, labels, **how)
    torch.testing.assert_close(counted, functional.cross_entropy(scores, labels, **how))


@pytest.mark.parametrize("kind", [LossKind.LABELS, LossKind.SUM, LossKind.ROWS], ids=lambda kind: kind.name)
def test_parts_add_up_to_the_whole(kind: LossKind) -> None:
    module, given, loss = nn.Linear(6, 8).requires_grad_(False), example(), CASES[kind]
    if kind is LossKind.LABELS:
        given["labels"][0, :4] = -100
    weighed = WeighedLoss(loss, Tried(kind, labels=5), num_parts=2, by_rows=False)
    found = []
    for rows in (slice(0, 2), slice(2, 4)):
        part = {name: each[rows] for name, each in given.items()}
        with weighed.watching():
            found.append(weighed(module(part["input"]), part))
    total, number = (sum(float(each) for each in numbers) for numbers in zip(*found, strict=True))
    assert total / number == pytest.approx(float(loss(module(given["input"]), given)), rel=1e-5)


class Deciding(nn.Module):
    """Decides by what it is given as one of its cases says."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.layer, self.case = nn.Linear(4, 3, dtype=torch.float64), case
        self.register_buffer("on", torch.ones((), dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        if self.case == "a tensor":
            x = x * 2 if x.mean() > 100 else x
        elif self.case == "a number":
            x = x * 2 if x.mean().item() > 100 else x
        elif self.case == "any":
            x = x * 2 if (x > 100).any() else x
        elif self.case == "a guard":
            x = x.clamp(-50, 50) if x.abs().max() > 50 else x
        elif self.case == "a short cut":
            mask = x > 0
            x = x if mask.all() else x * mask
        elif self.case == "a short cut that counts":
            mask = x > 0
            x = x if mask.sum() == mask.numel() else x * mask
        elif self.case == "each row":
            x = torch.stack([row * 2 if row.mean() > 100 else row for row in x])
        elif self.case == "a buffer":
            x = x * 2 if self.on else x
        found: Tensor = self.layer(x)
        return found


@pytest.mark.parametrize(
    ("case", "line"),
    [
        ("a tensor", "x = x * 2 if x.mean() > 100 else x"),
        ("a number", "x = x * 2 if x.mean().item() > 100 else x"),
        ("any", "x = x * 2 if (x > 100).any() else x"),
        ("a guard", None),
        ("a short cut", None),
        ("a short cut that counts", None),
        ("each row", None),
        ("a buffer", None),
    ],
)
def test_a_line_that_decides_by_all_rows_is_found(case: str, line: str | None) -> None:
    example = {"x": torch.randn(4, 4, dtype=torch.float64), "y": torch.randn(4, 3, dtype=torch.float64)}
    module = Deciding(case)
    rule = RowRule({"x": None})
    found = try_loss(module, lambda output, given: (output - given["y"]).square().mean(), example, rule)
    assert found.kind is LossKind.ROWS
    assert (found.decides is None) == (line is None)
    assert line is None or (found.decides or "").endswith(f"({line})")
    # Whoever means each part by itself is asked nothing.
    apart = try_loss(
        module, lambda output, given: ((output - given["y"]).square().mean(), 1), example, RowRule({"x": None})
    )
    assert apart.decides is None


def test_a_balancing_loss_beside_rows_is_of_each_part() -> None:
    layer = nn.Linear(4, 3, dtype=torch.float64)

    class Balanced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            made = self.layer(x)
            return made, made.mean(0).square().sum()

    def loss(output: Any, given: Any) -> Any:
        rows = (output[0] - given["y"]).square().mean(1)
        return rows.sum() + output[1] * len(rows), len(rows)

    example = {"x": torch.randn(4, 4, dtype=torch.float64), "y": torch.randn(4, 3, dtype=torch.float64)}
    found = try_loss(Balanced(), loss, example, RowRule({"x": None}))
    assert (found.kind, found.problem) == (LossKind.BESIDE, None)


def test_labels_that_fit_an_entry_by_chance_are_not_taken_for_it() -> None:
    """Each fifth label is ignored; not one of the first token and no 0, though there are as many in each part."""
    rows = ([7, 4, 10, 1, 3, 6, 3, 2], [10, 9, 11, 0, 7, 2, 1, 8], [1, 10, 9, 3, 2, 0, 2, 0], [1, 7, 11, 5, 4, 0, 6, 9])
    torch.manual_seed(0)
    given = {"input": torch.randn(4, 8, 6), "labels": torch.tensor(rows)}

    def loss(output: Tensor, batch: Any) -> Tensor:
        labels = batch["labels"].masked_fill(batch["labels"] % 5 == 0, -100).flatten()
        total = functional.cross_entropy(output.flatten(0, 1), labels, reduction="sum")
        found: Tensor = total / (labels >= 0).sum()
        return found

    tried = try_loss(nn.Linear(6, 12), loss, given, RowRule({"input": None}))
    assert tried.kind is not LossKind.ENTRY
    assert tried.problem is not None


def _zero_in_value(output: Tensor, batch: Any) -> Tensor:
    """Its value is 0 for any rows, and what a row weighs is known with all of them."""
    gains = batch["mask"][:, 0].detach() * torch.arange(len(output)) - len(output)
    rows = output.flatten(1).mean(1)
    found: Tensor = ((rows - rows.detach()) * gains).mean()
    return found


@pytest.mark.parametrize(
    "loss",
    [
        lambda output, batch: tokens(output, batch) / tokens(output, batch).detach(),
        lambda output, batch: tokens(output, batch) + output.square().mean() / output.square().mean().detach(),
        lambda output, batch: (
            (tokens(output, batch, reduction="none") * 0 + output.square().mean(-1).flatten())
            .div(output.square().mean().detach())
            .mean()
        ),
        _zero_in_value,
    ],
    ids=["by itself", "one of two", "rows by all of them", "nothing"],
)
def test_a_loss_whose_gradient_parts_do_not_tell_is_refused(loss: Any) -> None:
    tried = try_loss(nn.Linear(6, 8), loss, example(), RowRule({"input": None}))
    assert tried.problem is not None
    assert "parts of a batch have the loss of the whole, but not its gradient" in tried.problem


@pytest.mark.parametrize(
    "loss",
    [
        lambda output, batch: (tokens(output, batch, reduction="none").detach() * output.mean(-1).flatten()).mean(),
        lambda output, _: functional.mse_loss(output, output.detach().softmax(-1)),
        lambda output, batch: tokens(output.masked_fill(output > 1, float("-inf")).nan_to_num(), batch),
        lambda output, batch: tokens(output, batch).detach(),
    ],
    ids=["weights of tokens", "its own targets", "what is masked", "no gradient"],
)  # fmt: skip
def test_what_is_a_constant_of_each_row_is_right(loss: Any) -> None:
    assert try_loss(nn.Linear(6, 8), loss, example(), RowRule({"input": None})).problem is None


class _Rows(nn.Module):
    """A layer and then something with rows."""

    def __init__(self, then: Any) -> None:
        super().__init__()
        self.layer, self.then = nn.Linear(6, 8), then

    def forward(self, input: Tensor) -> Tensor:
        made: Tensor = self.then(self.layer(input))
        return made


def counted(output: Tensor, batch: Any) -> Any:
    return tokens(output, batch) * batch["labels"].numel(), batch["labels"].numel()


_INTERACT = {
    "not the gradient of layer.weight": lambda h: h + h.mean(0) - h.mean(0).detach(),
    "no sum over rows, which see each other": lambda h: h - h.mean(0),
}


@pytest.mark.parametrize("words", _INTERACT)
def test_rows_that_interact_are_refused_with_parts_of_sequences_too_if_rows_are_cut(words: str) -> None:
    module = _Rows(_INTERACT[words]).double()
    given, rule = {**example(), "input": example()["input"].double()}, RowRule({"input": None})
    assert try_tokens(module, counted, given, rule, nullcontext).problem is None
    found = try_tokens(module, counted, given, rule, nullcontext, num_parts=2)
    assert found.problem is not None
    assert words in found.problem


def test_rows_that_do_not_interact_may_be_cut_with_parts_of_sequences() -> None:
    for loss, kind in ((counted, LossKind.PAIR), (tokens, LossKind.LABELS)):
        found = try_tokens(_Rows(torch.tanh), loss, example(), RowRule({"input": None}), nullcontext, num_parts=2)
        assert (found.kind, found.problem) == (kind, None)


class _Gated(nn.Module):
    """The mean over rows is behind a gate that is closed at first."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gate = nn.Linear(3, 2), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.linear(x)
        return made + self.gate * made.mean(0)


def test_what_mixes_rows_behind_a_closed_gate_is_refused_and_the_weights_are_as_they_were() -> None:
    module = _Gated().double()
    before = {name: each.clone() for name, each in module.state_dict().items()}
    given = {"x": torch.randn(4, 3, dtype=torch.float64)}
    tried = try_loss(module, lambda output, _: output.square().mean(), given, RowRule(), num_parts=2)
    assert "with other weights than those that training begins with, the loss of 3 rows is" in str(tried.problem)
    assert all(torch.equal(each, before[name]) for name, each in module.state_dict().items())


def test_a_term_that_is_constant_as_long_as_a_model_is_its_reference_is_noticed() -> None:
    module = nn.Linear(3, 5).double()
    reference = nn.Linear(3, 5).double().requires_grad_(False)
    reference.load_state_dict(module.state_dict())
    given = {"input": torch.randn(4, 6, 3, dtype=torch.float64), "labels": torch.randint(5, (4, 6))}

    def loss(output: Tensor, batch: Any) -> Any:
        apart = (output - reference(batch["input"])).square().mean()
        return functional.cross_entropy(output.flatten(0, 1), batch["labels"].flatten()) + apart

    assert try_loss(module, loss, given, RowRule(), num_parts=2).kind is LossKind.EVEN


def test_a_loss_that_is_0_at_first_is_tried_with_other_weights() -> None:
    module = nn.Linear(3, 5).double()
    reference = nn.Linear(3, 5).double().requires_grad_(False)
    reference.load_state_dict(module.state_dict())
    given = {"input": torch.randn(4, 3, dtype=torch.float64)}
    tried = try_loss(
        module, lambda output, batch: (output - reference(batch["input"])).square().sum(), given, RowRule(), num_parts=2
    )
    assert tried.kind is LossKind.SUM


@pytest.mark.parametrize("longest", [6, 4])
def test_lengths_of_which_the_loss_makes_a_mask_weigh_parts(longest: int) -> None:
    given = {
        "input": torch.randn(4, 6, 3, dtype=torch.float64),
        "labels": torch.randint(5, (4, 6)),
        "lengths": torch.tensor([6, longest, 5, 6]),
    }

    def loss(output: Tensor, batch: Any) -> Any:
        mask = torch.arange(6) < batch["lengths"][:, None]
        losses = functional.cross_entropy(output.transpose(1, 2), batch["labels"], reduction="none")
        return (losses * mask).sum() / mask.sum()

    tried = try_loss(nn.Linear(3, 5).double(), loss, given, RowRule(), num_parts=2)
    assert (tried.kind, tried.through and tried.through.path) == (LossKind.ENTRY, "lengths")
    assert tried.through is not None
    assert float(tried.through.of(given)) == float(given["lengths"].sum())


class Mixed(nn.Module):
    """Rows are mixed in training alone; in which order, and how much, is drawn."""

    def __init__(self, order: Any, share: Any = lambda: 0.6) -> None:
        super().__init__()
        self.layer, self.order, self.share = nn.Linear(6, 8), order, share

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(x).tanh()
        if not self.training:
            return made
        share = self.share()
        mixed: Tensor = share * made + (1 - share) * made[self.order(len(made))]
        return mixed


@pytest.mark.parametrize(
    "module",
    [
        Mixed(torch.randperm, lambda: np.random.beta(2.0, 2.0)),
        Mixed(lambda number: torch.rand(number).argsort()),
        Mixed(lambda number: torch.from_numpy(np.random.permutation(number))),
        Mixed(lambda number: torch.tensor(random.sample(range(number), number))),
        Mixed(lambda number: torch.randint(number, (number,))),
    ],
    ids=["share", "sorted", "numpy", "python", "integers"],
)
@pytest.mark.parametrize("seed", [4, 5])
def test_rows_that_are_mixed_at_random_are_refused(module: nn.Module, seed: int) -> None:
    """Whatever the script has seeded: an order that is drawn may be that of the rows by chance."""
    seed_python(seed)
    tried = try_loss(module, tokens, {**example(8), "x": example(8)["input"]}, RowRule({"x": None}), num_parts=2)
    assert tried.problem is not None
    assert "rows of a batch meet where random numbers are drawn" in tried.problem or "training" in tried.problem


def test_rows_that_are_drawn_as_negatives_are_refused() -> None:
    def loss(output: Tensor, batch: Any) -> Tensor:
        negatives = output[torch.randint(len(output), (len(output),))]
        return functional.softplus((output * (negatives - batch["input"].mean())).sum((1, 2))).mean()

    tried = try_loss(nn.Linear(6, 8), loss, example(8), RowRule({"input": None}), num_parts=2)
    assert tried.problem is not None
    assert "rows of a batch meet where random numbers are drawn" in tried.problem


class Noisy(nn.Module):
    """Every row draws its own, and some what all share."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop, self.leaky = nn.Linear(6, 8), nn.Dropout(0.2), nn.RReLU()

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.leaky(self.layer(self.drop(x)))
        if self.training:
            hidden = hidden * torch.rand(len(hidden), 1, 1).round() + 0.1 * torch.randn(8)
            hidden = hidden + torch.poisson(torch.full_like(hidden, 2.0)) * random.random() * np.random.rand()
        return hidden


@pytest.mark.parametrize("loss", [tokens, by_mask])
def test_rows_that_draw_by_themselves_are_right(loss: Any) -> None:
    given = example(8)
    given = {**given, "labels": given["labels"].masked_fill(torch.arange(8)[:, None] % 3 == 0, -100)}
    given = {**given, "mask": (torch.arange(5) < 1 + torch.arange(8)[:, None] % 4).float(), "x": given["input"]}
    tried = try_loss(Noisy(), loss, given, RowRule({"x": None}), num_parts=2)
    assert tried.problem is None


class Followed(nn.Module):
    """A buffer that follows the rows of a batch, and that the next forward reads, or the same one."""

    def __init__(self, *, read_first: bool) -> None:
        super().__init__()
        self.read_first = read_first
        self.linear = nn.Linear(6, 7)
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(7))

    def forward(self, input: Tensor) -> Tensor:
        made: Tensor = self.linear(input)
        before = self.mean.clone()
        if self.training:
            self.mean.lerp_(made.detach().mean((0, 1)), 0.3)
        return made - (before if self.read_first else self.mean)


def test_what_forwards_leave_for_the_next_one_is_told_and_rows_that_meet_in_a_buffer_are_refused() -> None:
    batch = example()
    rule = RowRule(None)
    given = tokens, batch, rule.look(batch), nullcontext, nullcontext
    assert find_carried(nn.Sequential(nn.Linear(6, 7), nn.Dropout(0.5)), *given) is None
    module = Followed(read_first=True)
    assert find_carried(module, *given) == "mean (a tensor, written in place)"
    assert torch.equal(module.mean, torch.zeros(7))
    assert find_carried(spectral_norm(nn.Linear(6, 7)), *given) is not None
    assert try_loss(module, tokens, batch, rule, num_parts=2, compares_buffers=False).problem is None
    meets = try_loss(Followed(read_first=False), tokens, batch, rule, num_parts=2, compares_buffers=False)
    assert meets.problem is not None
    assert meets.problem.startswith("in training mode the loss of 3 rows")


@pytest.mark.parametrize(
    ("divisor", "least"),
    [(torch.Tensor.sum, None), (lambda mask: mask.abs().sum(), 0.0), (lambda mask: (mask != 0).sum(), 1.0)],
    ids=["any", "none below 0", "masks"],
)
def test_weights_that_a_loss_is_no_mean_by_are_refused_when_they_come(divisor: Any, least: float | None) -> None:
    def loss(output: Tensor, batch: Any) -> Tensor:
        each = tokens(output, batch, reduction="none")
        found: Tensor = (each * batch["mask"].flatten()).sum() / divisor(batch["mask"])
        return found

    tried = try_loss(nn.Linear(6, 8), loss, example(), RowRule({"input": None}))
    assert tried.kind is LossKind.ENTRY
    assert tried.through is not None
    assert tried.through.least == least
    for weight, bound in ((0.5, 1.0), (-2.0, 0.0)):
        given = {**example(), "mask": torch.full((4, 5), weight)}
        assert float(tried.through.of(given)) == 20 * weight
        if least is None or least < bound:
            tried.through.check(given)
        else:
            with pytest.raises(ShardwiseError, match="a mean by it only as long as it has none"):
                tried.through.check(given)
