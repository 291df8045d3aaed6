"""Parse a body that `fields.py` allows into what a client asked for: tokens, sampling, and the form of the answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardwise.errors import ShardwiseError
from shardwise.serving.http.api_error import ApiError, refused
from shardwise.serving.http.fields import MOST_CHOICES, without_nulls
from shardwise.serving.request import Request, Sampling
from shardwise.serving.text.chat_template import ChatTemplate
from shardwise.serving.text.grammar import Grammars
from shardwise.serving.text.tokenizer import Text
from shardwise.serving.text.tool_calls import call_schema

#: OpenAI's default of `max_tokens` for completions.
_COMPLETION_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The part of the served model that requests need."""

    name: str
    text: Text
    #: None if chats are not served.
    template: ChatTemplate | None
    grammars: Grammars
    max_length: int
    vocabulary_size: int
    #: Values of fields that a request does not have, as the model's authors suggest them.
    sampling: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request that can be answered. `schema` constrains each answer."""

    prompts: tuple[tuple[int, ...], ...]
    num_choices: int
    sampling: Sampling
    stops: tuple[str, ...] = ()
    is_streamed: bool = False
    has_usage_event: bool = False
    has_usage_in_events: bool = False
    echo: bool = False
    #: Whether an answer goes on with the text of its prompt, as completions do.
    continues: bool = False
    #: Only the prompt is wanted: `max_tokens` is 0.
    is_prompt_alone: bool = False
    return_token_ids: bool = False
    priority: int = 0
    salt: str = ""
    client: str = ""
    schema: Mapping[str, Any] | None = None
    tool_names: tuple[str, ...] = ()
    #: An answer may call at most one function.
    calls_one: bool = False
    #: The answer must be a call and nothing else.
    must_call: bool = False

    def requests(self, name: str, grammars: Grammars) -> list[Request]:
        """Return one request for each choice, with seeds and guides of their own."""
        made = []
        for place, prompt in enumerate(self.prompts):
            for choice in range(self.num_choices):
                seed = self.sampling.seed
                sampling = replace(
                    self.sampling,
                    seed=None if seed is None else (seed + choice) % (1 << 63),
                    guide=None if self.schema is None else _guide(grammars, self.schema, must_call=self.must_call),
                )
                made.append(
                    Request(
                        id=f"{name}-{place * self.num_choices + choice}", prompt=prompt, sampling=sampling,
                        priority=self.priority, salt=self.salt,
                    )
                )  # fmt: skip
        return made


def asked_for_completion(body: Mapping[str, Any], served: Served, *, client: str) -> Asked:
    """Parse a body of `/v1/completions`."""
    fields = without_nulls(dict(body))
    _check_model(fields, served)
    echo, logprobs = bool(fields.get("echo")), fields.get("logprobs")
    logprobs = None if logprobs is None else int(logprobs)
    prompts = _prompts(fields["prompt"], served)
    asked = _asked(fields, served, prompts, _COMPLETION_TOKENS, client=client)
    if fields.get("max_tokens") == 0 and not echo:
        raise ApiError(400, "max_tokens is 0, and with echo left out there is nothing to answer", param="max_tokens")
    if fields.get("best_of", asked.num_choices) != asked.num_choices:
        raise ApiError(
            400, f"best_of is {int(fields['best_of'])} and n is {asked.num_choices}: no answer is chosen from others "
            "here; ask for all with n and logprobs, and take the likeliest", param="best_of",
        )  # fmt: skip
    prompt_logprobs = logprobs if echo else None
    return replace(
        asked, echo=echo, continues=True, is_prompt_alone=fields.get("max_tokens") == 0,
        sampling=replace(asked.sampling, logprobs=logprobs, prompt_logprobs=prompt_logprobs),
    )  # fmt: skip


def asked_for_chat(body: Mapping[str, Any], served: Served, *, client: str) -> Asked:
    """Parse a body of `/v1/chat/completions`."""
    fields = without_nulls(dict(body))
    _check_model(fields, served)
    tools, schema, must_call = _tools(fields)
    form = fields.get("response_format", {"type": "text"})
    if form["type"] != "text":
        if must_call:
            raise ApiError(
                400, "response_format does not go with a tool_choice that requires a call", param="tool_choice"
            )
        schema = form["json_schema"]["schema"] if form["type"] == "json_schema" else {"type": "object"}
    messages = [_message(message, place) for place, message in enumerate(fields["messages"])]
    _check_unicode(messages, "messages")
    _check_unicode(tools, "tools")
    if served.template is None:
        raise ApiError(
            501,
            "chats need jinja2, which is not installed where the model is served; completions do not. "
            "There: pip install 'shardwise[serve]'",
        )
    try:
        prompt = served.template.apply(messages, tools, _variables(fields, served.template))
    except ShardwiseError as error:
        raise refused(error, param="messages") from None
    _check_unicode(prompt, "messages")
    tokens = tuple(served.text.encode(prompt, special=False))
    if "max_completion_tokens" in fields:
        if fields.get("max_tokens", fields["max_completion_tokens"]) != fields["max_completion_tokens"]:
            raise ApiError(400, "max_tokens and max_completion_tokens differ; give one of them", param="max_tokens")
        fields["max_tokens"] = fields["max_completion_tokens"]
    if fields.get("max_tokens") == 0:
        raise ApiError(400, "max_tokens is 0; it must be at least 1", param="max_tokens", code="invalid_value")
    if "top_logprobs" in fields and not fields.get("logprobs"):
        raise ApiError(400, "top_logprobs is given without logprobs: true", param="top_logprobs")
    asked = _asked(fields, served, (tokens,), served.max_length, client=client)
    logprobs = int(fields.get("top_logprobs", 0)) if fields.get("logprobs") else None
    return replace(
        asked, sampling=replace(asked.sampling, logprobs=logprobs), schema=schema, must_call=must_call,
        tool_names=tuple(tool["function"]["name"] for tool in tools),
        calls_one=not fields.get("parallel_tool_calls", True),
    )  # fmt: skip


def _asked(
    fields: Mapping[str, Any], served: Served, prompts: tuple[tuple[int, ...], ...], written: int, *, client: str
) -> Asked:
    """Parse what both endpoints share. `written` is the default number of tokens."""
    num_choices = int(fields.get("n", 1))
    if num_choices * len(prompts) > MOST_CHOICES:
        raise ApiError(
            400, f"{len(prompts)} prompts with n={num_choices} are {len(prompts) * num_choices} answers; "
            f"at most {MOST_CHOICES}", param="n",
        )  # fmt: skip
    longest = max(map(len, prompts))
    max_tokens = _max_tokens(fields.get("max_tokens"), longest, served.max_length, written)
    stop = fields.get("stop", ())
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    _check_unicode(list(stops), "stop")
    _check_unicode(fields.get("cache_salt", ""), "cache_salt")
    if "stream_options" in fields and not fields.get("stream"):
        raise ApiError(400, "stream_options is given without stream: true", param="stream_options")
    if int(fields.get("min_tokens", 0)) > max_tokens:
        raise ApiError(
            400,
            f"min_tokens is {fields['min_tokens']}, more than the {max_tokens} tokens of max_tokens",
            param="min_tokens",
        )
    return Asked(
        prompts=prompts,
        num_choices=num_choices,
        sampling=_sampling(fields, served, max_tokens),
        stops=stops,
        is_streamed=bool(fields.get("stream")),
        has_usage_event=bool(fields.get("stream_options", {}).get("include_usage")),
        has_usage_in_events=bool(fields.get("stream_options", {}).get("continuous_usage_stats")),
        return_token_ids=bool(fields.get("return_token_ids")),
        priority=int(fields.get("priority", 0)),
        salt=str(fields.get("cache_salt", "")),
        client=str(fields.get("user", fields.get("safety_identifier", client))),
    )


def _max_tokens(said: float | None, prompt: int, longest: int, otherwise: int) -> int:
    """Return how many tokens may be generated. Refuses a prompt and answer above the model's length, which is named."""
    if prompt >= longest or (said is not None and prompt + said > longest):
        more = "" if said is None else f" and max_tokens is {int(said):,}"
        raise ApiError(
            400, f"the prompt has {prompt:,} tokens{more}; prompt and answer together have at most {longest:,}",
            param="prompt" if said is None or prompt >= longest else "max_tokens", code="context_length_exceeded",
        )  # fmt: skip
    # For 0 tokens, one is computed and not shown: the prompt's own log-probabilities come with it.
    return max(1, int(said)) if said is not None else min(otherwise, longest - prompt)


def _sampling(said: Mapping[str, Any], served: Served, max_tokens: int) -> Sampling:
    fields, bias = {**served.sampling, **said}, {}
    for token, value in fields.get("logit_bias", {}).items():
        if not token.isascii() or not token.isdecimal() or int(token[:20]) >= served.vocabulary_size:
            raise ApiError(
                400, f"logit_bias has {token[:40]!r}; its keys are tokens from 0 to {served.vocabulary_size - 1}",
                param="logit_bias",
            )  # fmt: skip
        bias[int(token)] = float(value)
    stop_tokens = [int(token) for token in fields.get("stop_token_ids", ())]
    _check_tokens(stop_tokens, served, "stop_token_ids")
    return Sampling(
        max_tokens=max_tokens,
        temperature=_temperature(float(fields.get("temperature", 1.0))),
        top_k=max(0, int(fields.get("top_k", 0))),
        top_p=float(fields.get("top_p", 1.0)),
        min_p=float(fields.get("min_p", 0.0)),
        presence_penalty=float(fields.get("presence_penalty", 0.0)),
        frequency_penalty=float(fields.get("frequency_penalty", 0.0)),
        repetition_penalty=float(fields.get("repetition_penalty", 1.0)),
        logit_bias=bias,
        # Map a negative seed to a nonnegative one, as the engine requires.
        seed=None if "seed" not in fields else int(fields["seed"]) % (1 << 63),
        min_tokens=int(fields.get("min_tokens", 0)),
        stop_token_ids=frozenset(stop_tokens),
        ignore_eos=bool(fields.get("ignore_eos", False)),
    )


def _temperature(said: float) -> float:
    """Return 0 for what is so near to it that logits divided by it are not finite in fp32."""
    return said if said >= 1e-30 else 0.0


def _prompts(prompt: Any, served: Served) -> tuple[tuple[int, ...], ...]:
    several = prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)) else [prompt]
    found = []
    for each in several:
        if isinstance(each, str):
            _check_unicode(each, "prompt")
            tokens = served.text.encode(each)
        else:
            tokens = [int(token) for token in each]
            _check_tokens(tokens, served, "prompt")
        if not tokens:
            raise ApiError(
                400, "prompt is empty: it must have at least one token", param="prompt", code="invalid_value"
            )
        found.append(tuple(tokens))
    return tuple(found)


def _tools(fields: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any] | None, bool]:
    """Return the functions that may be called, the schema of an answer if one must be, and whether one must."""
    tools, choice = list(fields.get("tools", ())), fields.get("tool_choice", "auto")
    if "tool_choice" in fields and not tools and choice != "none":
        raise ApiError(400, "tool_choice is given without tools", param="tool_choice")
    if choice == "none":
        return [], None, False
    if isinstance(choice, dict):
        name = choice["function"]["name"]
        tools = [tool for tool in tools if tool["function"]["name"] == name]
        if not tools:
            raise ApiError(
                400, f"tool_choice names the function {name[:64]!r}, which tools does not have", param="tool_choice"
            )
    must_call = choice == "required" or isinstance(choice, dict)
    return tools, call_schema(tools) if must_call else None, must_call


def _variables(fields: Mapping[str, Any], template: ChatTemplate) -> Mapping[str, Any]:
    """Return the variables of the chat template that are given beside what it always gets."""
    variables: Mapping[str, Any] = fields.get("chat_template_kwargs", {})
    _check_unicode(variables, "chat_template_kwargs")
    if taken := sorted(template.reserved & set(variables)):
        raise ApiError(
            400, f"chat_template_kwargs has {taken[0]!r}, which the template gets from elsewhere",
            param="chat_template_kwargs",
        )  # fmt: skip
    return variables


def _message(message: Mapping[str, Any], place: int) -> dict[str, Any]:
    kept = without_nulls(dict(message))
    if "content" not in kept and not kept.get("tool_calls"):
        at = f"messages[{place}].content"
        raise ApiError(400, f"the field {at!r} is missing", param=at, code="missing_field")
    if kept["role"] == "developer":
        kept["role"] = "system"  # "developer" is OpenAI's newer name for it. Templates know the older.
    return kept


def _check_model(fields: Mapping[str, Any], served: Served) -> None:
    model = fields.get("model", served.name)
    if model != served.name:
        raise ApiError(
            404, f"there is no model {model[:80]!r} here; known: {served.name}", param="model", code="model_not_found"
        )


def _check_tokens(tokens: Sequence[int], served: Served, param: str) -> None:
    beyond = next((token for token in tokens if token >= served.vocabulary_size), None)
    if beyond is not None:
        raise ApiError(
            400, f"{param} has the token {beyond}; the vocabulary has {served.vocabulary_size}", param=param,
            code="invalid_value",
        )  # fmt: skip


def _check_unicode(value: Any, param: str) -> None:
    """Refuse lone surrogates: they are valid in JSON and Python strings, but not in text."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ApiError(
                400, f"{param} has half a surrogate pair (\\u{ord(value[error.start]):x}), which is not a character",
                param=param, code="invalid_value",
            ) from None  # fmt: skip
    elif isinstance(value, Mapping):
        for key, each in value.items():
            _check_unicode(key, param)
            _check_unicode(each, param)
    elif isinstance(value, (list, tuple)):
        for each in value:
            _check_unicode(each, param)


def _guide(grammars: Grammars, schema: Mapping[str, Any], *, must_call: bool) -> Any:
    try:
        return grammars.guide(schema)
    except ShardwiseError as error:
        raise refused(error, param="tools" if must_call else "response_format", code="invalid_schema") from None
