"""Tokens to text and back: whole characters, stop strings, tables of GGUF, templates, calls, schemas."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardwise.errors import ShardwiseError
from shardwise.serving.http.asked import Served, asked_for_chat, asked_for_completion
from shardwise.serving.http.written import Written
from shardwise.serving.request import Token
from shardwise.serving.text.chat_template import ChatTemplate
from shardwise.serving.text.grammar import Grammars
from shardwise.serving.text.text_stream import StopStrings, TextStream
from shardwise.serving.text.tokenizer import ByteText, LibraryText, Text, load_tokenizer
from shardwise.serving.text.tool_calls import ToolCall, ToolCallStream, call_schema, find_calls

TEXT = "Grüße, 世界! 🌍🌎 def f(x):\n    return 12345  # ok\n"


def byte_level() -> Any:
    """A small byte-level tokenizer, as GPT-2's and those after it are."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False
    )
    made.train_from_iterator([TEXT] * 20, trainer)
    return made


@given(st.text())
def test_streamed_text_is_the_text_and_no_part_of_it_is_half_a_character(text: str) -> None:
    for tokenizer in (ByteText(), LARGE):
        stream = TextStream(tokenizer)
        parts = [stream.add(token) for token in tokenizer.encode(text)]
        assert "".join(parts) + stream.end() == text
        assert "\ufffd" in text or not any("\ufffd" in part for part in parts)


LARGE = LibraryText(byte_level(), name="large")


def sentencepiece() -> Any:
    """A small tokenizer whose decoder drops the space that a text begins with, as Llama 2's and Mistral's do."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    mark = "\N{LOWER ONE EIGHTH BLOCK}"
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), mark, *"abis", f"{mark}a", f"{mark}i", f"{mark}is"]
    merges = [(mark, "a"), (mark, "i"), (f"{mark}i", "s")]
    vocab = {word: place for place, word in enumerate(words)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend(mark), normalizers.Replace(" ", mark)])
    made.decoder = decoders.Sequence(
        [decoders.Replace(mark, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


@given(st.text(alphabet="a is é🌍", max_size=12), st.text(alphabet="ab é🌍", max_size=12), st.integers(0, 19))
@example(" ééé", "", 8)  # The last five tokens begin within a character.
def test_a_text_that_is_continued_keeps_the_space_that_follows(begin: str, rest: str, cut: int) -> None:
    tokenizer = LibraryText(sentencepiece(), name="pieces")
    tokens = tokenizer.encode(f"{begin} {rest}")
    before, after = tokens[:cut], tokens[cut:]
    if tokenizer.decode(before).endswith("\ufffd"):
        return  # Cut within a character.
    stream = TextStream(tokenizer, before)
    said = "".join(stream.add(token) for token in after) + stream.end()
    assert tokenizer.decode(before) + said == tokenizer.decode(tokens)


def test_a_completion_continues_its_prompt_and_a_chats_answer_begins_anew() -> None:
    pieces = sentencepiece()
    served = Served(
        name="pieces", text=(text := LibraryText(pieces, name="pieces")), template=ChatTemplate(text), max_length=99,
        grammars=Grammars(text, size=300, end_tokens=[]), vocabulary_size=300,
    )  # fmt: skip
    token = Token(request="0-0", token=pieces.token_to_id("\N{LOWER ONE EIGHTH BLOCK}is"), finish="length")
    said = []
    for asked in (
        asked_for_completion({"prompt": "a"}, served, client=""),
        asked_for_chat({"messages": [{"role": "user", "content": "a"}]}, served, client=""),
    ):
        (request,) = asked.requests("0", served.grammars)
        said.append(Written(text, asked, request).add([token]).text)
    assert said == [" is", "is"]


def test_bytes_that_are_no_text_are_shown_as_such_and_hold_nothing_up() -> None:
    stream = TextStream(ByteText())
    shown = "".join(stream.add(token) for token in b"a\xff\xff\xff\xff\xff\xffb" + b"plain")
    assert shown.startswith("a")
    assert shown.endswith("plain")


@given(st.text(alphabet="abc", max_size=30), st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3))
def test_stop_strings_cut_where_the_first_of_them_begins_to_show(text: str, stops: list[str]) -> None:
    whole = StopStrings(stops)
    shown = whole.add(text) + whole.end()
    piecewise, parts = StopStrings(stops), ""
    for character in text:
        parts += piecewise.add(character)
        if piecewise.has_stopped:
            break
        assert not any(stop in parts for stop in stops)
    parts += piecewise.end()
    assert not any(stop in parts for stop in stops)
    assert text.startswith(parts)
    assert piecewise.has_stopped == whole.has_stopped == any(stop in text for stop in stops)
    if not stops:
        assert shown == parts == text


def test_a_folders_tokenizer_comes_with_its_template_and_names(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    config = {
        "eos_token": {"content": "<|end|>"},
        "chat_template": "{% for m in messages %}[{{ m.content }}]{% endfor %}",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    text = load_tokenizer(tmp_path)
    assert text.decode(text.encode(TEXT)) == TEXT
    assert b"".join(map(text.bytes_of, text.encode(TEXT))).decode() == TEXT
    assert text.named == {"eos_token": "<|end|>"}
    assert ChatTemplate(text).apply([{"role": "user", "content": "hi"}]) == "[hi]"
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('only users') }}")
    with pytest.raises(ShardwiseError, match="refuses these messages: only users"):
        ChatTemplate(load_tokenizer(tmp_path)).apply([])
    with pytest.raises(ShardwiseError, match="there is no tokenizer at"):
        load_tokenizer(tmp_path / "nowhere")


def test_settings_of_a_training_that_a_tokenizer_was_saved_in_change_no_prompt(tmp_path: Path) -> None:
    made, right = byte_level(), byte_level().encode(TEXT).ids
    made.enable_truncation(4)
    made.enable_padding(length=100)
    made.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode(TEXT) == right


def test_files_beside_a_tokenizer_name_its_tokens_and_have_those_that_it_lacks(tmp_path: Path) -> None:
    made = byte_level()
    made.save(str(tmp_path / "tokenizer.json"))
    first = made.get_vocab_size()
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<|end|>", "eos_token": {"content": "<|end|>"}}')
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|end|>": 0, "<call>": first}))
    added = {"content": "<other>", "special": False, "normalized": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {str(first + 1): added}}))
    text = load_tokenizer(tmp_path)
    assert text.named == {"bos_token": "<|end|>", "eos_token": "<|end|>"}
    assert text.encode("<call><other>") == [first, first + 1]
    assert [text.bytes_of(token) for token in (first, first + 1)] == [b"<call>", b"<other>"]
    assert text.decode([first + 1, first]) == "<other><call>"
    (tmp_path / "added_tokens.json").write_text('{"<call>": 500}')
    with pytest.raises(ShardwiseError, match="is missing in"):
        load_tokenizer(tmp_path)


def test_a_template_for_tools_is_used_for_chats_with_tools(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    named = [{"name": "tool_use", "template": "T{{ tools | length }}"}, {"name": "default", "template": "plain"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template, tool = ChatTemplate(load_tokenizer(tmp_path)), {"type": "function", "function": {"name": "f"}}
    assert [template.apply([]), template.apply([], [tool])] == ["plain", "T1"]
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("F{{ tools | length }}")
    assert ChatTemplate(load_tokenizer(tmp_path)).apply([], [tool]) == "F1"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tokenizer_config.json", b"[1]", "tokenizer_config.json is not a table of entries"),
        ("tokenizer_config.json", b'{"chat_template": 5}', "has a chat template that is no text"),
        ("tokenizer_config.json", b"\xff", "tokenizer_config.json is not valid JSON"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja is not text in UTF-8"),
    ],
)
def test_files_beside_a_tokenizer_that_cannot_be_read_are_named(
    name: str, content: bytes, said: str, tmp_path: Path
) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ShardwiseError, match=said):
        load_tokenizer(tmp_path)


def test_a_template_gets_variables_of_the_request() -> None:
    text = ByteText()
    text.template = "{{ 'quick' if enable_thinking is false else 'slow' }}: {{ messages[0].content }}"
    template = ChatTemplate(text)
    said = [{"role": "user", "content": "hi"}]
    assert template.apply(said) == "slow: hi"
    assert template.apply(said, (), {"enable_thinking": False, "self": 1, "context": 2}) == "quick: hi"


def test_whatever_a_template_raises_is_a_refusal() -> None:
    text = ByteText()
    text.template = "{{ messages[0].content[5] / 0 }}{{ 1 // depth }}"
    with pytest.raises(ShardwiseError, match="the model's chat template refuses these messages"):
        ChatTemplate(text).apply([{"role": "user", "content": "hi"}], (), {"depth": 0})
    text.template = "{{ 1 // depth }}"
    with pytest.raises(ShardwiseError, match="refuses these messages: integer division or modulo by zero"):
        ChatTemplate(text).apply([{"role": "user", "content": "hi"}], (), {"depth": 0})


def test_marks_of_answers_for_training_change_no_prompt() -> None:
    marked = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}"
    text = ByteText()
    text.template = marked
    assert ChatTemplate(text).apply([{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]) == "a;b;"


def test_a_template_cannot_reach_out_of_its_sandbox() -> None:
    text = ByteText()
    text.template = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(ShardwiseError, match="refuses these messages"):
        ChatTemplate(text).apply([])


def write_gguf(path: Path, right: Any, pre: str, kinds: dict[str, int]) -> None:
    """Write a tokenizer's tables as a GGUF file has them."""
    from gguf import GGUFWriter

    model = json.loads(right.to_str())["model"]
    tokens = sorted(right.get_vocab(), key=right.get_vocab().get)
    writer = GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([kinds.get(token, 1) for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_eos_token_id(tokens.index("<|end|>"))
    writer.add_bos_token_id(tokens.index("<|end|>"))
    writer.add_chat_template("{{ messages[0].content }}{{ eos_token }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def test_a_gguf_files_tables_give_the_tokens_of_the_tokenizer_that_they_came_from(tmp_path: Path) -> None:
    from tokenizers import AddedToken

    right, path = byte_level(), tmp_path / "small.gguf"
    right.add_tokens([AddedToken("<call>", special=False, normalized=False)])
    write_gguf(path, right, "gpt-2", {"<|end|>": 3, "<call>": 4})
    text = load_tokenizer(path)
    assert text.encode(TEXT) == right.encode(TEXT).ids
    assert text.encode("a<|end|>b") == right.encode("a<|end|>b").ids
    assert text.encode("a<call>b") == right.encode("a<call>b").ids
    assert text.decode(text.encode("a<call>b")) == "a<call>b", "a token of the user's is part of a text"
    assert text.decode(text.encode(TEXT)) == TEXT
    assert ChatTemplate(text).apply([{"role": "user", "content": "x"}]) == "x<|end|>"


def test_a_gguf_file_of_llama_3_begins_texts_as_its_tokenizer_does(tmp_path: Path) -> None:
    write_gguf(tmp_path / "small.gguf", byte_level(), "llama3", {"<|end|>": 3})
    text = load_tokenizer(tmp_path / "small.gguf")
    assert text.encode("a") == [*text.encode("<|end|>", special=False), *text.encode("a", special=False)]


def test_a_gguf_file_whose_texts_are_cut_in_an_unknown_way_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "small.gguf", byte_level(), "tekken", {"<|end|>": 3})
    with pytest.raises(ShardwiseError, match=r"small\.gguf cuts texts as 'tekken' does; known: gpt-2, smollm"):
        load_tokenizer(tmp_path / "small.gguf")


@pytest.mark.parametrize(
    ("written", "left", "calls"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', "", [("f", {"a": 1})]),
        (
            'so: <tool_call>{"name": "f", "arguments": {}}</tool_call>'
            '<tool_call>{"name": "g", "arguments": {}}</tool_call>',
            "so:",
            [("f", {}), ("g", {})],
        ),
        ('[TOOL_CALLS][{"name": "f", "arguments": {"a": [1]}}]', "", [("f", {"a": [1]})]),
        ('[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]x1[ARGS]{}', "", [("f", {"a": 1}), ("g", {})]),
        ('[TOOL_CALLS]f{"a": 1}', "", [("f", {"a": 1})]),
        ('{"name": "f", "parameters": {"a": 1}}', "", [("f", {"a": 1})]),
        ('<|python_tag|>{"name": "g", "parameters": {}}', "", [("g", {})]),
        # No call: no such function, broken, or plain JSON.
        ('{"name": "h", "parameters": {}}', None, []),
        ("<tool_call>{broken</tool_call>", None, []),
        ('{"answer": 42}', None, []),
        ("just text { with } braces", None, []),
    ],
)
def test_calls_are_found_in_the_common_forms(written: str, left: str | None, calls: list[tuple[str, Any]]) -> None:
    text, found = find_calls(written, frozenset({"f", "g"}))
    assert text == (written if left is None else left)
    assert found == [ToolCall(name, json.dumps(arguments)) for name, arguments in calls]
    stream = ToolCallStream(["f", "g"])
    shown = "".join(map(stream.add, written))
    rest, again = stream.end()
    assert again == found
    assert (shown + rest).strip() == text.strip()


def test_marks_of_calls_are_seen_though_they_are_no_text() -> None:
    made = byte_level()
    made.add_special_tokens(["[TOOL_CALLS]", "<other>"])
    text = LibraryText(made, name="marks")
    template = ChatTemplate(text)
    served = Served(
        name="marks", text=text, template=template, max_length=999, grammars=Grammars(text, size=400, end_tokens=[]),
        vocabulary_size=400,
    )  # fmt: skip
    body = {"messages": [{"role": "user", "content": "a"}]}
    tools = [{"type": "function", "function": {"name": "f"}}]
    tokens = text.encode('so [TOOL_CALLS][{"name": "f", "arguments": {}}]<other>')
    for fields, shown, calls in (
        (body, 'so [{"name": "f", "arguments": {}}]', 0),
        ({**body, "tools": tools}, "so ", 1),
    ):
        asked = asked_for_chat(fields, served, client="")
        (request,) = asked.requests("0", served.grammars)
        written = Written(text, asked, request)
        for token in tokens:
            written.add([Token(request="0-0", token=token)])
        written.add([Token(request="0-0", token=0, finish="stop")])
        assert (written.whole().text, len(written.whole().calls)) == (shown, calls)


def test_a_schema_narrows_tokens_of_more_than_one_byte_to_its_words() -> None:
    text = LARGE
    guide = Grammars(text, size=text.vocabulary + 7, end_tokens=[0]).guide({"enum": ["return", "def"]})
    written = list[int]()
    while not guide.is_complete:
        allowed = guide.allowed()
        assert len(allowed) == text.vocabulary + 7
        written.append(int(allowed.nonzero()[0][-1]))
        guide.advance(written[-1])
    assert text.decode(written) in ('"return"', '"def"')
    assert guide.allowed().nonzero()[0].tolist() == [0]


@pytest.mark.parametrize("text", [ByteText(), LARGE], ids=["bytes", "library"])
@pytest.mark.parametrize("place", ["none", "known", "beyond", "both", "far beyond"])
def test_a_schema_is_followed_wherever_the_end_token_is(text: Text, place: str) -> None:
    """In the tokenizer, nowhere, or beyond it: models may have more tokens than their tokenizers."""
    size = text.vocabulary + 12
    beyond = size - 2
    ends = {"none": [], "known": [0], "beyond": [beyond], "both": [0, beyond], "far beyond": [size + 5]}[place]
    guide = Grammars(text, size=size, end_tokens=ends).guide({"type": "integer", "minimum": 10})
    digits = {token for token in range(size) if text.bytes_of(token).isdigit()}
    assert set(guide.allowed().nonzero()[0]) <= digits
    for digit in b"12":
        guide.advance(next(token for token in digits if text.bytes_of(token) == bytes([digit])))
    if place in ("none", "far beyond"):  # There is nothing that the model could say to end it.
        assert guide.is_complete
        return
    allowed = set(guide.allowed().nonzero()[0])
    assert allowed & digits
    assert allowed - digits == set(ends)
    guide.advance(ends[-1])
    assert guide.is_complete
    assert guide.allowed().nonzero()[0].tolist() == ends


def test_a_tokenizer_with_gaps_has_room_for_its_largest_token(tmp_path: Path) -> None:
    made = byte_level()
    described = json.loads(made.to_str())
    described["added_tokens"][0]["id"] = 900
    described["model"]["vocab"]["<|end|>"] = 900
    (tmp_path / "tokenizer.json").write_text(json.dumps(described), encoding="utf-8")
    text = load_tokenizer(tmp_path)
    assert text.vocabulary == 901
    guide = Grammars(text, size=1000, end_tokens=[900]).guide({"const": 7})
    (seven,) = guide.allowed().nonzero()[0].tolist()
    assert text.bytes_of(seven) == b"7"
    guide.advance(seven)
    assert guide.allowed().nonzero()[0].tolist() == [900]


def test_references_of_parameters_begin_where_these_are_in_the_schema_of_a_call() -> None:
    # A property may have the name of a keyword.
    parameters = {"properties": {"default": {"$ref": "#/$defs/unit"}}, "$defs": {"unit": {"const": {"$ref": "#/x"}}}}
    made = call_schema([{"function": {"name": "heat", "parameters": parameters}}])["properties"]["arguments"]
    assert made["properties"]["default"] == {"$ref": "#/properties/arguments/$defs/unit"}
    assert made["$defs"] == parameters["$defs"]
