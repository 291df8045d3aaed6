"""OpenAI's own client, which nobody here wrote, talks to the server."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest

from tests.serving.http.repeating import RepeatingEngine
from tests.serving.http.serving_here import NAME, Running, running


@pytest.fixture(scope="module")
def client(here: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{here.url}/v1", api_key="none", http_client=httpx2.Client(trust_env=False)) as made:
        yield made


def ask(client: openai.OpenAI, text: str, **more: Any) -> Any:
    return client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": text}], **more)


def test_the_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def test_a_chat_is_answered_with_its_usage(client: openai.OpenAI) -> None:
    answer = ask(client, "say: Grüße, 世界 🌍")
    assert answer.choices[0].message.content == "Grüße, 世界 🌍"
    assert answer.choices[0].finish_reason == "stop"
    said = len("Grüße, 世界 🌍".encode()) + 1
    assert answer.usage.completion_tokens == said
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + said


def test_a_stream_has_whole_characters_and_its_usage_last(client: openai.OpenAI) -> None:
    stream = ask(client, "say: 世界 🌍!", stream=True, stream_options={"include_usage": True})
    *parts, last = list(stream)
    texts = [part.choices[0].delta.content or "" for part in parts]
    assert "".join(texts) == "世界 🌍!"
    assert not any("\ufffd" in text for text in texts)
    assert parts[0].choices[0].delta.role == "assistant"
    assert parts[-1].choices[0].finish_reason == "stop"
    assert last.choices == []
    assert all("usage" in part.model_fields_set and part.usage is None for part in parts)
    assert last.usage.completion_tokens == len("世界 🌍!".encode()) + 1


def test_the_usage_is_in_every_event_where_that_is_asked_for(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    events = list(client.completions.create(model="repeating", prompt="say: abc", stream=True, stream_options=options))
    assert all(event.usage is not None for event in events)
    counts = [event.usage.completion_tokens for event in events if event.usage is not None]
    assert counts == sorted(counts)
    assert counts[-1] == 4  # Three letters and the end.


def test_a_stop_string_is_never_shown_not_even_in_part(client: openai.OpenAI) -> None:
    whole = ask(client, "say: one two END three", stop=["END", "four"])
    assert whole.choices[0].message.content == "one two "
    assert whole.choices[0].finish_reason == "stop"
    stream = ask(client, "say: one two END three", stop="END", stream=True)
    texts = [part.choices[0].delta.content or "" for part in stream]
    assert "".join(texts) == "one two "
    assert not any("E" in text for text in texts)
    # What only begins like one is shown after all.
    assert ask(client, "say: one EN", stop="END").choices[0].message.content == "one EN"


def test_a_stop_string_within_the_least_tokens_is_text(client: openai.OpenAI) -> None:
    """As the end of a text is not written there either. As in vLLM, one that ends with them is text too."""
    for least, right in ((0, "one "), (6, "one "), (7, "one END two "), (15, "one END two END three")):
        for is_streamed in (False, True):
            found = ask(
                client, "say: one END two END three", stop="END", stream=is_streamed, extra_body={"min_tokens": least}
            )
            parts = [each.choices[0].delta.content or "" for each in found] if is_streamed else []
            assert ("".join(parts) if is_streamed else found.choices[0].message.content) == right


def test_several_answers_have_their_places(client: openai.OpenAI) -> None:
    answer = ask(client, "letters", n=3, seed=5, max_tokens=8)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) == 3
    texts = ["", "", ""]
    for part in ask(client, "letters", n=3, seed=5, max_tokens=8, stream=True):
        texts[part.choices[0].index] += part.choices[0].delta.content or ""
    assert texts == [choice.message.content for choice in answer.choices]
    assert answer.usage.completion_tokens == 24


def test_a_seed_gives_the_same_text_again(client: openai.OpenAI) -> None:
    first, again, other = (ask(client, "x", seed=seed, max_tokens=12).choices[0].message.content for seed in (7, 7, 8))
    assert first == again != other


def test_log_probabilities_are_of_every_token_shown(client: openai.OpenAI) -> None:
    answer = ask(client, "say: aé", logprobs=True, top_logprobs=2, max_tokens=3)
    content = answer.choices[0].logprobs.content
    assert [entry.token for entry in content] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert bytes(byte for entry in content for byte in entry.bytes).decode() == "aé"
    assert [entry.logprob for entry in content] == [-0.5] * 3
    assert [len(entry.top_logprobs) for entry in content] == [2] * 3
    assert answer.choices[0].finish_reason == "length"


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "the weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    }
]


def test_a_tool_is_called_from_what_the_model_writes(client: openai.OpenAI) -> None:
    said = 'say: I look. <tool_call>{"name": "weather", "arguments": {"city": "Paris", "days": 2}}</tool_call>'
    answer = ask(client, said, tools=TOOLS).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content.strip() == "I look."
    (call,) = answer.message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": "Paris", "days": 2}
    parts = list(ask(client, said, tools=TOOLS, stream=True))
    streamed = [call for part in parts for call in part.choices[0].delta.tool_calls or ()]
    assert [(each.index, each.function.name) for each in streamed] == [(0, "weather")]
    assert "<tool" not in "".join(part.choices[0].delta.content or "" for part in parts)
    twice = said + said.removeprefix("say: ")
    counts = [len(ask(client, twice, tools=TOOLS, parallel_tool_calls=several).choices[0].message.tool_calls)
              for several in (True, False)]  # fmt: skip
    assert counts == [2, 1]


def test_a_tool_that_must_be_called_is_called_by_its_schema(client: openai.OpenAI) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        answer = ask(client, "letters", tools=TOOLS, tool_choice=choice, temperature=0).choices[0]
        (call,) = answer.message.tool_calls
        arguments = json.loads(call.function.arguments)
        assert set(arguments) == {"city", "days"}
        assert isinstance(arguments["days"], int)


def test_an_answer_follows_a_json_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "kind": {"enum": ["cat", "dog"]}},
        "required": ["name", "age", "kind"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "pet", "schema": schema, "strict": True}}
    answer = ask(client, "letters", response_format=form, temperature=0).choices[0]
    value = json.loads(answer.message.content)
    assert set(value) == {"name", "age", "kind"}
    assert value["kind"] in ("cat", "dog")
    assert answer.finish_reason == "stop"
    anything = ask(client, "letters", response_format={"type": "json_object"}, temperature=0).choices[0]
    assert isinstance(json.loads(anything.message.content), dict)


def test_completions_take_texts_and_tokens_alone_and_several(client: openai.OpenAI) -> None:
    one = client.completions.create(model=NAME, prompt="say: abc", max_tokens=2)
    assert one.choices[0].text == "ab"
    tokens = list(b"say: abc")
    extra = {"return_token_ids": True}
    same = client.completions.create(model=NAME, prompt=tokens, max_tokens=2, extra_body=extra)
    assert same.choices[0].text == "ab"
    assert same.choices[0].model_extra is not None
    assert same.choices[0].model_extra["token_ids"] == list(b"ab")
    assert same.choices[0].model_extra["prompt_token_ids"] == tokens
    several = client.completions.create(model=NAME, prompt=["say: one", "say: two"], n=2, max_tokens=9)
    assert [choice.text for choice in several.choices] == ["one", "one", "two", "two"]
    lists = client.completions.create(model=NAME, prompt=[list(b"say: one"), list(b"say: two")], max_tokens=9)
    assert [choice.text for choice in lists.choices] == ["one", "two"]


def test_an_echo_has_the_prompts_log_probabilities_too(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=NAME, prompt="say: ab", echo=True, logprobs=1, max_tokens=0).choices[0]
    assert answer.text == "say: ab"
    assert answer.logprobs is not None
    assert answer.logprobs.tokens == list("say: ab")
    assert answer.logprobs.token_logprobs == [None, *[-0.5] * 6]
    assert answer.logprobs.text_offset == list(range(7))
    more = client.completions.create(model=NAME, prompt="say: ab", echo=True, logprobs=1, max_tokens=2).choices[0]
    assert more.text == "say: abab"
    assert more.logprobs is not None
    assert more.logprobs.text_offset == list(range(9))
    wide = client.completions.create(model=NAME, prompt="é😀: a", echo=True, logprobs=1, max_tokens=1).choices[0]
    assert wide.logprobs is not None
    assert wide.logprobs.text_offset == [0, 0, 1, 1, 1, 1, 2, 3, 4, 5], "tokens of one character begin where it does"


def test_the_async_client_has_many_answers_at_once(here: Running) -> None:
    async def all_at_once() -> list[str]:
        http = httpx2.AsyncClient(trust_env=False)
        async with openai.AsyncOpenAI(base_url=f"{here.url}/v1", api_key="none", http_client=http) as client:

            async def one(number: int) -> str:
                text = f"say: number {number}"
                stream = await client.chat.completions.create(
                    model=NAME, messages=[{"role": "user", "content": text}], stream=True
                )
                return "".join([part.choices[0].delta.content or "" async for part in stream])

            return await asyncio.gather(*map(one, range(24)))

    assert asyncio.run(all_at_once()) == [f"number {number}" for number in range(24)]


def test_mistakes_are_openais_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature is 3; it must be at most 2") as wrong:
        ask(client, "x", temperature=3)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="unknown or unsupported field 'top_q'; did you mean 'top_p'"):
        ask(client, "x", extra_body={"top_q": 1})
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-4' here; known: repeating"):
        client.chat.completions.create(model="gpt-4", messages=[{"role": "user", "content": "x"}])


def test_a_key_is_wanted_where_one_is_set() -> None:
    with running(RepeatingEngine(), key="sesame") as locked:
        url = f"{locked.url}/v1"
        with (
            openai.OpenAI(base_url=url, api_key="wrong", http_client=httpx2.Client(trust_env=False)) as wrong,
            pytest.raises(openai.AuthenticationError, match="missing or wrong"),
        ):
            wrong.models.list()
        with openai.OpenAI(base_url=url, api_key="sesame", http_client=httpx2.Client(trust_env=False)) as right:
            assert [model.id for model in right.models.list()] == [NAME]
        with locked.client() as plain:
            assert plain.get("/health").status_code == 200
            assert plain.get("/metrics").status_code == 401
            assert plain.get("/v1/models", headers={b"Authorization": b"Bearer s\xe9same"}).status_code == 401
    with running(RepeatingEngine(), key="s\xe9same") as locked, locked.client() as plain:
        right_key = {b"Authorization": "Bearer s\xe9same".encode()}
        assert plain.get("/v1/models", headers=right_key).status_code == 200


def test_fields_that_change_nothing_are_taken(client: openai.OpenAI) -> None:
    """As frameworks and load generators send them: the answer is the same with and without."""
    plain = ask(client, "say: x", temperature=0).choices[0].message.content
    harmless: Any = {
        "metadata": {"team": "a"}, "store": False, "service_tier": "auto", "prompt_cache_key": "k",
        "safety_identifier": "s", "modalities": ["text"], "prediction": {"type": "content", "content": "x"},
        "extra_body": {
            "use_beam_search": False, "length_penalty": 1.0, "skip_special_tokens": True, "min_tokens": None,
            "spaces_between_special_tokens": True, "include_stop_str_in_output": False, "add_generation_prompt": True,
            "continue_final_message": False, "echo": False, "guided_json": None,
        },
    }  # fmt: skip
    assert ask(client, "say: x", temperature=0, **harmless).choices[0].message.content == plain == "x"
    # What guidellm sends.
    body: Any = {"ignore_eos": True, "stop": None}
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    events = list(
        ask(client, "say: x", max_completion_tokens=4, stream=True, stream_options=options, stop=None,
            extra_body={**body, "max_tokens": 4})
    )  # fmt: skip
    assert events[-1].usage.completion_tokens == 4
    whole = client.completions.create(model=NAME, prompt="say: x", max_tokens=4, best_of=1, suffix="", extra_body=body)
    assert whole.choices[0].text == "x..."


def test_an_answer_is_sent_back_as_the_client_keeps_it(client: openai.OpenAI) -> None:
    said = 'say: <tool_call>{"name": "weather", "arguments": {"city": "Paris", "days": 2}}</tool_call>'
    first = ask(client, said, tools=TOOLS).choices[0].message
    kept: Any = first.model_dump()  # With a null for whatever it did not have.
    assert kept["function_call"] is kept["audio"] is kept["annotations"] is None
    result: Any = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "sun"}
    again = client.chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": said}, kept, result, {"role": "user", "content": "say: y"}]
    )
    assert again.choices[0].message.content == "y"


def test_a_tool_whose_parameters_refer_to_parts_of_themselves_is_called(client: openai.OpenAI) -> None:
    """As pydantic writes them. Alone, and beside another with parts of the same names."""

    def tool(name: str, word: str) -> Any:
        parts = {"Place": {"type": "object", "properties": {"city": {"const": word}}, "required": ["city"]}}
        place = {"type": "object", "properties": {"at": {"$ref": "#/$defs/Place"}}, "required": ["at"], "$defs": parts}
        return {"type": "function", "function": {"name": name, "parameters": {**place, "additionalProperties": False}}}

    near, far = tool("near", "Bern"), tool("far", "Lima")
    for tools, name, word in (([near], "near", "Bern"), ([near, far], "far", "Lima")):
        choice: Any = {"type": "function", "function": {"name": name}} if len(tools) > 1 else "required"
        message = ask(client, "call", tools=tools, tool_choice=choice, max_tokens=200).choices[0].message
        call = message.tool_calls[0].function
        assert (call.name, json.loads(call.arguments)["at"]["city"]) == (name, word)
    message = ask(client, "call", tools=[near, far], tool_choice="required", max_tokens=200).choices[0].message
    call = message.tool_calls[0].function
    assert (call.name, json.loads(call.arguments)["at"]["city"]) in (("near", "Bern"), ("far", "Lima"))


def test_a_temperature_that_nothing_can_be_divided_by_is_none(client: openai.OpenAI) -> None:
    cold = ask(client, "letters", temperature=1e-45, max_tokens=8).choices[0].message.content
    assert cold == ask(client, "letters", temperature=0, max_tokens=8).choices[0].message.content
