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
        help="a Hugging Face folder, a run, a GGUF file or a known model (default: newest under runs/)",
    )  # fmt: skip
    parser.add_argument("--plan", default="auto", metavar="P", help="a plan such as tp=2, or auto (default: auto)")
    parser.add_argument(
        "--goal", default="tokens", metavar="G", help="goal of --plan auto: tokens or latency (default: tokens)"
    )
    parser.add_argument("--cluster", metavar="C", help="a cluster.toml, to place ranks by its links")
    parser.add_argument("--random-weights", action="store_true", help="use random weights, for a known model")
    parser.add_argument("--precision", metavar="P", help="fp32, bf16 or fp16 (default: as the weights)")
    parser.add_argument("--weights", metavar="W", help="keep layer weights as fp8 or int4 (default: as they are)")
    parser.add_argument(
        "--max-length", type=int, metavar="N", help="most tokens of prompt and answer (default: the model's)"
    )
    parser.add_argument("--kv", metavar="BYTES", help="size of the KV cache, such as 4GiB (default: by free memory)")
    parser.add_argument(
        "--kv-host", default="0", metavar="BYTES", help="host memory for evicted KV blocks (default: 0)"
    )
    parser.add_argument(
        "--kv-files", default="0", metavar="BYTES", help="files for blocks evicted from there (default: 0)"
    )
    parser.add_argument("--kv-folder", type=Path, metavar="DIR", help="folder for these files, kept over restarts")


def load_as_told(arguments: argparse.Namespace) -> "LLMEngine | Replicas":
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
    )
