"""Read and write rotary positions as entries of a `config.json`."""

from typing import Any

from shardwise.errors import ShardwiseError, unknown
from shardwise.nets.hf.entries import Entries
from shardwise.nets.settings import Divided, Linear, Llama3, Rope, Yarn

_KINDS = ("default", "linear", "llama3", "yarn")


def read_rope(entries: Entries, *, theta: float = 10000.0, interleaved: bool = False) -> Rope:
    """Read from `rope_parameters`, used since version 5, or from `rope_theta` and `rope_scaling` before. transformers
    takes the older if both are there.
    """
    key = "rope_scaling" if entries.find("rope_scaling") else "rope_parameters"
    table = entries.table(key)
    for each in (entries, table):
        each.must_be("partial_rotary_factor", 1.0)
    theta = table.number("rope_theta", entries.number("rope_theta", theta))
    kind = table.text("rope_type", table.text("type", "default"))
    if kind not in _KINDS:
        raise unknown("rope_type", kind, _KINDS)
    if kind in ("linear", "llama3"):
        table.must_be("mscale_all_dim", 0)  # DeepSeek's scale of the logits, which transformers applies to any kind.
    return Rope(theta=theta, scaling=_read_scaling(kind, table, entries), interleaved=interleaved)


def _read_scaling(kind: str, table: Entries, entries: Entries) -> Linear | Llama3 | Yarn | None:
    if kind == "default":
        return None
    if kind == "linear":
        return Linear(factor=table.number("factor"))
    length = entries.integer("max_position_embeddings")
    original = entries.integer(
        "original_max_position_embeddings", table.integer("original_max_position_embeddings", length)
    )
    if kind == "llama3":
        return Llama3(
            factor=table.number("factor"),
            low_turns=table.number("low_freq_factor"),
            high_turns=table.number("high_freq_factor"),
            original_length=original,
        )
    return Yarn(
        factor=table.number("factor", length / original),
        original_length=original,
        fast_turns=table.number("beta_fast", 32.0),
        slow_turns=table.number("beta_slow", 1.0),
        magnitude=_find_number(table, "mscale"),
        magnitude_all=_find_number(table, "mscale_all_dim"),
        attention_factor=_find_number(table, "attention_factor"),
        rounded=table.flag("truncate", True),
    )


def write_rope(rope: Rope) -> dict[str, Any]:
    """Return the older form, which every version reads."""
    return {"rope_theta": rope.theta, "rope_scaling": _write_scaling(rope.scaling)}


def _write_scaling(scaling: Linear | Llama3 | Yarn | Divided | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    if isinstance(scaling, Divided):
        raise ShardwiseError("a config.json cannot say that each frequency of positions has a divisor of its own")
    if isinstance(scaling, Linear):
        return {"rope_type": "linear", "factor": scaling.factor}
    shared = {"factor": scaling.factor, "original_max_position_embeddings": scaling.original_length}
    if isinstance(scaling, Llama3):
        turns = {"low_freq_factor": scaling.low_turns, "high_freq_factor": scaling.high_turns}
        return {"rope_type": "llama3", **shared, **turns}
    optional = {
        "mscale": scaling.magnitude,
        "mscale_all_dim": scaling.magnitude_all,
        "attention_factor": scaling.attention_factor,
    }
    return {
        "rope_type": "yarn",
        **shared,
        "beta_fast": scaling.fast_turns,
        "beta_slow": scaling.slow_turns,
        **{key: value for key, value in optional.items() if value is not None},
        **({} if scaling.rounded else {"truncate": False}),
    }


def _find_number(table: Entries, key: str) -> float | None:
    return None if table.find(key) is None else table.number(key)
