"""Hugging Face folders: to our checkpoints and back to the bit, and fine-tuned as they are."""

import json
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy

from shardwise.cli import main
from shardwise.errors import ShardwiseError
from shardwise.ranks.spawn import Ranks
from shardwise.training.convert import convert
from shardwise.training.data.rows import training_and_held_out
from shardwise.training.data.tokens import TokenWriter, open_tokens
from shardwise.training.run import train_rank
from tests.nets.families import VOCABULARY, save_theirs
from tests.training.programs import losses_of, make_job, saved_state


def tensors_in(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


@pytest.mark.parametrize("family", ["llama", "llama, tied", "qwen3", "mixtral"])
def test_a_folder_comes_back_from_our_checkpoint_to_the_bit(family: str, tmp_path: Path) -> None:
    save_theirs(family, tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours", file_bytes=20_000)
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 1
    convert(tmp_path / "ours", tmp_path / "again", file_bytes=20_000)
    before, after = tensors_in(tmp_path / "theirs"), tensors_in(tmp_path / "again")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype for name in before)
    assert (tmp_path / "again" / "config.json").read_text() == (tmp_path / "theirs" / "config.json").read_text()


def test_what_lies_beside_our_checkpoint_is_as_it_was_written_or_refused(tmp_path: Path) -> None:
    save_theirs("llama", tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours")
    config = tmp_path / "ours" / "hf" / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e', '"rms_norm_eps": 2e'))
    with pytest.raises(ShardwiseError, match="hf is damaged: its files are not those that were written"):
        convert(tmp_path / "ours", tmp_path / "again")


@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.whole), "mixtral"])
def test_a_folder_is_fine_tuned_as_it_is_and_transformers_reads_what_came_of_it(
    family: str, two: Ranks, tmp_path: Path
) -> None:
    theirs = save_theirs(family, tmp_path / "theirs")
    generator = torch.Generator().manual_seed(0)
    with TokenWriter(tmp_path / "tokens", vocabulary=VOCABULARY, tokenizer="none") as writer:
        for _ in range(20):
            writer.add(torch.randint(0, VOCABULARY, (100,), generator=generator).tolist())
    source = {"model__folder": str(tmp_path / "theirs"), "data__source": str(tmp_path / "tokens"), "data__sequence": 16}
    two.run(train_rank, make_job(tmp_path / "run", "tp=2", steps=2, optimizer__rate=1e-2, **source))
    rows, _ = training_and_held_out(open_tokens(tmp_path / "tokens"), sequence=16, held_out=0.02, masks=False, batch=8)
    from shardwise.training.data.rows import Batches

    batches = Batches(rows=rows, size=8, seed=0)
    # Their own first loss, where no document ends in a row.
    batch = batches.at(0)
    documents = make_job(tmp_path / "plain", "dp=1", steps=1, data__masks=False, **source)
    train_rank(documents)
    with torch.no_grad():
        logits = theirs(batch["input_ids"]).logits
    expected = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    assert losses_of(tmp_path / "plain")[0] == pytest.approx(float(expected), rel=1e-5)
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "tuned"), "--json"]) == 0
    tuned = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    saved = saved_state(tmp_path / "run")
    assert torch.equal(tuned.state_dict()["model.embed_tokens.weight"], saved["embed.weight"])
    assert not torch.equal(
        tuned.state_dict()["model.embed_tokens.weight"], theirs.state_dict()["model.embed_tokens.weight"]
    )


def test_weights_may_change_their_type_on_the_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_theirs("llama", tmp_path / "theirs")
    assert main(["convert", str(tmp_path / "theirs"), str(tmp_path / "ours"), "--dtype", "bf16", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "shardwise"
    convert(tmp_path / "ours", tmp_path / "again")
    before, after = tensors_in(tmp_path / "theirs"), tensors_in(tmp_path / "again")
    assert all(torch.equal(before[name].bfloat16(), after[name]) for name in before)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("absent", "does not exist"),
        ("empty", "has neither index.json nor config.json"),
        ("run", "has no checkpoint yet"),
    ],
)
def test_what_cannot_be_converted_is_told(
    source: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    assert main(["convert", str(tmp_path / source), str(tmp_path / "target")]) == 1
    assert problem in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "empty"), str(tmp_path / "run")]) == 1
    assert "is not empty" in capsys.readouterr().err
    assert main(["convert"]) == 1
    assert "SOURCE is missing" in capsys.readouterr().err
