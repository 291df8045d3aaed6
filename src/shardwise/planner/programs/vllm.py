"""vLLM's arguments: how a model is sharded for serving, and how much is served at once."""

import shlex
from dataclasses import dataclass

import numpy as np

from shardwise.cost.serving import BLOCK, serve
from shardwise.errors import ShardwiseError
from shardwise.planner.question import Question
from shardwise.planner.serving import Serving, Target, as_serving

_SIZES = {
    "tensor-parallel-size": ("tp", "-tp"),
    "pipeline-parallel-size": ("pp", "-pp"),
    "data-parallel-size": ("dp", "-dp"),
    "max-num-seqs": ("sequences", None),
    "max-model-len": ("longest", None),
}
# Arguments that change the result and are not priced, each with the assumed value.
_UNPRICED = {
    "quantization": ("-q", "none"),
    "kv-cache-dtype": (None, "auto"),
    "dtype": (None, "bfloat16"),
    "gpu-memory-utilization": (None, "0.9"),
    "block-size": (None, "16"),
    "cpu-offload-gb": (None, "0"),
    "speculative-config": (None, "none"),
    "decode-context-parallel-size": ("-dcp", "1"),
}
_AS_ASSUMED = ("auto", "none", "half", "float16", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """The content of a vLLM command line. `longest` is a prompt with its answer."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    sequences: int = 256
    longest: int | None = None
    spreads_experts: bool = False
    #: Descriptions of arguments that are not priced.
    unpriced: tuple[str, ...] = ()


def write(way: Serving, model: str, *, longest: int) -> str:
    """Return the command for a way to serve. vLLM spreads experts over all ranks of a replica."""
    plan = way.plan
    lines = [
        f"vllm serve {shlex.quote(model)}",
        f"--tensor-parallel-size {plan.tp}",
        f"--pipeline-parallel-size {plan.pp}",
        f"--data-parallel-size {plan.dp}",
        *(["--enable-expert-parallel"] if plan.ep > 1 else []),
        f"--max-num-seqs {way.sequences}",
        f"--max-model-len {longest}",
        "--dtype bfloat16",
        "--gpu-memory-utilization 0.9",
        "--block-size 16",
    ]
    return " \\\n  ".join(lines) + "\n"


def is_vllm(text: str) -> bool:
    """Whether a text is a vLLM command line."""
    words = text.split()
    return "vllm" in words[:4] or "vllm.entrypoints" in text or "--tensor-parallel-size" in text


def read(text: str) -> Server:
    """Read a command line. Arguments without effect here are skipped; those that are not priced are listed."""
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    found: dict[str, int] = {}
    unpriced = []
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        value = value if equals else words[index + 1] if index + 1 < len(words) else ""
        for long, (key, short) in _SIZES.items():
            if name in _spellings(long, short):
                if not value.isdecimal() or int(value) < 1:
                    raise ShardwiseError(f"{name} {value} wants a number of 1 or more", remedy=f"{name} 1")
                found[key] = int(value)
        for long, (short, assumed) in _UNPRICED.items():
            if name in _spellings(long, short) and not _is_assumed(value, assumed):
                unpriced.append(f"{name} {value} is not priced: {long} is taken as {assumed}")
    spreads = "--enable-expert-parallel" in words or "-ep" in words
    return Server(**found, spreads_experts=spreads, unpriced=tuple(unpriced))


def _is_assumed(value: str, assumed: str) -> bool:
    """Whether a value is the assumed one, however it is written."""
    is_number = assumed.replace(".", "").isdecimal() and value.replace(".", "", 1).isdecimal()
    return float(value) == float(assumed) if is_number else value in (assumed, *_AS_ASSUMED)


def _spellings(long: str, short: str | None) -> tuple[str | None, ...]:
    return f"--{long}", f"--{long.replace('-', '_')}", short


def account_for(server: Server, question: Question, target: Target) -> tuple[Serving, bool]:
    """Return the result with as many sequences as fit, up to the requested number, and whether all fit."""
    needed = server.tp * server.pp * server.dp
    devices = question.cluster.num_devices
    if needed != devices:
        replicas, left = divmod(devices, server.tp * server.pp)
        raise ShardwiseError(
            f"tensor {server.tp} x pipeline {server.pp} x data {server.dp} parallel ranks are {needed}, and "
            f"{question.cluster} has {devices} devices",
            remedy=f"a cluster of {needed} devices" + ("" if left else f", or --data-parallel-size {replicas}"),
        )
    found, fits = _account_for(server, server.sequences, question, target)
    if fits:
        return found, True
    # The number of blocks does not depend on the number of sequences, so serve as many as the blocks hold.
    most = found.num_blocks // -(-(question.sequence + target.output) // BLOCK)
    return _account_for(server, max(min(most, server.sequences), 1), question, target)


def _account_for(server: Server, sequences: int, question: Question, target: Target) -> tuple[Serving, bool]:
    ones = np.ones(1, dtype=np.int64)
    ep = server.dp if server.spreads_experts and question.num_experts % server.dp == 0 else 1
    columns = {"dp": server.dp * ones, "tp": server.tp * ones, "pp": server.pp * ones, "ep": ep * ones}
    columns["sequences"] = sequences * ones
    served = serve(
        question.model, question.cluster.pools[0], tp=columns["tp"], pp=columns["pp"], ep=columns["ep"],
        sequences=columns["sequences"], prompt=question.sequence, output=target.output,
        software=question.software_in("bf16"),
    )  # fmt: skip
    return as_serving(question, target, columns, served, 0), bool(served.fits[0])
