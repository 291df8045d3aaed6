"""Entries of `tokenizer_config.json` that change how a text becomes tokens, as transformers applies them.

`tokenizer.json` says nearly everything. Two entries beside it count more: `split_special_tokens`, for every tokenizer,
and `add_prefix_space`, for three classes of tokenizers; the others ignore it.
"""

import json
from collections.abc import Mapping
from typing import Any

_GPT2, _QWEN, _LLAMA = "GPT2Tokenizer", "Qwen2Tokenizer", "LlamaTokenizer"
#: The class of a model that names none; and those whose tokenizers are always as `tokenizer.json` has them.
_CLASS_OF_MODEL = {"gpt2": _GPT2, "qwen2": _QWEN, "qwen3": _QWEN, "qwen3_moe": _QWEN}
_AS_THE_FILE = ("mistral", "mixtral")
#: Models whose tokenizers have their class, whatever their files say.
_ALWAYS_OF_ITS_MODEL = ("qwen2",)
_MARK = "\N{LOWER ONE EIGHTH BLOCK}"


def apply_settings(loaded: Any, config: Mapping[str, Any], model_type: object) -> Any:
    """Return the tokenizer of a `tokenizer.json` with the entries of the file beside it applied."""
    prefix, kind = config.get("add_prefix_space"), _kind(config, model_type)
    if isinstance(prefix, bool) and kind is not None:
        described = json.loads(loaded.to_str())
        before = json.dumps(described)
        is_of_bytes = '"ByteLevel"' in json.dumps(described["pre_tokenizer"])
        if is_of_bytes and kind != _LLAMA:  # Of those that only call themselves Llama's, it is ignored.
            _set_of_bytes(described["pre_tokenizer"], prefix)
        elif not is_of_bytes and kind == _LLAMA:
            _set_of_pieces(described, prefix, is_legacy=bool(config.get("legacy", False)))
        if json.dumps(described) != before:
            loaded = type(loaded).from_str(json.dumps(described))
    if config.get("split_special_tokens") is True:
        loaded.encode_special_tokens = True
    return loaded


def _kind(config: Mapping[str, Any], model_type: object) -> str | None:
    """Return the one of the three classes that it is of, if any."""
    said, own = config.get("tokenizer_class"), _CLASS_OF_MODEL.get(str(model_type))
    found = own if not isinstance(said, str) or model_type in _ALWAYS_OF_ITS_MODEL else said.removesuffix("Fast")
    return found if found in (_GPT2, _QWEN, _LLAMA) and model_type not in _AS_THE_FILE else None


def _set_of_bytes(part: dict[str, Any], prefix: bool) -> None:
    for each in part.get("pretokenizers", [part]):
        if each["type"] == "ByteLevel":
            each["add_prefix_space"] = prefix


def _set_of_pieces(described: dict[str, Any], prefix: bool, *, is_legacy: bool) -> None:
    """Have texts begin with a space or not, and have it left out again where tokens become text."""
    normalizers, decoders = _parts(described, "normalizer"), _parts(described, "decoder")
    prepend = {"type": "Prepend", "prepend": _MARK}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    metaspaces = [each for each in _parts(described, "pre_tokenizer") if each["type"] == "Metaspace"]
    if not prefix:
        _put(described, "normalizer", [each for each in normalizers if each != prepend])
        _put(described, "decoder", [each for each in decoders if each != strip])
    elif not metaspaces and prepend not in normalizers:
        _put(described, "normalizer", [prepend, *normalizers])
    if prefix and strip not in decoders and not any(each["type"] == "Metaspace" for each in decoders):
        _put(described, "decoder", [*decoders, strip])
    scheme = ("always" if is_legacy else "first") if prefix else "never"
    for each in (*metaspaces, *(each for each in decoders if each["type"] == "Metaspace")):
        if (each["prepend_scheme"] == "never") == prefix:
            each["prepend_scheme"] = scheme


#: What the parts of a sequence of each kind are called.
_LISTS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}


def _parts(described: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    part = described.get(name)
    return [] if part is None else list(part.get(_LISTS[name], [part]))


def _put(described: dict[str, Any], name: str, parts: list[dict[str, Any]]) -> None:
    described[name] = {"type": "Sequence", _LISTS[name]: parts} if parts else None
