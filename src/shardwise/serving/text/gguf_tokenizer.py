"""A tokenizer from the tables of a GGUF file: byte-level BPE (`gpt2`) and SentencePiece's BPE by scores (`llama`)."""

from functools import lru_cache
from pathlib import Path
from typing import Any

from shardwise.errors import ShardwiseError

#: Kinds of tokens, as GGUF numbers them. Those of a user's are never split either, but are part of a text.
_UNKNOWN, _CONTROL, _USERS = 2, 3, 4
#: How text is split before byte pairs are merged, by the name in `tokenizer.ggml.pre`. Sources: llama.cpp's
#: `llama-vocab.cpp`, and the `tokenizer.json` of the models.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_CUTS = {
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_LLAMA3,),
    "qwen2": (_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"),),
}
#: Other names of these.
_SAME = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2"}


def open_gguf(path: Path) -> Any:
    """Return the package's reader of a file. It maps the file, and has parsed its tables (2 s for 100,000 texts)."""
    about = path.stat()
    return _open(path, about.st_size, about.st_mtime_ns)


@lru_cache(maxsize=1)  # A model's tokenizer, what ends its texts, and its weights are read one after another.
def _open(path: Path, *of_file: int) -> Any:  # noqa: ARG001 - another file at the same path is read again
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ShardwiseError(
            f"{path} is read with gguf, which is not installed", remedy="pip install 'shardwise[serve]'"
        ) from None
    try:
        return GGUFReader(str(path))
    except (ValueError, OSError, IndexError) as error:
        raise ShardwiseError(f"{path} is not a GGUF file: {error}", remedy="a whole file: download it again") from None


def load_gguf(path: Path) -> tuple[Any, str | None, dict[str, str]]:
    """Load the tokenizer, the chat template, and the named tokens of a file."""
    reader = open_gguf(path)
    read = {name: field.contents() for name, field in reader.fields.items() if name.startswith("tokenizer.")}
    if "tokenizer.ggml.tokens" not in read:
        raise ShardwiseError(f"{path} has no tokenizer", remedy="a GGUF file of a language model")
    tokens: list[str] = read["tokenizer.ggml.tokens"]
    kind = read.get("tokenizer.ggml.model")
    make = {"gpt2": _byte_level, "llama": _sentencepiece}.get(str(kind))
    if make is None:
        raise ShardwiseError(
            f"the tokenizer of {path} is of the kind {kind!r}; known: gpt2, llama", remedy="a folder of Hugging Face"
        )
    if make is _byte_level and (cut := _cut_of(read)) not in _CUTS:
        # Cut otherwise, a text would be other tokens than those that the model has learned.
        raise ShardwiseError(
            f"the tokenizer of {path} cuts texts as {cut!r} does; known: {', '.join((*_CUTS, *_SAME))}",
            remedy="a folder of Hugging Face",
        )
    named = {}
    for name in ("bos", "eos", "unknown", "padding"):
        token = read.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(token, int) and token < len(tokens):
            named[{"unknown": "unk", "padding": "pad"}.get(name, name) + "_token"] = tokens[token]
    return make(read, tokens, named), read.get("tokenizer.chat_template"), named


def _cut_of(read: dict[str, Any]) -> str:
    said = str(read.get("tokenizer.ggml.pre", "gpt-2"))
    return _SAME.get(said, said)


def _byte_level(read: dict[str, Any], tokens: list[str], named: dict[str, str]) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    kind = _cut_of(read)
    is_llama3 = kind == "llama-bpe"
    merges = [tuple(pair.split(" ", 1)) for pair in read.get("tokenizer.ggml.merges", [])]
    vocabulary = {token: place for place, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=is_llama3))
    if kind == "qwen2":
        made.normalizer = normalizers.NFC()
    split = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in _CUTS[kind]]
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [*split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    _finish(made, read, tokens, named, adds_bos=is_llama3)
    return made


def _sentencepiece(read: dict[str, Any], tokens: list[str], named: dict[str, str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    places = {token: place for place, token in enumerate(tokens)}
    made = Tokenizer(
        models.BPE(
            vocab=places, merges=_merges_by_score(tokens, read["tokenizer.ggml.scores"], places),
            byte_fallback=True, fuse_unk=True, unk_token=named.get("unk_token"),
        )
    )  # fmt: skip
    mark = "\N{LOWER ONE EIGHTH BLOCK}"
    prefix = [normalizers.Prepend(mark)] if read.get("tokenizer.ggml.add_space_prefix", True) else []
    made.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", mark)])
    made.decoder = decoders.Sequence(
        [
            decoders.Replace(mark, " "), decoders.ByteFallback(), decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if prefix else []),
        ]
    )  # fmt: skip
    _finish(made, read, tokens, named, adds_bos=True)
    return made


def _merges_by_score(tokens: list[str], scores: list[float], places: dict[str, int]) -> list[tuple[str, str]]:
    """Return the merges, those with the best result first, and for one result the best halves first."""
    found = []
    for token, score in zip(tokens, scores, strict=True):
        halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [pair for pair in halves if pair[0] in places and pair[1] in places]
        known.sort(key=lambda pair: (places[pair[0]], places[pair[1]]))
        found += [(score, pair) for pair in known]
    found.sort(key=lambda each: each[0], reverse=True)
    return [pair for _, pair in found]


def _finish(made: Any, read: dict[str, Any], tokens: list[str], named: dict[str, str], *, adds_bos: bool) -> None:
    """Add special tokens, which are never split, and the tokens around a text."""
    from tokenizers import AddedToken, processors

    kinds = read.get("tokenizer.ggml.token_type", [])
    special = [token for token, kind in zip(tokens, kinds, strict=False) if kind in (_UNKNOWN, _CONTROL)]
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    users = [token for token, kind in zip(tokens, kinds, strict=False) if kind == _USERS]
    made.add_tokens([AddedToken(token, special=False, normalized=False) for token in users])
    around = {}
    if read.get("tokenizer.ggml.add_bos_token", adds_bos) and "bos_token" in named:
        around["before"] = named["bos_token"]
    if read.get("tokenizer.ggml.add_eos_token", False) and "eos_token" in named:
        around["after"] = named["eos_token"]
    if around:
        words = [around.get("before"), "$A", around.get("after")]
        made.post_processor = processors.TemplateProcessing(
            single=" ".join(word for word in words if word),
            special_tokens=[(token, tokens.index(token)) for token in set(around.values())],
        )
