"""The files beside a `tokenizer.json`: chat templates, the names of tokens, and tokens that it lacks."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.errors import ShardwiseError

_CONFIG, _NAMES, _ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
_MODEL = "config.json"
_TEMPLATE, _MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"
#: The names of templates, as transformers has them.
_DEFAULT, _WITH_TOOLS = "default", "tool_use"
#: Options of `tokenizers.AddedToken`.
_OPTIONS = ("special", "normalized", "lstrip", "rstrip", "single_word")
_AS_PUBLISHED = "the file as it was published"


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """What the files say."""

    template: str | None = None
    #: For chats with tools, if there is one of its own.
    tools_template: str | None = None
    #: Tokens by the names that templates use: `bos_token`, `eos_token`.
    named: dict[str, str] = field(default_factory=dict)
    #: Tokens added after the training of the tokenizer, by number: what each is, with options of `AddedToken`.
    added: dict[int, dict[str, Any]] = field(default_factory=dict)
    #: All of `tokenizer_config.json`, with the class of tokenizer if `config.json` alone has it; and the model's type.
    config: dict[str, Any] = field(default_factory=dict)
    model_type: object = None

    def add_missing(self, loaded: Any, file: Path) -> None:
        """Add to the tokenizer of a file what it lacks. It numbers tokens on from its last."""
        from tokenizers import AddedToken

        known = {each.content for each in loaded.get_added_tokens_decoder().values()}
        for token, options in sorted(self.added.items()):
            content = options["content"]
            if content in known:
                continue
            loaded.add_tokens([AddedToken(**options)])
            if loaded.token_to_id(content) != token:
                raise ShardwiseError(
                    f"{content!r} is missing in {file}, and by the files beside it it is the token {token}",
                    remedy="the tokenizer's files as they were published, all of them",
                )


def read_beside(folder: Path) -> Beside:
    """Read the files of a folder, any of which may be missing."""
    config, names = _table(folder / _CONFIG), _table(folder / _NAMES)
    named = {}
    for key in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = config.get(key, names.get(key))
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            named[key] = value
    templates = _templates(folder, config)
    model = _table(folder / _MODEL)
    return Beside(
        template=templates.get(_DEFAULT) or next(iter(templates.values()), None),
        tools_template=templates.get(_WITH_TOOLS),
        named=named,
        added=_added(folder, config),
        config={"tokenizer_class": model.get("tokenizer_class")} | config,
        model_type=model.get("model_type"),
    )


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return the templates by name. Files count more than what `tokenizer_config.json` has."""
    said = config.get("chat_template")
    if isinstance(said, list):
        found: dict[Any, Any] = {each.get("name"): each.get("template") for each in said if isinstance(each, dict)}
    else:
        found = {} if said is None else {_DEFAULT: said}
    if not all(isinstance(each, str) for each in (*found, *found.values())):
        raise ShardwiseError(f"{folder / _CONFIG} has a chat template that is no text", remedy=_AS_PUBLISHED)
    files = {each.stem: each for each in sorted((folder / _MORE_TEMPLATES).glob("*.jinja"))}
    for name, file in {**files, _DEFAULT: folder / _TEMPLATE}.items():
        if file.is_file():
            try:
                found[name] = file.read_text(encoding="utf-8")
            except ValueError as error:
                raise ShardwiseError(f"{file} is not text in UTF-8: {error}", remedy=_AS_PUBLISHED) from None
    return found


def _added(folder: Path, config: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Return tokens by number, from either of the two files that may have them."""
    plain = {"special": False, "normalized": False}
    found: dict[int, dict[str, Any]] = {
        token: {"content": content, **plain}
        for content, token in _table(folder / _ADDED).items()
        if isinstance(token, int)
    }
    decoder = config.get("added_tokens_decoder")
    for token, each in (decoder if isinstance(decoder, dict) else {}).items():
        if token.isdecimal() and isinstance(each, dict) and isinstance(each.get("content"), str):
            options = {key: value for key, value in each.items() if key in _OPTIONS and isinstance(value, bool)}
            found[int(token)] = {"content": each["content"], **plain, **options}
    return found


def _table(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ShardwiseError(f"{file} is not valid JSON: {error}", remedy=_AS_PUBLISHED) from None
    if not isinstance(found, dict):
        raise ShardwiseError(f"{file} is not a table of entries", remedy=_AS_PUBLISHED)
    return found
