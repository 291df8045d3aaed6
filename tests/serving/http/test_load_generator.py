"""A load generator that nobody here wrote (guidellm) measures the server, as its users would call it.

It has an environment of its own, because it needs other releases than ours of what we need too: `make guidellm`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.serving.http.repeating import RepeatingEngine
from tests.serving.http.serving_here import NAME, running

GUIDELLM = Path(sys.prefix) / "guidellm" / "bin" / "guidellm"
NUM_REQUESTS, NUM_TOKENS = 6, 5
#: One process of its workers, and no waiting before the first request.
SETTINGS = {
    "GUIDELLM__MAX_WORKER_PROCESSES": "1",
    "GUIDELLM__SCHEDULER_START_DELAY_NON_DISTRIBUTED": "0.2",
    "GUIDELLM__LOGGING__CONSOLE_LOG_LEVEL": "WARNING",
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token for each byte: prompts are made of so many tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(folder)
    return folder


def measured(url: str, path: str, profile: str, more: str, tokenizer: Path, folder: Path) -> Any:
    """What it reports of one run."""
    report = folder / "report.json"
    words = [
        str(GUIDELLM), "run", "--disable-console", "--profile", profile,
        "--backend", f"kind=openai_http,target={url},request_format={path}{more}",
        "--constraint", f"kind=max_requests,count={NUM_REQUESTS}",
        "--data", f"kind=synthetic_text,prompt_tokens=24,output_tokens={NUM_TOKENS}",
        "--tokenizer", f"kind=hf_auto,model={tokenizer}", "--output", f"kind=json,path={report}",
    ]  # fmt: skip
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COV_"))}
    done = subprocess.run(words, env=kept | SETTINGS, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = json.loads(report.read_text(encoding="utf-8"))["benchmarks"]
    return found


@pytest.mark.whole
@pytest.mark.skipif(not GUIDELLM.exists(), reason="guidellm is not installed: make guidellm")
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    ("profile", "more"),
    [
        ("kind=synchronous", ""),
        ("kind=synchronous", ",stream=false"),
        ("kind=concurrent,streams=3", ""),
        ("kind=constant,rate=20", ""),
    ],
    ids=["synchronous", "not streamed", "concurrent", "constant"],
)
def test_it_gets_an_answer_to_every_request_and_figures_of_each(
    path: str, profile: str, more: str, tokenizer: Path, tmp_path: Path
) -> None:
    with running(RepeatingEngine(step_seconds=0.005)) as here:
        found = measured(here.url, path, profile, more, tokenizer, tmp_path)
        totals = found["metrics"]["request_totals"]
        assert totals == {"successful": NUM_REQUESTS, "errored": 0, "incomplete": 0, "total": NUM_REQUESTS}
        for request in found["requests"]["successful"]:
            assert json.loads(request["request_args"])["body"]["model"] == NAME
            assert (request["output_tokens"], len(request["output"])) == (NUM_TOKENS, NUM_TOKENS)
            assert request["prompt_tokens"] >= 24
            if not more:
                assert 0 < request["time_to_first_token_ms"] <= 1000 * request["request_latency"]
        assert found["metrics"]["output_tokens_per_second"]["successful"]["mean"] > 0
        assert here.server.num_answered == NUM_REQUESTS
        assert here.engine.load().num_used_blocks == 0
