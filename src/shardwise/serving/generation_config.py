"""A model's `generation_config.json`: the tokens that end its texts, and how its authors would have it sample."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.errors import ShardwiseError

GENERATION = "generation_config.json"
#: Fields of a request that the file may have a value for, and the value that changes nothing.
_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
#: Entries that change tokens too and are not applied here, and values that change nothing.
_LEFT_OUT: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,), "no_repeat_ngram_size": (0,), "encoder_no_repeat_ngram_size": (0,), "bad_words_ids": ([],),
    "suppress_tokens": ([],), "begin_suppress_tokens": ([],), "forced_bos_token_id": (), "forced_eos_token_id": (),
    "sequence_bias": ({},), "min_length": (0,), "min_new_tokens": (0,), "typical_p": (1, 1.0),
    "epsilon_cutoff": (0, 0.0), "eta_cutoff": (0, 0.0), "top_h": (), "guidance_scale": (1, 1.0),
    "penalty_alpha": (0, 0.0), "exponential_decay_length_penalty": (), "stop_strings": ([],),
    "encoder_repetition_penalty": (1, 1.0), "watermarking_config": (),
}  # fmt: skip


class Suggested(NamedTuple):
    """The sampling of requests that say nothing of it, and entries that are not applied."""

    sampling: Mapping[str, float]
    left_out: tuple[str, ...] = ()


NONE = Suggested({})


def read_suggested(folder: Path) -> Suggested:
    """Read the file of a folder, which may be missing."""
    entries = _read(folder / GENERATION)
    # What samples nothing needs no temperature: transformers leaves these out too.
    fields = ("repetition_penalty",) if entries.get("do_sample") is False else _SAMPLING
    said = {field: entries[field] for field in fields if entries.get(field) is not None}
    sampling = {field: value for field, value in said.items() if value != _SAMPLING[field]}
    left_out = tuple(
        f"{key}={entries[key]}"
        for key, same in _LEFT_OUT.items()
        if entries.get(key) is not None and entries[key] not in same
    )
    return Suggested(sampling, left_out)


def read_ends(folder: Path) -> frozenset[int]:
    """Return the tokens that end a text by `generation_config.json`, or else by `config.json`."""
    for name in (GENERATION, "config.json"):
        found = _read(folder / name).get("eos_token_id")
        if found is None or found == []:
            continue
        several = found if isinstance(found, list) else [found]
        if not all(type(each) is int for each in several):
            raise ShardwiseError(
                f"{folder / name} has eos_token_id={found!r}, which is no token and no list of tokens",
                remedy="the number of the token that ends a text",
            )
        return frozenset(several)
    return frozenset()


def _read(file: Path) -> dict[str, Any]:
    from shardwise.nets.hf.entries import read_table  # Loads torch, which the process of HTTP does without.

    return read_table(file) if file.is_file() else {}
