"""Token files, the order of samples, rows and their masks; and what is said of files that are wrong."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.cli import main
from shardwise.errors import ShardwiseError
from shardwise.training.data.documents import documents_of
from shardwise.training.data.order import Order
from shardwise.training.data.rows import IGNORED, Batch, Batches, Prefetcher, training_and_held_out
from shardwise.training.data.source import make_tokens
from shardwise.training.data.tokenizer import ByteTokenizer
from shardwise.training.data.tokens import BLOCK_BYTES, Tokens, TokenWriter, open_tokens


def written(path: Path, *documents: bytes) -> Tokens:
    with TokenWriter(path, vocabulary=256, tokenizer="bytes") as writer:
        for document in documents:
            writer.add(document)
    return open_tokens(path)


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(0, 5))
def test_every_sample_comes_once_in_an_epoch(size: int, seed: int) -> None:
    order = Order(size=size, seed=seed)
    assert sorted(order.samples(0, size)) == list(range(size))
    assert sorted(order.samples(size, size)) == list(range(size))


def test_samples_do_not_depend_on_how_they_are_asked_for() -> None:
    order = Order(size=1000, seed=3)
    together = order.samples(0, 2500)
    assert np.array_equal(together, np.concatenate([order.samples(first, 50) for first in range(0, 2500, 50)]))
    assert not np.array_equal(together[:1000], together[1000:2000]), "epochs differ"
    assert not np.array_equal(together, Order(size=1000, seed=4).samples(0, 2500))
    assert abs(np.corrcoef(np.arange(1000), together[:1000])[0, 1]) < 0.1


def test_tokens_come_back_and_other_programs_can_read_them(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    long = bytes(range(256)) * (BLOCK_BYTES // 200)
    tokens = written(tmp_path / "t", b"hello", b"", long)
    assert bytes(tokens.tokens) == b"hello" + long
    assert tokens.ends.tolist() == [5, 5 + len(long)]
    tokens.verify()
    assert bytes(load_file(tmp_path / "t")["tokens"]) == b"hello" + long
    assert not list(tmp_path.glob("*.part"))


def test_larger_vocabularies_have_wider_tokens(tmp_path: Path) -> None:
    for vocabulary, kind in ((256, np.uint8), (257, np.uint16), (70_000, np.uint32)):
        with TokenWriter(tmp_path / "t", vocabulary=vocabulary, tokenizer="some") as writer:
            writer.add([1, vocabulary - 1])
        tokens = open_tokens(tmp_path / "t")
        assert tokens.tokens.dtype == kind
        assert tokens.tokens.tolist() == [1, vocabulary - 1]


def test_the_rows_of_the_drawing(tmp_path: Path) -> None:
    tokens = written(tmp_path / "t", b"aaaa", b"bbbbbb", b"cc")
    rows, _ = training_and_held_out(tokens, sequence=4, held_out=0.0, masks=True, batch=1)
    batch = rows.batch(np.arange(3))
    a, b, c, none = *b"abc", IGNORED
    assert batch["input_ids"].tolist() == [[a] * 4, [b] * 4, [b, b, c, c]]
    assert batch["labels"].tolist() == [[a, a, a, none], [b] * 4, [b, none, c, none]]
    assert batch["documents"].tolist() == [[0] * 4, [1] * 4, [1, 1, 2, 2]]


def test_held_out_rows_are_the_last_and_none_of_them_is_trained_on(tmp_path: Path) -> None:
    tokens = written(tmp_path / "t", bytes(range(200)))
    rows, held_out = training_and_held_out(tokens, sequence=4, held_out=0.1, masks=False, batch=2)
    assert (rows.num_rows, held_out.num_rows) == (45, 5)
    assert held_out.batch(np.arange(5))["input_ids"].flatten().tolist() == list(range(180, 200))
    trained = {
        int(each) for step in range(23) for each in Batches(rows=rows, size=2, seed=0).at(step)["input_ids"][:, 0]
    }
    assert trained == set(range(0, 180, 4))


def test_a_thread_reads_ahead_and_hands_on_its_errors() -> None:
    def read(step: int) -> Batch:
        if step == 4:
            raise ShardwiseError("no step 4")
        return {}

    with Prefetcher(read, 2, 9) as ahead:
        assert ahead.next() == ahead.next() == {}
        with pytest.raises(ShardwiseError, match="no step 4"):
            ahead.next()
    with Prefetcher(lambda _: {}, 0, 10**9):
        pass  # Ends though it could go on for ever.


def test_text_lines_parquet_and_folders_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"plain")
    (tmp_path / "b.jsonl").write_text('{"text": "one"}\n\n{"text": "two", "other": 1}\n')
    assert list(documents_of(str(tmp_path / "b.jsonl"))) == [b"one", b"two"]
    assert list(documents_of(str(tmp_path))) == [b"plain", b"one", b"two"]
    library = documents_of("stdlib")
    assert b"__all__" in b"".join(next(library) for _ in range(20))
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"body": ["x", "yz"]}), tmp_path / "c.parquet")
    assert list(documents_of(str(tmp_path / "c.parquet"), field="body")) == [b"x", b"yz"]
    with pytest.raises(ShardwiseError, match="has no column 'text'; it has body"):
        list(documents_of(str(tmp_path / "c.parquet")))


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("e.txt", b"", "is empty, at byte 0"),
        ("e.jsonl", b"", "is empty, at byte 0"),
        ("f.jsonl", b'{"text": "a"}\n{"text": \n', r"line 2 of .*f\.jsonl, at byte 14, is not valid JSON"),
        (
            "g.jsonl",
            b'{"txt": "a"}\n',
            r"line 1 of .*g\.jsonl, at byte 0, has no text under 'text': it has the keys txt",
        ),
        ("h.jsonl", b'{"text": "\\ud800"}\n', r"line 1 of .*h\.jsonl, at byte 0, has half a character"),
        ("i.jsonl", b'{"text": "a"}\n\xff\xfe\n', r"line 2 of .*i\.jsonl, at byte 14, is not valid JSON"),
        ("j.jsonl", b"[" * 100_000, r"line 1 of .*j\.jsonl, at byte 0, is not valid JSON"),
    ],
)
def test_bad_inputs_are_told_with_their_place(name: str, content: bytes, problem: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ShardwiseError, match=problem):
        list(documents_of(str(tmp_path / name)))


def test_damage_to_a_token_file_is_told_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "t"
    tokens = written(path, b"x" * (BLOCK_BYTES + 100))
    whole = path.read_bytes()
    at = tokens.offset + BLOCK_BYTES + 5
    path.write_bytes(whole[:at] + b"y" + whole[at + 1 :])
    with pytest.raises(ShardwiseError, match=f"is damaged between the bytes {tokens.offset + BLOCK_BYTES} and "):
        open_tokens(path).verify()
    path.write_bytes(whole[:5000])
    with pytest.raises(
        ShardwiseError, match=f"has 5000 bytes, and by its header it would have {len(whole)}.* byte 5000"
    ):
        open_tokens(path)
    for content, problem in ((b"", "is empty, at byte 0"), (b"text" * 2000, "is not a token file")):
        path.write_bytes(content)
        with pytest.raises(ShardwiseError, match=problem):
            open_tokens(path)
    with pytest.raises(ShardwiseError, match="cannot be read: No such file"):
        open_tokens(tmp_path / "absent")


def test_damage_behind_the_tokens_and_in_the_header_is_told(tmp_path: Path) -> None:
    path = tmp_path / "t"
    tokens = written(path, b"one document", b"another")
    whole = path.read_bytes()
    end = tokens.offset + tokens.tokens.nbytes
    path.write_bytes(whole[: end + 8] + b"\7" + whole[end + 9 :])
    with pytest.raises(ShardwiseError, match=f"is damaged after byte {end}, where it says where documents end"):
        open_tokens(path).verify()
    for before, after in (
        (b'"vocabulary": "256"', b'"vocabulary": "2x6"'),
        (b'"U8", "shape": [19]', b'"U9", "shape": [19]'),
    ):
        assert before in whole
        path.write_bytes(whole.replace(before, after))
        with pytest.raises(ShardwiseError, match="is damaged in its header, which are its first 4096 bytes"):
            open_tokens(path)


def test_a_token_that_the_vocabulary_does_not_have_is_told_when_it_is_read(tmp_path: Path) -> None:
    """A large file is not compared with its checksums before it is trained on."""
    path = tmp_path / "t"
    with TokenWriter(path, vocabulary=300, tokenizer="some") as writer:
        writer.add([1, 2, 3, 4, 299, 5, 6, 7])
    content = bytearray(path.read_bytes())
    at = open_tokens(path).offset + 2 * 4
    content[at : at + 2] = (300).to_bytes(2, "little")
    path.write_bytes(content)
    rows, _ = training_and_held_out(open_tokens(path), sequence=4, held_out=0.0, masks=False, batch=1)
    for row in range(2):  # As a label of the first, and as a token of the second.
        with pytest.raises(ShardwiseError, match=f"has the token 300 at byte {at}, and its vocabulary has 300"):
            rows.batch(np.array([row]))


def test_too_few_tokens_for_a_batch_are_counted(tmp_path: Path) -> None:
    tokens = written(tmp_path / "t", b"x" * 100)
    with pytest.raises(ShardwiseError, match="has 100 tokens, which are 10 rows of 10: 8 to evaluate with and not 8"):
        training_and_held_out(tokens, sequence=10, held_out=0.1, masks=True, batch=8)


def test_nothing_is_left_of_a_file_that_could_not_be_made(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\nno\n')
    with pytest.raises(ShardwiseError, match="line 2"):
        make_tokens([str(tmp_path / "bad.jsonl")], tmp_path / "t", ByteTokenizer())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.jsonl"]


def test_the_command_makes_and_checks_token_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "library.tokens"
    assert main(["data", "stdlib", "--limit", "50kB", "--save", str(path), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["num_tokens"] == 50_000
    assert main(["data", "--check", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["digest"] == made["digest"]
    path.write_bytes(path.read_bytes()[:-1])
    assert main(["data", "--check", str(path)]) == 1
    assert "it was cut short" in capsys.readouterr().err
