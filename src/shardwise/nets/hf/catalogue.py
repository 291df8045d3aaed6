"""The model families by name, and the family of a folder or a model."""

from typing import Any

from shardwise.errors import ShardwiseError, unknown
from shardwise.nets.hf.dense import LLAMA, MISTRAL, QWEN2, QWEN3
from shardwise.nets.hf.entries import Entries
from shardwise.nets.hf.family import Family
from shardwise.nets.hf.gpt2 import GPT2
from shardwise.nets.hf.mixtures import DEEPSEEK_V2, DEEPSEEK_V3, MIXTRAL, QWEN3_MOE
from shardwise.nets.settings import Settings

#: In the order in which they are tried for a model whose family is not given.
FAMILIES = {
    family.name: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, MIXTRAL, QWEN3_MOE, DEEPSEEK_V2, DEEPSEEK_V3, GPT2)
}


def family_of(entries: Entries) -> Family:
    """Return the family of a `config.json`."""
    name = entries.text("model_type")
    if name not in FAMILIES:
        raise unknown("model_type", name, FAMILIES)
    entries.must_be("is_causal", True)  # Embedding models made of these families attend in both directions.
    if entries.find("quantization_config") is not None:
        method = entries.table("quantization_config").find("quant_method")
        raise ShardwiseError(
            f"the weights beside {entries.origin} are quantised ({method}), and only plain ones are read",
            remedy="a folder with bfloat16 weights",
        )
    return FAMILIES[name]


def config_for(settings: Settings, family: str | None = None) -> tuple[Family, dict[str, Any]]:
    """Return a family that can express all of the settings, or the given one; and its `config.json`."""
    if family is not None and family not in FAMILIES:
        raise unknown("family", family, FAMILIES)
    able: dict[str, dict[str, Any]] = {}
    unable: dict[str, str] = {}
    for each in FAMILIES.values():
        try:
            able[each.name] = each.config(settings)
        except ShardwiseError as error:
            # Not the error itself: its traceback would keep this frame and all callers' frames, with their models,
            # alive.
            unable[each.name] = error.problem
    if family is None and not able:
        raise ShardwiseError(
            f"no family that we write can express all of {settings}", remedy=f"settings as in {', '.join(FAMILIES)}"
        )
    chosen = next(iter(able)) if family is None else family
    if chosen in unable:
        raise ShardwiseError(unable[chosen], remedy=f"family={next(iter(able))!r}" if able else None)
    return FAMILIES[chosen], able[chosen]
