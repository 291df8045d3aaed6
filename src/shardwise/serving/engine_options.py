"""Command-line options of the engine, for `serve` and `generate`: the model, its plan, and the KV cache's memory."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.units import parse_bytes

if TYPE_CHECKING:
    from shardwise.serving.engine import LLMEngine
    from shardwise.serving.replicas import Replicas


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", metavar="MODEL",
        help="a Hugging Face folder, a run of shardwise train (the newest under runs/), a file.gguf, or a name",
    )  # fmt: skip
    parser.add_argument("--plan", default="auto", metavar="P", help="auto, or how it is spread over devices (auto)")
    parser.add_argument("--goal", default="tokens", metavar="G", help="of --plan auto: tokens or latency (tokens)")
    parser.add_argument("--cluster", metavar="C", help="a cluster.toml: ranks sit on its devices by what they send")
    parser.add_argument("--random-weights", action="store_true", help="for a name of the catalogue: weights are drawn")
    parser.add_argument("--precision", metavar="P", help="fp32, bf16 or fp16 (as the weights are)")
    parser.add_argument("--weights", metavar="W", help="of layers in fewer bits: fp8 or int4 (as they are)")
    parser.add_argument("--max-length", type=int, metavar="N", help="tokens of a prompt and its answer (the model's)")
    parser.add_argument("--kv", metavar="BYTES", help="for the KV cache, such as 4GiB (what is free)")
    parser.add_argument("--kv-host", default="0", metavar="BYTES", help="host memory for blocks that leave it (0)")
    parser.add_argument("--kv-files", default="0", metavar="BYTES", help="files for blocks that leave that (0)")
    parser.add_argument("--kv-folder", type=Path, metavar="DIR", help="where those files are, also after a restart")


def load_as_told(arguments: argparse.Namespace, *, seed: int | None = None) -> "LLMEngine | Replicas":
    from shardwise.serving.load import load_engine  # Loads torch.

    return load_engine(
        arguments.model,
        plan=arguments.plan,
        goal=arguments.goal,
        cluster=arguments.cluster,
        random_weights=arguments.random_weights,
        precision=arguments.precision,
        weights=arguments.weights,
        max_length=arguments.max_length,
        kv_bytes=None if arguments.kv is None else parse_bytes(arguments.kv),
        host_bytes=parse_bytes(arguments.kv_host),
        file_bytes=parse_bytes(arguments.kv_files),
        kv_folder=arguments.kv_folder,
        seed=seed,
    )
