"""A Hugging Face `config.json` read into a `Model`."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardwise.errors import ShardwiseError, nearest
from shardwise.model.families.bert import bert
from shardwise.model.families.fields import GIVE_THE_MODULE, Fields
from shardwise.model.families.gpt import bloom, falcon, gpt2, gpt_neox, mpt, opt, phi
from shardwise.model.families.hybrid import nemotron_h
from shardwise.model.families.llama import gemma, gemma2, gemma3, llama, mistral, nemotron, phi3, qwen2, qwen3
from shardwise.model.families.resnet import resnet
from shardwise.model.families.sparse import deepseek, gpt_oss, llama4, mixtral, phimoe, qwen2_moe, qwen3_moe
from shardwise.model.families.t5 import t5
from shardwise.model.families.vit import vit
from shardwise.model.model import Model

# Most families are read by the function with their name; `_OTHERS` are read by the function of another family.
_FAMILIES: tuple[Callable[[Fields, str], Model], ...] = (
    bert, bloom, falcon, gemma, gemma2, gemma3, gpt2, gpt_neox, gpt_oss, llama, llama4, mistral, mixtral, mpt, nemotron,
    nemotron_h, opt, phi, phi3, phimoe, qwen2, qwen2_moe, qwen3, qwen3_moe, resnet, t5, vit,
)  # fmt: skip
_OTHERS = {
    "deepseek_v2": deepseek,
    "deepseek_v3": deepseek,
    "gemma3_text": gemma3,
    "internlm": llama,
    "llama4_text": llama4,
}
# The `model_type` of a configuration, and the function that reads it.
READERS = dict(sorted({**{reader.__name__: reader for reader in _FAMILIES}, **_OTHERS}.items()))

_EXAMPLE = "a config.json as Hugging Face writes it, with a model_type like llama"


def read_config(source: Mapping[str, Any] | Path, *, name: str | None = None) -> Model:
    """Return the model of a configuration: its values, or the path of a `config.json` or of the folder with one.

    Of a vision-language model (Gemma 3, Llama 4), only the language model is read.
    """
    if isinstance(source, Path):
        values = _load(source)
        called = source.name if source.suffix == ".json" else f"{source.name}/config.json"
        name = name or (source.parent.name if source.suffix == ".json" else source.name) or source.stem
    else:
        values, called = source, "the configuration"
    kind = values.get("model_type")
    if kind not in READERS:
        raise _unknown_family(kind, called)
    inner = values.get("text_config")
    if isinstance(inner, Mapping):
        values = {**inner, "model_type": kind}
    return READERS[kind](Fields(values=values, source=called), name or str(kind))


def _load(path: Path) -> Mapping[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ShardwiseError(f"the configuration {path} cannot be read: {why}", remedy=_EXAMPLE) from None
    except json.JSONDecodeError as error:
        raise ShardwiseError(f"{file.name} is not valid JSON: {error}", remedy=_EXAMPLE) from None
    if not isinstance(values, Mapping):
        raise ShardwiseError(f"{file.name} is not a JSON object", remedy=_EXAMPLE)
    return values


def _unknown_family(kind: object, called: str) -> ShardwiseError:
    """Return an error that says what is missing, and how to give the module instead."""
    if not isinstance(kind, str):
        return ShardwiseError(f"{called} has no model_type, so its family is not known", remedy=_EXAMPLE)
    near = nearest(kind, READERS)
    meant = f'"model_type": "{near}" if it has the layers of {near}, or ' if near else ""
    return ShardwiseError(
        f"{called} is of the family {kind!r}, whose layers are not known here; known: {', '.join(READERS)}",
        remedy=meant + GIVE_THE_MODULE,
    )
