"""Which model it is that the user names: its identity, from all of its files but the weights."""

import json
from hashlib import blake2b
from pathlib import Path

from shardwise.errors import ShardwiseError
from shardwise.model.catalogue import find_name
from shardwise.nets.hf.entries import CONFIG
from shardwise.serving.assemble import Identity
from shardwise.serving.generation_config import NONE, read_ends, read_suggested
from shardwise.trace.run import MANIFEST
from shardwise.training.checkpoint.index import read_index
from shardwise.training.kinds import BESIDE, OURS, THEIRS, find_source

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
            return _folders_identity(path, folder)
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


def _random_identity(source: str) -> Identity:
    path = Path(source)
    name = path.resolve().parent.name if path.name == CONFIG else path.resolve().name if path.is_dir() else path.name
    return Identity(name=name, fingerprint="random", tokenizer_source="bytes")


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
    is_its_own = begun.is_dir() and tokenizer != "bytes"
    return Identity(
        name=path.resolve().name,
        fingerprint=_fingerprint(folder),
        tokenizer_source=str(tokenizer),
        eos_token_ids=read_ends(begun) if is_its_own else frozenset(),
        suggested=read_suggested(begun) if is_its_own else NONE,
    )


def _folders_identity(path: Path, folder: Path) -> Identity:
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
        eos_token_ids=read_ends(folder),
        suggested=read_suggested(folder),
    )


def _fingerprint(folder: Path) -> str:
    """Hash a model's files by name, size and time: other weights get another hash, and nothing large is read. Files
    that are no part of it may come and go, as those that a user has it write there.
    """
    files = (each for each in folder.iterdir() if each.suffix in _SUFFIXES)
    told = sorted((each.name, each.stat().st_size, each.stat().st_mtime_ns) for each in files)
    return blake2b(repr(told).encode(), digest_size=8).hexdigest()
