"""Entries of `tokenizer_config.json` that change tokens: the tokens are those of transformers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers as hf

from shardwise.serving.text.tokenizer import load_tokenizer
from tests.serving.text.test_text import byte_level, sentencepiece

TEXTS = ("a is", " a is", "is a<|end|> b", "é b  is", "a\n is")


def of_bytes() -> Any:
    """A tokenizer of bytes as Qwen's: a pattern, then bytes."""
    from tokenizers import Regex, normalizers, pre_tokenizers

    made = byte_level()
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    pattern = Regex(words + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    split = pre_tokenizers.Split(pattern, behavior="isolated")
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    return made


def of_pieces(scheme: str) -> Any:
    """A tokenizer of pieces as Llama 2's, saved by transformers 5."""
    from tokenizers import decoders, pre_tokenizers

    made = sentencepiece()
    made.normalizer = None
    mark = "\N{LOWER ONE EIGHTH BLOCK}"
    made.pre_tokenizer = pre_tokenizers.Metaspace(replacement=mark, prepend_scheme=scheme, split=False)
    if scheme == "never":
        made.decoder = decoders.Sequence([decoders.Replace(mark, " "), decoders.ByteFallback(), decoders.Fuse()])
    return made


MADE: dict[str, Callable[[], Any]] = {
    "bytes": byte_level,
    "a pattern": of_bytes,
    "pieces": sentencepiece,
    "pieces, first": lambda: of_pieces("first"),
    "pieces, never": lambda: of_pieces("never"),
}


@pytest.mark.parametrize(
    ("kind", "model", "entries"),
    [
        ("bytes", "gpt2", {"add_prefix_space": True}),
        ("bytes", "llama", {"add_prefix_space": True, "tokenizer_class": "GPT2TokenizerFast"}),
        # Those only keep the entry.
        ("bytes", "llama", {"add_prefix_space": True, "tokenizer_class": "LlamaTokenizerFast"}),
        ("bytes", "llama", {"add_prefix_space": True, "tokenizer_class": "PreTrainedTokenizerFast"}),
        ("bytes", "mixtral", {"add_prefix_space": True, "tokenizer_class": "GPT2Tokenizer"}),
        ("a pattern", "qwen3", {"add_prefix_space": True}),
        ("a pattern", "qwen2", {"add_prefix_space": True, "tokenizer_class": "PreTrainedTokenizerFast"}),
        ("a pattern", "qwen3", {"add_prefix_space": True, "tokenizer_class": "PreTrainedTokenizerFast"}),
        ("pieces", "llama", {"add_prefix_space": False, "tokenizer_class": "LlamaTokenizer"}),
        ("pieces, first", "llama", {"add_prefix_space": False, "tokenizer_class": "LlamaTokenizerFast"}),
        ("pieces, never", "deepseek_v2", {"add_prefix_space": True, "tokenizer_class": "LlamaTokenizer"}),
        ("pieces, never", "mistral", {"add_prefix_space": True, "tokenizer_class": "LlamaTokenizer"}),
        ("bytes", "llama", {"split_special_tokens": True}),
        ("bytes", "gpt2", {"split_special_tokens": True, "add_prefix_space": True}),
        ("bytes", "llama", {"split_special_tokens": False, "add_prefix_space": None}),
    ],
)
def test_entries_beside_a_tokenizer_change_tokens_as_in_transformers(
    kind: str, model: str, entries: dict[str, Any], tmp_path: Path
) -> None:
    MADE[kind]().save(str(tmp_path / "tokenizer.json"))
    end = "<|end|>" if kind in ("bytes", "a pattern") else "<unk>"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"unk_token": end, **entries}), encoding="utf-8")
    shape = {"model_type": model, "vocab_size": 400, "transformers_version": "5.1.0"}
    (tmp_path / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    theirs: Any = hf.AutoTokenizer.from_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    for text in TEXTS:
        tokens = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, special=False) == tokens
        assert ours.decode(tokens) == theirs.decode(tokens, skip_special_tokens=True)


def test_the_class_of_a_tokenizer_may_be_in_the_models_file_alone(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"add_prefix_space": true}', encoding="utf-8")
    shape = {"model_type": "llama", "vocab_size": 400, "tokenizer_class": "GPT2Tokenizer"}
    (tmp_path / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    theirs = hf.AutoTokenizer.from_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).encode("a is") == theirs.encode("a is") != byte_level().encode("a is").ids
