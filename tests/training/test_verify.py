"""Silent corruption: a bit that flips in a rank's gradients or weights is found, and the rank is named."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.nets.block import Block
from shardwise.nets.settings import Settings
from shardwise.nets.transformer import Transformer
from shardwise.ranks.spawn import Ranks
from shardwise.trace.journal import Event, read_journal
from shardwise.training import model
from shardwise.training.checkpoint.parts import Held
from shardwise.training.job import Job, Watching
from shardwise.training.outcome import Result, StoppedError
from shardwise.training.run import train_rank
from shardwise.training.verify import Verifier
from tests.training.programs import losses_of, make_job

#: Whether a backward, counted from 1, is spoilt.
Spoils = Callable[[int], bool]


class _Flip(torch.autograd.Function):
    """The identity, whose gradient has one bit of one number flipped now and then."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, owner: "_Flipping") -> Tensor:
        ctx.owner = owner
        return given.view_as(given)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0].clone()
        ctx.owner.num_backwards += 1
        if ctx.owner.spoils(ctx.owner.num_backwards):
            words = gradient.view(torch.int32).view(-1)
            words[7] ^= 1 << 20
        return gradient, None


class _Flipping(nn.Module):
    def __init__(self, inner: nn.Module, spoils: Spoils) -> None:
        super().__init__()
        self.inner, self.spoils, self.num_backwards = inner, spoils, 0

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = _Flip.apply(self.inner(hidden), self)  # type: ignore[no-untyped-call]
        return output


def run_with_flips(job: Job, rank: int, first: int, last: int) -> Result | StoppedError | None:
    """A run in which one rank's backwards, of these numbers, are wrong by one bit."""
    made, mine = model.make_module, dist.get_rank()

    def flipping(settings: Settings, *, tp: int, device: torch.device) -> Transformer:
        module = made(settings, tp=tp, device=device)
        block = module.layers[0]
        assert isinstance(block, Block)
        block.register_module("mlp", _Flipping(block.mlp, lambda number: mine == rank and first <= number <= last))
        return module

    @torch.no_grad()
    def draw(held: Held, *_: object) -> None:
        for part in held.weights():
            torch.manual_seed(crc32(part.entry.encode()))
            part.numbers.copy_(0.05 * torch.randn(part.shape)[tuple(map(slice, part.box.start, part.box.stop))])
        held.take_over()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardwise.training.model.make_module", flipping)
        patch.setattr("shardwise.training.model.draw", draw)
        return train_rank(job)


def verified(folder: Path, plan: str, every: int = 2, **changes: Any) -> Job:
    job = make_job(folder, plan, **changes)
    return replace(job, watching=Watching(verify_every=every))


def corruptions(folder: Path) -> list[Event]:
    return [each for each in read_journal(folder) if each["event"] == "corrupt"]


@pytest.mark.parametrize("plan", ["dp=2,zero=2,microbatches=2", "pp=2,microbatches=2"])
def test_a_sound_run_that_is_verified_learns_the_very_same(two: Ranks, tmp_path: Path, plan: str) -> None:
    two.run(train_rank, make_job(tmp_path / "plain", plan, steps=5, model__dropout=0.1))
    two.run(train_rank, verified(tmp_path / "verified", plan, steps=5, model__dropout=0.1))
    assert losses_of(tmp_path / "verified") == losses_of(tmp_path / "plain")
    assert corruptions(tmp_path / "verified") == []


def test_a_bit_that_flips_once_is_found_and_the_step_is_taken_anew(two: Ranks, tmp_path: Path) -> None:
    # Backward 1 is of step 1; 2 repeats step 2 with the rows of the other replica, and 3 is step 2 itself.
    two.run(run_with_flips, make_job(tmp_path / "sound", "dp=2", steps=4), 1, 0, 0)
    two.run(run_with_flips, verified(tmp_path / "run", "dp=2", steps=4), 1, 3, 3)
    (told,) = corruptions(tmp_path / "run")
    assert (told["step"], told["ranks"]) == (2, [1])
    assert "a fault that has passed" in told["what"]
    assert losses_of(tmp_path / "run") == losses_of(tmp_path / "sound")


def test_of_three_replicas_the_one_that_is_always_wrong_is_named(three: Ranks, tmp_path: Path) -> None:
    job = verified(tmp_path / "run", "dp=3", steps=4, batch=6)
    for told in three.run(run_with_flips, job, 2, 1, 1000):
        assert isinstance(told, StoppedError)
        assert told.problem.startswith("at step 2 rank 2 on ")
        assert not told.is_final
    (told,) = corruptions(tmp_path / "run")
    assert told["ranks"] == [2]
    ends = [each for each in read_journal(tmp_path / "run") if each["event"] == "end"]
    assert ends[-1]["leave_out"] == told["hosts"]
    assert "is_final" not in ends[-1]


def run_with_a_changed_weight(job: Job, rank: int) -> Result | StoppedError | None:
    """A run in which a bit of one weight of a rank flips in memory, before weights are compared at step 4."""
    check = Verifier.check_weights

    @torch.no_grad()
    def flips(self: Verifier, step: int) -> None:
        if dist.get_rank() == rank and step == 4:
            engine = self._setup.engine
            with engine.shown.open():
                weight = dict(engine.module.named_parameters())["layers.1.mlp.down_proj.weight"]
                weight.data.view(torch.int32).view(-1)[5] ^= 1
        check(self, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Verifier, "check_weights", flips)
        return train_rank(job)


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=1"])
def test_a_weight_that_changes_in_memory_is_found_before_it_is_saved(two: Ranks, tmp_path: Path, plan: str) -> None:
    job = verified(tmp_path / "run", plan, every=100, steps=6, checkpoint__every=2)
    for told in two.run(run_with_a_changed_weight, job, 1):
        assert isinstance(told, StoppedError)
        assert "hold other weights than replicas of the same: layers.1.mlp.down_proj.weight" in told.problem
    saved = sorted(path.name for path in (job.folder / "checkpoints").glob("step-*"))
    assert saved == ["step-00000002"]
    assert corruptions(job.folder)[0]["step"] == 4
