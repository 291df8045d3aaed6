"""Find and read the model that the user names: a Hugging Face folder, a run, a GGUF file, or a name of the catalogue.

Each is read into a transformer of ours with its weights, and an identity: where its tokenizer is, which tokens end a
text, and a fingerprint that keeps its KV blocks apart from those of other weights.
"""

import json
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from shardwise.errors import ShardwiseError, unknown
from shardwise.model.catalogue import CATALOGUE, find_name
from shardwise.nets.hf import Checkpoint, load_model
from shardwise.nets.hf.catalogue import FAMILIES
from shardwise.nets.hf.entries import CONFIG, Entries, read_table
from shardwise.nets.initialise import initialise
from shardwise.nets.moe import MoE
from shardwise.nets.settings import Settings
from shardwise.nets.transformer import Transformer
from shardwise.serving.assemble import Identity, ends
from shardwise.serving.runner import for_serving
from shardwise.trace.run import MANIFEST
from shardwise.training.checkpoint.index import read_index
from shardwise.training.convert import BESIDE, OURS, THEIRS, find_source
from shardwise.training.sample import load_transformer

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_GENERATION = "generation_config.json"
#: The files of a model: weights, tables, a chat template.
_SUFFIXES = (".safetensors", ".json", ".jinja")
#: Other forms of a tokenizer. A model without any is given bytes, as those are that `shardwise train` trains.
_OTHER_TOKENIZERS = (
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
    "tokenizer_config.json",
)


def find_newest_run(folder: Path = Path("runs")) -> Path:
    """Return the run that was written to last."""
    found = [each for each in folder.glob("*") if (each / MANIFEST).is_file()] if folder.is_dir() else []
    if not found:
        raise ShardwiseError(
            f"no model was named, and there is no run under {folder}", remedy="shardwise train, then shardwise serve"
        )
    return max(found, key=lambda each: (each / MANIFEST).stat().st_mtime)


def read_source(
    source: str, *, random_weights: bool, dtype: torch.dtype | None, device: torch.device
) -> tuple[Transformer, Identity]:
    """Read the model with its weights onto a device, and its identity."""
    path = Path(source)
    identity = identify(source, random_weights=random_weights)  # First: what it refuses needs no weights.
    if random_weights:
        model = _random(source, dtype, device)
    elif path.is_file():
        from shardwise.serving.gguf_file import read_gguf

        model = read_gguf(path, dtype, device)
    else:
        model = _folder(path, dtype, device)
    settings = for_serving(model.settings)
    model.settings = settings
    for each in model.modules():
        if isinstance(each, MoE) and settings.mixture is not None:
            each.mixture = settings.mixture
    return model.eval().requires_grad_(False), identity


def identify(source: str, *, random_weights: bool) -> Identity:
    """Return the identity of a model. Reads no weights."""
    path = Path(source)
    if random_weights:
        return _random_identity(source)
    if path.suffix == ".gguf" and path.is_file():
        from shardwise.serving.gguf_file import identify_gguf

        return identify_gguf(path)
    if path.is_dir():
        folder, kind = find_source(path)
        if kind == THEIRS:
            return _identity_of(path, folder)
        if kind == OURS:
            return _own_identity(path, folder)
        raise ShardwiseError(
            f"{folder} is a checkpoint of torch.distributed, which does not say what model it is of",
            remedy=f"shardwise convert {folder} FOLDER --to {THEIRS}, then FOLDER",
        )
    if find_name(source) is not None:
        raise ShardwiseError(
            f"{source} is a name of the catalogue, which has shapes and no weights",
            remedy=f"{source} --random-weights, or the folder that its weights are in",
        )
    raise ShardwiseError(
        f"{source} is not a folder, a .gguf file or a name of the catalogue",
        remedy="a Hugging Face folder, a run of shardwise train, or a file.gguf",
    )


def describe_source(
    source: str, *, random_weights: bool, dtype: torch.dtype | None
) -> tuple[Settings, torch.dtype, Identity]:
    """Return a model's shape, the dtype of its weights and its identity. Reads weights only if nothing else tells."""
    path = Path(source)
    if random_weights:
        return for_serving(_random_settings(source)), dtype or torch.float32, _random_identity(source)
    if path.is_dir() and find_source(path)[1] == THEIRS:
        with Checkpoint(path) as checkpoint:
            settings, found = checkpoint.settings, checkpoint.find_dtype()
        return for_serving(settings), dtype or found or torch.float32, _identity_of(path, path)
    model, identity = read_source(source, random_weights=False, dtype=dtype, device=torch.device("cpu"))
    return model.settings, model.embed.weight.dtype, identity


def find_shape(
    source: str, *, random_weights: bool, dtype: torch.dtype | None, device: torch.device
) -> tuple[Settings, torch.dtype] | None:
    """Return a model's shape and the dtype of its weights on a device; None if that needs reading weights."""
    path = Path(source)
    if random_weights:
        dtype = dtype or _random_type(device)
    elif not path.is_dir() or find_source(path)[1] != THEIRS:
        return None
    return describe_source(source, random_weights=random_weights, dtype=dtype)[:2]


def _random_settings(source: str) -> Settings:
    config = _config_of(source)
    if config.get("model_type") not in FAMILIES:
        raise ShardwiseError(
            f"{source} is of the family {config.get('model_type')}, for which this engine has no modules",
            remedy=f"a model of {', '.join(FAMILIES)}",
        )
    return FAMILIES[config["model_type"]].read(Entries(config, source))


def _config_of(source: str) -> dict[str, Any]:
    """Return the configuration of a folder, of a `config.json`, or of a name of the catalogue."""
    path = Path(source)
    path = path / CONFIG if path.is_dir() else path
    if path.is_file():
        return read_table(path)
    known = find_name(source)
    if known is None:
        near = unknown("model", source, CATALOGUE).remedy
        raise ShardwiseError(
            f"{source} is not a folder with a {CONFIG}, a {CONFIG} or a name of the catalogue, which has"
            f" {len(CATALOGUE)}",
            remedy=near or f"qwen3-0.6b, or the folder of a {CONFIG}",
        )
    return dict(CATALOGUE[known])


def _random_identity(source: str) -> Identity:
    path = Path(source)
    name = path.resolve().parent.name if path.name == CONFIG else path.resolve().name if path.is_dir() else path.name
    return Identity(name=name, fingerprint="random", tokenizer_source="bytes")


def _random_type(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _random(source: str, dtype: torch.dtype | None, device: torch.device) -> Transformer:
    with torch.device("meta"):
        model = Transformer(_random_settings(source))
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype or _random_type(device))
    initialise(model, 0, device=device, drawn_there=device.type == "cuda")
    return model


def _folder(path: Path, dtype: torch.dtype | None, device: torch.device) -> Transformer:
    folder, kind = find_source(path)
    if kind == THEIRS:
        return load_model(folder, dtype=dtype, device=device)
    model = load_transformer(folder).to(device)
    return model if dtype is None else model.to(dtype)


def _own_identity(path: Path, folder: Path) -> Identity:
    """Return the identity of a checkpoint of ours: a run's, one by its own path, or a converted one."""
    model = read_index(folder).extra.get("model", {})
    if model.get("hf") is not None:
        raise ShardwiseError(
            f"{folder} is of the module {model.get('source')}, which is served from a Hugging Face folder",
            remedy=f"shardwise convert {path} FOLDER --to {THEIRS}, then FOLDER",
        )
    # What it began from, if that was a folder: tokenizer and ends of texts are its own still.
    begun = Path(model.get("folder", folder / BESIDE))
    manifest = next((each for each in (path / MANIFEST, folder.parent.parent / MANIFEST) if each.is_file()), None)
    data = {} if manifest is None else json.loads(manifest.read_text(encoding="utf-8")).get("data", {})
    tokenizer = data.get("tokenizer") or (str(begun) if (begun / "tokenizer.json").is_file() else "bytes")
    return Identity(
        name=path.resolve().name,
        fingerprint=_fingerprint(folder),
        tokenizer_source=str(tokenizer),
        eos_token_ids=_ends_in(begun) if begun.is_dir() and tokenizer != "bytes" else frozenset(),
    )


def _identity_of(path: Path, folder: Path) -> Identity:
    has_tokenizer = (folder / "tokenizer.json").is_file()
    other = next((name for name in _OTHER_TOKENIZERS if (folder / name).is_file()), None)
    if not has_tokenizer and other is not None:
        raise ShardwiseError(
            f"{folder} has a {other}, and no tokenizer.json, which is the form that is read",
            remedy=f"transformers.AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})",
        )
    return Identity(
        name=path.resolve().name,
        fingerprint=_fingerprint(folder),
        tokenizer_source=str(folder) if has_tokenizer else "bytes",
        eos_token_ids=_ends_in(folder),
    )


def _ends_in(folder: Path) -> frozenset[int]:
    """Return the tokens that end a text by `generation_config.json`, or else by `config.json`."""
    for name in (_GENERATION, CONFIG):
        file = folder / name
        if file.is_file():
            found = ends(read_table(file).get("eos_token_id"))
            if found:
                return found
    return frozenset()


def _fingerprint(folder: Path) -> str:
    """Hash a model's files by name, size and time: other weights get another hash, and nothing large is read. Files
    that are no part of it may come and go, as those that a user has it write there.
    """
    files = (each for each in folder.iterdir() if each.suffix in _SUFFIXES)
    told = sorted((each.name, each.stat().st_size, each.stat().st_mtime_ns) for each in files)
    return blake2b(repr(told).encode(), digest_size=8).hexdigest()
