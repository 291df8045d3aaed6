"""Fields that clients of OpenAI's API and of vLLM's send, and that nothing here depends on.

A field whose value changes nothing is taken, so that a client need not be told apart. A value that would change the
answer is refused with what to do instead: an answer that is not what was asked for is worse than none.
"""

from typing import Any

from shardwise.serving.http.json_schema import Schema, flag, or_null, text

_ANY_OBJECT: Schema = {"type": "object"}


def _only(*values: Any, instead: str) -> Schema:
    """Take these values and null; for any other, say what to do instead."""
    return {"enum": [*values, None], "x-instead": instead}


_BIAS = "logit_bias makes tokens likelier, unlikelier, or impossible (-100)"
_FORMAT = "response_format with a json_schema limits what is written; an enum in it is a choice"
_TEXT_ONLY = "only text is written here; leave it out"

#: Both endpoints.
BOTH_TAKE: dict[str, Schema] = {
    "metadata": or_null({**_ANY_OBJECT, "description": "taken, and not used"}),
    "store": _only(False, instead="answers are not stored here; leave it out"),
    "service_tier": _only("auto", "default", instead="priority says which requests come first"),
    "prompt_cache_key": text("taken, and not used: whatever begins alike is shared"),
    "prompt_cache_retention": text("taken, and not used: blocks are kept while there is room"),
    "use_beam_search": _only(False, instead="there is no beam search; n gives several answers"),
    "early_stopping": _only(False, instead="there is no beam search; leave it out"),
    "length_penalty": or_null({"type": "number", "minimum": 1, "maximum": 1})
    | {"x-instead": "there is no beam search; min_tokens and max_tokens set the length"},
    "skip_special_tokens": _only(
        True, instead="special tokens are no part of the text; return_token_ids gives their numbers"
    ),
    "spaces_between_special_tokens": flag("taken, and not used: special tokens are no part of the text"),
    "include_stop_str_in_output": _only(
        False, instead="a stop string is no part of the answer; append it where finish_reason is stop"
    ),
    "detokenize": _only(True, instead="text is always given; return_token_ids gives the tokens too"),
    "return_tokens_as_token_ids": _only(False, instead="return_token_ids gives the tokens"),
    "prompt_logprobs": _only(instead="/v1/completions gives them with echo and logprobs"),
    "truncate_prompt_tokens": _only(instead="a prompt that is too long is refused with its length; shorten it"),
    "allowed_token_ids": _only(instead=_BIAS),
    "bad_words": _only(instead=_BIAS),
    "logits_processors": _only(instead=_BIAS),
    "structured_outputs": _only(instead=_FORMAT),
    "guided_json": _only(instead=_FORMAT),
    "guided_regex": _only(instead=_FORMAT),
    "guided_choice": _only(instead=_FORMAT),
    "guided_grammar": _only(instead=_FORMAT),
}

#: What a stream has.
STREAM_TAKES: dict[str, Schema] = {
    "include_obfuscation": _only(False, instead="events are not padded; leave it out"),
}

#: `/v1/completions` alone.
COMPLETION_TAKES: dict[str, Schema] = {
    "suffix": _only("", instead="a text is only continued; write the model's tokens for filling in into the prompt"),
    "add_special_tokens": _only(True, instead="a prompt of tokens is taken as it is"),
    "response_format": {
        "enum": [{"type": "text"}, None],
        "x-instead": "only /v1/chat/completions writes to a schema",
    },
}

#: `/v1/chat/completions` alone.
CHAT_TAKES: dict[str, Schema] = {
    "modalities": {"enum": [["text"], None], "x-instead": _TEXT_ONLY},
    "audio": _only(instead=_TEXT_ONLY),
    "prediction": or_null({**_ANY_OBJECT, "description": "taken, and not used"}),
    "reasoning_effort": _only(instead="chat_template_kwargs sets what the model's own template knows"),
    "verbosity": _only(instead="say in a message how long the answer is to be"),
    "web_search_options": _only(instead="nothing is searched here; tools describes functions of yours"),
    "functions": _only(instead="tools describes functions"),
    "function_call": _only(instead="tool_choice says whether a function is called"),
    "documents": _only(instead="write them into a message"),
    "echo": _only(False, instead="/v1/completions gives a prompt back"),
    "add_special_tokens": _only(False, instead="the model's chat template writes them"),
    "add_generation_prompt": _only(True, instead="an answer is always begun; /v1/completions continues any text"),
    "continue_final_message": _only(False, instead="/v1/completions continues any text"),
    "chat_template": _only(instead="the model's own is used; /v1/completions takes a text of any form"),
}

#: A message that an earlier answer was, as clients send it back.
MESSAGE_TAKES: dict[str, Schema] = {
    "annotations": {"enum": [[], None], "x-instead": _TEXT_ONLY},
    "audio": _only(instead=_TEXT_ONLY),
    "function_call": _only(instead="tool_calls has the calls of an answer"),
}
