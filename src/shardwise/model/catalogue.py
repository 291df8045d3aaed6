"""Models by name."""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from shardwise.errors import ShardwiseError, nearest
from shardwise.model.config import read_config
from shardwise.model.families.fields import GIVE_THE_MODULE
from shardwise.model.model import Model
from shardwise.model.tables import deepseek, encoders, gpt, llama, nemotron, pretrained

_TABLES = (gpt, llama, pretrained, deepseek, nemotron, encoders)

# Every name with its configuration, in the order of the tables.
CATALOGUE: Mapping[str, Mapping[str, Any]] = {name: values for table in _TABLES for name, values in table.TABLE.items()}
ALIASES: Mapping[str, str] = {alias: name for table in _TABLES for alias, name in table.ALIASES.items()}

# Suffixes of published names that do not change the shape.
_SUFFIXES = re.compile(r"(-(hf|base|instruct|chat|it|pt|bf16|fp8|4k|128k|v0\.1|2407|2411|2501))+$")


def get_model(name: str) -> Model:
    """Return the model with this name: `llama3.1-405b`, or the publisher's `meta-llama/Llama-3.1-405B-Instruct`."""
    found = find_name(name)
    if found is None:
        known = (*CATALOGUE, *ALIASES)
        near = nearest(_plain(name), known)
        raise ShardwiseError(
            f"unknown model {name!r}; {len(CATALOGUE)} are known, of the families {', '.join(_families())}",
            remedy=(f"{near}, or " if near else "") + f"the path of a config.json, or {GIVE_THE_MODULE}",
        )
    return _made(found)


@lru_cache(maxsize=64)
def _made(name: str) -> Model:
    return read_config(CATALOGUE[name], name=name)


def find_name(name: str) -> str | None:
    """Return the catalogue's own name for a name in any usual spelling, or None."""
    spelled = _spellings()
    plain = _plain(name)
    return spelled.get(_letters(plain)) or spelled.get(_letters(_SUFFIXES.sub("", plain)))


def _families() -> list[str]:
    return list(dict.fromkeys(str(values["model_type"]) for values in CATALOGUE.values()))


@lru_cache(maxsize=1)
def _spellings() -> dict[str, str]:
    names = {_letters(name): name for name in CATALOGUE}
    return {**names, **{_letters(alias): name for alias, name in ALIASES.items()}}


def _plain(name: str) -> str:
    """Remove the publisher and remarks in brackets, use lower case, and turn underscores and spaces into dashes."""
    without = re.sub(r"\s*\(.*?\)", "", name.rsplit("/", 1)[-1])
    return without.strip().lower().replace("_", "-").replace(" ", "-")


def _letters(plain: str) -> str:
    """Keep only letters, digits and dots, because the use of dashes varies."""
    return re.sub(r"[^a-z0-9.]", "", plain.removeprefix("meta-"))
