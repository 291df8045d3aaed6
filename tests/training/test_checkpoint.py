"""Checkpoints know no plan: saved under one, loaded under another, number by number; and none is ever half there."""

import json
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.errors import ShardwiseError
from shardwise.ranks.rank_error import RankError
from shardwise.ranks.spawn import Ranks
from shardwise.training.checkpoint.boxes import Box
from shardwise.training.checkpoint.index import INDEX, clean, find_last, prune, saved_steps
from shardwise.training.checkpoint.parts import Part
from shardwise.training.checkpoint.read import Reader
from shardwise.training.checkpoint.write import Writer, share_out
from shardwise.training.run import train_rank
from tests.training.programs import loaded_state, losses_of, make_job, saved_state

#: Plans that follow one another, on fewer and fewer ranks.
DENSE = ("dp=4,zero=3", "pp=2,tp=2,microbatches=2", "cp=2,zero=1", "dp=1")
OF_EXPERTS = ("dp=4,ep=4,zero=1", "dp=2,tp=2,ep=2")


def differing(found: dict[str, torch.Tensor], saved: dict[str, torch.Tensor]) -> list[str]:
    """The names under which two states do not have the same. A tied head is saved under the name of the embedding."""
    names = [name for name in found if name in saved or name != "head.weight"]
    return sorted(
        {*(name for name in saved if name not in found)}
        | {name for name in names if name not in saved or not torch.equal(found[name].cpu(), saved[name])}
    )


@pytest.mark.parametrize("plans", [DENSE, pytest.param(OF_EXPERTS, marks=pytest.mark.whole)], ids=["dense", "experts"])
def test_a_run_goes_from_plan_to_plan_and_loses_nothing(
    plans: tuple[str, ...], two: Ranks, four: Ranks, tmp_path: Path
) -> None:
    experts = 4 if plans is OF_EXPERTS else 0
    changes = {"model__experts": experts, "model__tied": not experts}
    runs = {4: four.run, 2: two.run, 1: lambda program, job: [program(job)]}
    alone = make_job(tmp_path / "alone", "dp=1", steps=2 * len(plans), **changes)
    train_rank(alone)
    moved = tmp_path / "moved"
    for number, plan in enumerate(plans, start=1):
        job = make_job(moved, plan, steps=2 * number, **changes)
        if number > 1:
            saved = saved_state(moved)
            for found, read, kept, is_same in runs[job.plan.num_ranks](loaded_state, job):
                assert differing(found, saved) == []
                assert read <= 1.05 * kept
                assert is_same
        runs[job.plan.num_ranks](train_rank, job)
    assert losses_of(moved) == pytest.approx(losses_of(alone.folder), rel=1e-5)


def test_every_part_is_written_once_and_evenly() -> None:
    box = Box((0,), (4,))
    described = [[(f"shared{number}", box, 16) for number in range(6)] for _ in range(3)]
    described[0].append(("own", box, 32))
    chosen = share_out(described)
    assert sorted(name for each in chosen for name, _ in each) == ["own", *(f"shared{number}" for number in range(6))]
    assert sorted(16 * len(each) + 16 * (("own", box) in each) for each in chosen) == [32, 48, 48]
    assert ("own", box) in chosen[0]


def writer_in(folder: Path, *, keep: int = 2) -> Writer:
    return Writer(folder, rank=0, num_ranks=1, keep=keep, gather=lambda given: [given])


def a_part(value: float, *, size: int = 3) -> list[Part]:
    return [Part("weight", (size,), Box((0,), (size,)), torch.full((size,), value))]


def test_the_newest_are_kept_and_what_was_half_written_is_cleaned_up(tmp_path: Path) -> None:
    writer = writer_in(tmp_path)
    for step in (1, 2, 3):
        writer.save(step, a_part(step), {"note": step})
    assert writer.finish() is None
    writer.close()
    assert saved_steps(tmp_path) == [2, 3]
    (tmp_path / "step-00000004.saving").mkdir()
    assert find_last(tmp_path) == tmp_path / "step-00000003"
    clean(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]
    with Reader(tmp_path / "step-00000003") as reader:
        assert reader.index.extra == {"note": 3}
        assert reader.whole("weight").tolist() == [3.0] * 3
    prune(tmp_path, 1)
    assert saved_steps(tmp_path) == [3]


def test_what_is_saved_is_from_the_moment_of_saving(tmp_path: Path) -> None:
    writer, part = writer_in(tmp_path), a_part(1.0, size=1_000_000)
    writer.save(1, part, {})
    part[0].numbers.fill_(2.0)
    writer.finish()
    writer.close()
    with Reader(tmp_path / "step-00000001") as reader:
        assert set(reader.whole("weight").tolist()) == {1.0}


def test_a_disk_without_room_leaves_the_last_good_one_and_says_so(tmp_path: Path) -> None:
    writer = writer_in(tmp_path)
    assert writer.save(1, a_part(1.0), {}) is None
    assert writer.finish() is None
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        assert writer.save(2, a_part(2.0, size=1 << 18), {}) is None
        problem = writer.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert problem is not None
    assert problem.startswith(f"the checkpoint of step 2 cannot be written to {tmp_path}: ")
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert writer.save(3, a_part(3.0), {}) is None
    assert writer.finish() is None
    writer.close()
    assert saved_steps(tmp_path) == [1, 3]


def test_a_rank_that_was_killed_while_it_wrote_is_not_waited_for(tmp_path: Path) -> None:
    def gather(given: Any) -> list[Any]:
        if given == (False, None):  # This rank's thread waits for the other's part.
            raise RankError("rank 1 is gone", rank=1)
        return [given] * 2

    writer = Writer(tmp_path, rank=0, num_ranks=2, keep=2, gather=gather)
    writer.save(1, a_part(1.0), {})
    with pytest.raises(RankError):
        writer.finish()
    writer.close(has_failed=True)
    assert [*tmp_path.iterdir()] == []


def test_damage_is_noticed(tmp_path: Path) -> None:
    writer = writer_in(tmp_path)
    writer.save(1, a_part(1.0), {})
    writer.finish()
    writer.close()
    folder = tmp_path / "step-00000001"
    file = folder / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with Reader(folder) as reader, pytest.raises(ShardwiseError, match=r"weight in .* is damaged between the bytes"):
        reader.whole("weight")
    file.write_bytes(content[:-4])
    size = len(content)
    with Reader(folder) as reader, pytest.raises(ShardwiseError, match=f"it has {size - 4} bytes, and {size} were"):
        reader.whole("weight")
    (folder / INDEX).write_text("{")
    with pytest.raises(ShardwiseError, match=r"index\.json is damaged"):
        Reader(folder)
    (folder / INDEX).write_text(json.dumps({"format": "other"}))
    with pytest.raises(ShardwiseError, match="has the format 'other', and this Shardwise reads"):
        Reader(folder)
    shutil.rmtree(folder)
    with pytest.raises(ShardwiseError, match="is not a checkpoint"):
        Reader(folder)


def test_a_checkpoint_of_another_model_says_which_tensors_differ(tmp_path: Path) -> None:
    writer = writer_in(tmp_path)
    writer.save(1, a_part(1.0), {})
    writer.finish()
    writer.close()
    with Reader(tmp_path / "step-00000001") as reader:
        reader.check({"weight": (3,)})
        with pytest.raises(ShardwiseError) as caught:
            reader.check({"weight": (4,), "bias": (1,)})
        assert caught.value.problem.endswith(
            "is of another model: it lacks bias; it has in another shape weight (there [3], here [4])"
        )
        with pytest.raises(ShardwiseError, match="it lacks head; it also has weight"):
            reader.check({"head": (3,)})
