"""Conversion of a Hugging Face module, made by a user's function, to a folder that `from_pretrained` reads.

Its weights have Hugging Face's names already. Its configuration and the folder that it came from are recorded when the
run begins. So the conversion runs no code of the user.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.nets.hf.entries import CONFIG
from shardwise.nets.hf.save import write_shards
from shardwise.output import write_whole
from shardwise.training.checkpoint.read import Reader

_GENERATION = "generation_config.json"


def describe_hf(module: nn.Module) -> dict[str, Any] | None:
    """Return the configuration of a `transformers` module, as a folder has it; None for other modules."""
    kinds = [each for each in type(module).__mro__ if each.__name__ == "PreTrainedModel"]
    if not any(each.__module__.startswith("transformers.") for each in kinds):
        return None
    config: Any = module.config
    entries = {**json.loads(config.to_json_string()), "architectures": [type(module).__name__]}
    generation: Any = getattr(module, "generation_config", None)
    return {
        "config": entries,
        "generation": None if generation is None else json.loads(generation.to_json_string()),
        # A name on the hub has no local files. A folder may have a tokenizer.
        "folder": str(Path(config.name_or_path).resolve()) if Path(config.name_or_path or "/no").is_dir() else None,
    }


def own_to_theirs(
    reader: Reader, description: Mapping[str, Any], target: Path, dtype: torch.dtype | None, file_bytes: int
) -> None:
    """Write the folder: weights under their own names, configuration, and the tokenizer of the original folder."""
    from shardwise.training.convert_dcp import (
        copy_beside,  # Loads torch.distributed.checkpoint, which training needs not.
    )

    told = description["hf"]
    stored = {name: getattr(torch, each.dtype) for name, each in reader.weights.items()}
    sizes = {
        name: torch.Size(each.shape).numel() * (dtype or stored[name]).itemsize for name, each in reader.weights.items()
    }

    def read(name: str) -> torch.Tensor:
        whole = reader.whole(name)
        return whole.to(dtype) if dtype is not None and whole.is_floating_point() else whole

    target.mkdir(parents=True, exist_ok=True)
    write_shards(target, sizes, read, file_bytes)
    if told["folder"] is not None and Path(told["folder"]).is_dir():
        copy_beside(Path(told["folder"]), target)
    kinds = {kind for kind in stored.values() if kind.is_floating_point}
    written = dtype or (kinds.pop() if len(kinds) == 1 else torch.float32)
    config = {key: each for key, each in told["config"].items() if key != "torch_dtype"}
    config["dtype"] = str(written).removeprefix("torch.")
    write_whole(target / CONFIG, json.dumps(config, indent=2, sort_keys=True) + "\n")
    if told["generation"] is not None:
        write_whole(target / _GENERATION, json.dumps(told["generation"], indent=2, sort_keys=True) + "\n")
