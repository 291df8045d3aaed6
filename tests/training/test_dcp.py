"""`torch.distributed.checkpoint` reads our checkpoints as they are; and its own folders come and go by `convert`."""

import os
import pickle
import re
import weakref
from pathlib import Path

import pytest
import torch
import transformers as hf
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from shardwise.cli import main
from shardwise.errors import ShardwiseError
from shardwise.ranks.spawn import Ranks
from shardwise.training.checkpoint.index import find_last
from shardwise.training.convert import convert
from shardwise.training.convert_dcp import TorchFolder, write_torch_folder
from shardwise.training.dcp_metadata import read_metadata
from shardwise.training.run import train_rank
from tests.nets.families import save_theirs
from tests.training.programs import make_job, saved_state
from tests.training.test_convert import tensors_in

#: Of a process alone torch warns that it is alone.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def last_of(folder: Path) -> Path:
    found = find_last(folder / "checkpoints")
    assert found is not None, f"no checkpoint in {folder}"
    return found


@pytest.mark.parametrize("plan", ["dp=4,zero=3", pytest.param("pp=2,tp=2,microbatches=2", marks=pytest.mark.whole)])
def test_torch_reads_our_checkpoint_as_it_is(plan: str, four: Ranks, tmp_path: Path) -> None:
    four.run(train_rank, make_job(tmp_path, plan, steps=2))
    saved = {name: each for name, each in saved_state(tmp_path).items() if each.dim()}
    assert {name.split("/")[0] for name in saved} > {"optimizer", "embed.weight"}
    read = {name: torch.full_like(each, -1) for name, each in saved.items()}
    load(read, storage_reader=HuggingFaceStorageReader(str(last_of(tmp_path))))
    assert [name for name in saved if not torch.equal(saved[name], read[name])] == []


def sharded_load(folder: str) -> dict[str, Tensor]:
    """What a rank of another program reads into its own shards of a weight; here, whole again."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    reader = HuggingFaceStorageReader(folder)
    outline = reader.read_metadata().state_dict_metadata["layers.0.mlp.up_proj.weight"]
    assert isinstance(outline, TensorStorageMetadata)
    state = {"layers.0.mlp.up_proj.weight": distribute_tensor(torch.zeros(outline.size), mesh, [Shard(0)])}
    load(state, storage_reader=HuggingFaceStorageReader(folder))
    return {name: each.full_tensor() for name, each in state.items()}


def test_ranks_of_another_program_read_their_shards_of_it(two: Ranks, four: Ranks, tmp_path: Path) -> None:
    four.run(train_rank, make_job(tmp_path, "dp=4,zero=3", steps=1))
    saved = saved_state(tmp_path)
    for read in two.run(sharded_load, str(last_of(tmp_path))):
        assert all(torch.equal(saved[name], each) for name, each in read.items())


def save_sharded(folder: str, state: dict[str, Tensor]) -> None:
    """As a program does that shards its weights: every rank writes its own rows of each."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    sharded = {name: distribute_tensor(each, mesh, [Shard(0)]) for name, each in state.items()}
    save({"model": sharded, "step": 3}, checkpoint_id=folder)


def test_what_other_programs_have_saved_is_trained_on(two: Ranks, tmp_path: Path) -> None:
    theirs = save_theirs("llama", tmp_path / "theirs")
    two.run(save_sharded, str(tmp_path / "dcp"), dict(theirs.state_dict()))
    with pytest.raises(ShardwiseError, match=r"has no config\.json, and .*dcp does not say which model it is of"):
        convert(tmp_path / "dcp", tmp_path / "ours")
    convert(tmp_path / "dcp", tmp_path / "ours", to="shardwise", config=tmp_path / "theirs", file_bytes=20_000)
    convert(tmp_path / "ours", tmp_path / "again")
    before, after = tensors_in(tmp_path / "theirs"), tensors_in(tmp_path / "again")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    # The type of the weights and the name of the file may be given too.
    convert(tmp_path / "dcp", tmp_path / "half", config=tmp_path / "theirs" / "config.json", dtype="bf16")
    assert all(torch.equal(before[name].bfloat16(), each) for name, each in tensors_in(tmp_path / "half").items())
    assert hf.AutoModelForCausalLM.from_pretrained(tmp_path / "half").dtype == torch.bfloat16


@pytest.mark.parametrize("family", ["llama", "llama, tied", "mixtral"])
def test_a_run_becomes_a_folder_that_other_programs_load(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = save_theirs(family, tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours")
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "dcp"), "--to", "dcp"]) == 0
    assert "is a folder of torch.distributed.checkpoint" in capsys.readouterr().out
    fresh = hf.AutoModelForCausalLM.from_config(theirs.config)
    state = {name: each for name, each in fresh.state_dict().items() if name in tensors_in(tmp_path / "theirs")}
    load(state, checkpoint_id=str(tmp_path / "dcp"))
    expected = theirs.state_dict()
    assert all(torch.equal(expected[name], each) for name, each in state.items())
    # It says itself which model it is of.
    convert(tmp_path / "dcp", tmp_path / "again")
    before, after = tensors_in(tmp_path / "theirs"), tensors_in(tmp_path / "again")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "dcp", "ours", "theirs"], (
        "nothing else is left"
    )


def test_no_more_than_one_tensor_is_held_at_a_time(tmp_path: Path) -> None:
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    most = 0

    def read(name: str) -> Tensor:
        nonlocal most
        made = torch.full((100, 100), float(name))
        alive.add(made)
        most = max(most, len(alive))
        return made

    outlines = {str(number): ((100, 100), torch.float32) for number in range(10)}
    write_torch_folder(tmp_path, outlines, read)
    # The one that is asked for, while the last is let go of.
    assert most <= 2
    folder = TorchFolder(tmp_path)
    assert folder.tensors == outlines
    assert all(set(folder.read(name).flatten().tolist()) == {float(name)} for name in outlines)


def test_damage_and_mistakes_are_told(tmp_path: Path) -> None:
    save_theirs("llama", tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "dcp", to="dcp")
    with pytest.raises(ShardwiseError, match="is a dcp folder already"):
        convert(tmp_path / "dcp", tmp_path / "new", to="dcp")
    save_theirs("qwen3", tmp_path / "other")
    with pytest.raises(ShardwiseError, match=r"lacks model\.layers\.0\.self_attn\.[qk]_norm\.weight.* and \d+ more"):
        convert(tmp_path / "dcp", tmp_path / "new", config=tmp_path / "other")
    (piece,) = (tmp_path / "dcp").glob("*.distcp")
    piece.write_bytes(piece.read_bytes()[: piece.stat().st_size // 2])
    with pytest.raises(ShardwiseError, match="cannot be read from"):
        convert(tmp_path / "dcp", tmp_path / "new")
    (tmp_path / "dcp" / ".metadata").write_bytes(b"no pickle")
    with pytest.raises(ShardwiseError, match=r"\.metadata cannot be read"):
        convert(tmp_path / "dcp", tmp_path / "new")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("new")], "nothing half made is left"


class _Runs:
    """Unpickled, it runs a command."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (self.command,)


def test_a_pickle_that_would_run_something_is_refused_and_runs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_theirs("llama", tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "dcp", to="dcp")
    metadata, done = tmp_path / "dcp" / ".metadata", tmp_path / "done"
    good = metadata.read_bytes()
    evil = _Runs(f"touch {done}")
    pickle.loads(pickle.dumps(evil))
    assert done.exists(), "it is a real one"
    done.unlink()
    known = pickle.loads(good)
    known.planner_data = evil
    hidden = pickle.dumps(known)
    for content in (pickle.dumps(evil), pickle.dumps(evil, protocol=0), hidden):
        metadata.write_bytes(content)
        assert main(["convert", str(tmp_path / "dcp"), str(tmp_path / "new")]) == 1
        told = capsys.readouterr().err
        assert f"error: {metadata} names posix.system, which is not part of torch's metadata" in told
        assert not done.exists()
        assert not (tmp_path / "new").exists()


class _Gets:
    """Asks for an attribute of what may be named: of an enumeration it is one of its members, of all else refused."""

    def __init__(self, of: object, name: str) -> None:
        self.asked = of, name

    def __reduce__(self) -> tuple[object, tuple[object, str]]:
        return getattr, self.asked


def test_attributes_are_found_of_nothing_but_enumerations(tmp_path: Path) -> None:
    every: list[object] = [set, {}, torch.Size([1]), torch.float32]
    for given in every:
        (tmp_path / ".metadata").write_bytes(pickle.dumps(_Gets(given, "__class__")))
        with pytest.raises(ShardwiseError, match=re.escape("names builtins.getattr, which is not part of torch's")):
            read_metadata(tmp_path, ".metadata")
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_Gets(TensorProperties, "__init__")))
    with pytest.raises(ShardwiseError, match="a TensorProperties, where a Metadata should be"):
        read_metadata(tmp_path, ".metadata")


@pytest.mark.parametrize(
    "name",
    ["builtins.eval", "builtins.setattr", "torch.load", "torch.hub.load", "os.system", "subprocess.Popen",
     "torch.distributed.checkpoint.metadata.os", "torch.distributed.checkpoint.filesystem.pickle.loads"],
)  # fmt: skip
def test_no_name_outside_of_the_list_is_found(name: str, tmp_path: Path) -> None:
    module, _, attribute = name.rpartition(".")
    words = (f"\x8c{chr(len(each))}{each}" for each in (module, attribute))
    # STACK_GLOBAL, by hand: also with dots in it, which Python follows.
    (tmp_path / ".metadata").write_bytes(b"\x80\x04" + "".join(words).encode("latin-1") + b"\x93.")
    with pytest.raises(ShardwiseError, match=re.escape(f"names {name}, which is not part of torch's metadata")):
        TorchFolder(tmp_path)


def test_a_piece_outside_of_the_folder_is_not_read(tmp_path: Path) -> None:
    write_torch_folder(tmp_path / "dcp", {"one": ((2,), torch.float32)}, lambda _: torch.zeros(2))
    known = pickle.loads((tmp_path / "dcp" / ".metadata").read_bytes())
    for path in ("../secret", "/etc/hostname"):
        for place in known.storage_data.values():
            place.relative_path = path
        (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(known))
        with pytest.raises(ShardwiseError, match=re.escape(f"ValueError: {path} is not in the folder")):
            TorchFolder(tmp_path / "dcp")
