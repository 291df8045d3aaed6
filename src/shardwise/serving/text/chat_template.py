"""Render messages into a model's prompt format with its Jinja template, in a sandbox, because the file is untrusted.

A model without a template gets a plain one: `role: content`, a line each.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

from shardwise.errors import ShardwiseError
from shardwise.serving.text.tokenizer import Text

PLAIN = """{% for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""
#: Instructions for templates without support for tools.
_TOOLS = (
    "You may call functions. To call one, answer with nothing but\n"
    '<tool_call>{"name": "...", "arguments": {...}}</tool_call>\nThe functions:\n'
)


class ChatTemplate:
    """A model's template, compiled once."""

    def __init__(self, text: Text) -> None:
        try:
            from jinja2 import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            raise ShardwiseError(
                "chat templates need jinja2, which is not installed", remedy="pip install 'shardwise[serve]'"
            ) from None
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation_tag()]
        )
        environment.filters["tojson"] = _tojson
        environment.globals.update(raise_exception=_refuse, strftime_now=lambda form: datetime.now().strftime(form))
        source = text.template or PLAIN
        with_tools = text.tools_template or source
        try:
            self._template = environment.from_string(source)
            self._with_tools = self._template if with_tools is source else environment.from_string(with_tools)
        except TemplateError as error:
            raise ShardwiseError(
                f"the chat template of {text.name} cannot be read: {error}", remedy="a chat_template.jinja beside it"
            ) from None
        self._named, self._knows_tools = text.named, "tools" in with_tools
        #: What is given to the template from elsewhere.
        self.reserved = frozenset({"messages", "tools", "add_generation_prompt", *text.named})

    def apply(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:  # fmt: skip
        """Render the prompt. If the template refuses its input, this raises with the template's words.

        `variables` are what else the template knows, such as `enable_thinking`; none of them may be `reserved`.
        """
        given: list[Mapping[str, Any]] = [_plain_message(message) for message in messages]
        if tools and not self._knows_tools:
            listed = "\n".join(json.dumps(tool["function"]) for tool in tools)
            given = [{"role": "system", "content": _TOOLS + listed}, *given]
        template = self._with_tools if tools else self._template
        known = {"messages": given, "tools": list(tools) or None, "add_generation_prompt": True, **self._named}
        try:
            return template.render({"documents": None, **(variables or {}), **known})
        except Exception as error:  # A template is a program of its own, and may raise anything.
            raise ShardwiseError(f"the model's chat template refuses these messages: {error}") from None


def _generation_tag() -> Any:
    """Return an extension for `{% generation %}`, which marks answers for training and changes no prompt."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 - as the base class has it

        def parse(self, parser: Any) -> nodes.Scope:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    return Generation


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Join content parts into one text; parse call arguments into values, which templates format themselves."""
    plain = dict(message)
    content = plain.get("content")
    if isinstance(content, list):
        plain["content"] = "".join(part["text"] for part in content)
    elif content is None:
        plain["content"] = ""
    calls = []
    for call in plain.get("tool_calls") or ():
        function = dict(call["function"])
        with suppress(ValueError, RecursionError):  # Not JSON, or too deep: keep it as the model wrote it.
            function["arguments"] = json.loads(function["arguments"])
        calls.append({**call, "function": function})
    if calls:
        plain["tool_calls"] = calls
    return plain


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Serialise as transformers does: non-ASCII characters unchanged, and no HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _refuse(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)
