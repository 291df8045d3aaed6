"""Documents of every kind, tokenizers of Hugging Face, and a folder of theirs fine-tuned, from what is typed."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from shardwise.cli import main
from shardwise.errors import ShardwiseError
from shardwise.training.data.documents import documents_of
from shardwise.training.data.tokens import open_tokens
from tests.nets.families import save_theirs

TEXTS = ["the cat sat on the mat", "", "a dog\nsat on the cat", "the mat"] * 40


def save_tokenizer(folder: Path) -> Any:
    """A small `tokenizer.json`, learned from the texts."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=90, special_tokens=["<unk>"], show_progress=False, initial_alphabet=[]
    )
    made.train_from_iterator(TEXTS, trainer)
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    return made


def save_parquet(path: Path, column: str = "text", texts: list[str | None] | None = None) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = TEXTS if texts is None else texts
    parquet.write_table(pyarrow.table({"id": list(range(len(rows))), column: rows}), path, row_group_size=7)


def test_text_json_lines_and_parquet_give_the_same_documents(tmp_path: Path) -> None:
    save_parquet(tmp_path / "t.parquet", texts=[*TEXTS, None])
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    expected = [text.encode() for text in TEXTS]
    assert list(documents_of(str(tmp_path / "t.jsonl"))) == expected
    # A row without text is no document.
    assert list(documents_of(str(tmp_path / "t.parquet"))) == [each for each in expected if each]


def test_the_column_may_be_named_and_what_is_wrong_is_told(tmp_path: Path) -> None:
    save_parquet(tmp_path / "t.parquet", column="body")
    assert next(documents_of(str(tmp_path / "t.parquet"), field="body")) == TEXTS[0].encode()
    with pytest.raises(ShardwiseError, match="has no column 'text'; it has id, body") as caught:
        list(documents_of(str(tmp_path / "t.parquet")))
    assert caught.value.remedy == "--field NAME"
    with pytest.raises(ShardwiseError, match=r"the column 'id' of .* has int64, and not text"):
        list(documents_of(str(tmp_path / "t.parquet"), field="id"))
    whole = (tmp_path / "t.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[:-10])
    with pytest.raises(ShardwiseError, match="is not a Parquet file"):
        list(documents_of(str(tmp_path / "cut.parquet")))
    damaged = bytearray(whole)
    end = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")  # Where the schema begins.
    damaged[4:end] = bytes(end - 4)
    (tmp_path / "bad.parquet").write_bytes(damaged)
    with pytest.raises(ShardwiseError, match="is damaged in rows"):
        list(documents_of(str(tmp_path / "bad.parquet"), field="body"))


@pytest.mark.parametrize(
    ("module", "words", "problem"),
    [
        ("pyarrow", ["t.parquet"], "is read with pyarrow, and that is not installed\n  try: pip install 'shardwise"),
        ("tokenizers", ["t.txt", "--tokenizer", "t.json"], "is read with tokenizers, which is not installed"),
    ],
)
def test_what_is_not_installed_is_named(
    module: str, words: list[str], problem: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    for name in ("t.parquet", "t.txt", "t.json"):
        (tmp_path / name).write_text("text")
    assert main(["data", *words, "--save", "out.tokens"]) == 1
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "out.tokens").exists()


def test_a_tokenizer_of_hugging_face_makes_the_tokens(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path / "hf")
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    for word in ("hf", "hf/tokenizer.json"):
        path = tmp_path / "out.tokens"
        words = ["data", str(tmp_path / "t.jsonl"), "--tokenizer", str(tmp_path / word), "--save", str(path)]
        assert main(words) == 0
        tokens = open_tokens(path)
        assert tokens.vocabulary == tokenizer.get_vocab_size()
        expected = [tokenizer.encode(text).ids for text in TEXTS if text]
        assert tokens.tokens.tolist() == [token for ids in expected for token in ids]
        assert tokens.num_documents == len(expected)


def test_tokenizers_that_are_none_and_text_that_is_none_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tokenizer(tmp_path / "hf")
    (tmp_path / "bad.json").write_text("{}")
    (tmp_path / "latin.txt").write_bytes("schön".encode("latin-1"))
    for words, problem in (
        (["--tokenizer", str(tmp_path / "bad.json")], "is not a tokenizer"),
        (["--tokenizer", str(tmp_path / "absent")], "there is no tokenizer at"),
        (["--tokenizer", str(tmp_path / "hf")], "is not valid UTF-8 at byte 3"),
    ):
        assert main(["data", str(tmp_path / "latin.txt"), *words]) == 1
        assert problem in capsys.readouterr().err


def test_a_folder_of_hugging_face_is_fine_tuned_as_it_is_from_text_to_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    theirs = save_theirs("llama", tmp_path / "hf")
    tokenizer = save_tokenizer(tmp_path / "hf")
    (tmp_path / "t.txt").write_text("\n".join(TEXTS))
    assert main(["data", "t.txt", "--tokenizer", "hf", "--save", "t.tokens"]) == 0
    (tmp_path / "tune.toml").write_text(
        'name = "tune"\nsteps = 30\nbatch = 4\nlog = 10\n'
        '[model]\nfolder = "hf"\n[data]\nsource = "t.tokens"\nsequence = 16\n'
        "[optimizer]\nrate = 1e-2\nwarmup = 2\n[checkpoint]\nevery = 0\n"
        "[evaluation]\nevery = 0\nbatches = 1\nsample = 8\n"
    )
    capsys.readouterr()
    assert main(["train", "tune.toml", "--devices", "1", "--folder", "run", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["loss"] < 3.0, "it began at about 4.6"
    assert answer["sample"].startswith("The ")
    assert main(["convert", "run", "tuned"]) == 0
    tuned = hf.AutoModelForCausalLM.from_pretrained("tuned")
    ids = torch.tensor([tokenizer.encode("the cat sat on the mat").ids])
    with torch.no_grad():
        before, after = (float(model(ids, labels=ids).loss) for model in (theirs, tuned))
    assert after < before - 1
    # The tokenizer comes along, and the configuration says the type that the weights have.
    assert (tmp_path / "tuned" / "tokenizer.json").read_bytes() == (tmp_path / "hf" / "tokenizer.json").read_bytes()
    assert tuned.dtype == torch.float32


def test_a_limit_cuts_no_character_in_half(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "hf")
    (tmp_path / "t.txt").write_text("the cät sat on the mat", encoding="utf-8")
    for limit in ("6B", "7B", "8B"):
        words = ["data", str(tmp_path / "t.txt"), "--tokenizer", str(tmp_path / "hf"), "--limit", limit]
        assert main(words) == 0
