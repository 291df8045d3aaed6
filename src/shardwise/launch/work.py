"""The work to start: `train ...` or `serve ...`, parsed by these commands' own options before anything else."""

import argparse
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from shardwise.command_line import WrongCallError, make_parser, parse
from shardwise.errors import ShardwiseError, nearest
from shardwise.planner.plan import Plan

Kind = Literal["train", "serve"]
_MODULES: dict[str, str] = {"train": "shardwise.training.command", "serve": "shardwise.serving.serve_command"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A command for the machines. `words` are its arguments; `folder` is for its scripts and logs, and for a training
    also the run itself. `plan` is None if it is chosen when the ranks are up. `recipe` is a file that the command
    reads."""

    kind: Kind
    name: str
    words: tuple[str, ...]
    folder: Path
    plan: Plan | None
    recipe: Path | None = None
    port: int | None = None

    @property
    def launch_folder(self) -> Path:
        """The folder of scripts, manifests and logs of jobs."""
        return self.folder / "launch"

    @property
    def safe_name(self) -> str:
        """The name, as jobs and objects of a cluster may be called."""
        name = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")[:40].rstrip("-")
        return name if name[:1].isalpha() else f"{self.kind}-{name}".rstrip("-")

    def changed(self, changes: Sequence[str], folder: Path) -> "Work":
        """Return the same training with changed keys of the recipe, in another folder."""
        words = list(self.words)
        words[words.index("--folder") + 1] = str(folder)
        return replace(self, words=(*words, *(w for change in changes for w in ("--set", change))), folder=folder)


def read_work(words: Sequence[str], folder: str | None = None, *, is_local: bool = False) -> Work:
    """Parse the words after the `--`. A server `is_local` if it runs on this machine, and listens as it would here."""
    if not words:
        raise WrongCallError("nothing is said to be started", remedy="-- train RECIPE, or -- serve MODEL")
    kind, *rest = words
    if kind not in _MODULES:
        known = " and ".join(_MODULES)
        raise WrongCallError(
            f"{kind!r} cannot be launched; {known} can", remedy=f"-- {nearest(kind, _MODULES) or 'train'} ..."
        )
    arguments, module = _parsed(kind, rest)
    for option in ("show", "json"):
        if getattr(arguments, option):
            raise WrongCallError(f"--{option} stands after the --", remedy=f"shardwise launch --{option} ... -- {kind}")
    if kind == "train":
        return _training(arguments, rest, module, folder)
    return _serving(arguments, rest, folder, is_local=is_local)


def arguments_of(work: Work) -> argparse.Namespace:
    """Return the arguments of the command."""
    return _parsed(work.kind, work.words)[0]


def _parsed(kind: str, words: Sequence[str]) -> tuple[argparse.Namespace, Any]:
    module: Any = import_module(_MODULES[kind])
    return parse(make_parser(kind, module), list(words), module), module


def command_line(work: Work) -> str:
    """Return the command as one would type it."""
    return shlex.join(["shardwise", work.kind, *work.words])


def as_comment(work: Work) -> str:
    """Return the command in one line, whatever its words contain."""
    return " ".join(command_line(work).split())


def _training(arguments: argparse.Namespace, words: list[str], module: Any, folder: str | None) -> Work:
    recipe = module.recipe_of(arguments)
    if arguments.devices is not None:
        raise ShardwiseError(
            f"--devices {arguments.devices} of train is for ranks of one machine",
            remedy="before the --: --nodes N --devices-per-node N",
        )
    plan = None if arguments.plan in (None, "auto") else Plan.parse(arguments.plan)
    words = _without(words, "--plan", "--folder")
    run = arguments.folder or folder or f"runs/{recipe.name}-{datetime.now().strftime('%Y%m%d-%H%M%S')}"
    chosen = [] if arguments.plan is None else ["--plan", "auto" if plan is None else str(plan)]
    given = Path(arguments.recipe) if arguments.recipe and arguments.recipe.endswith(".toml") else None
    return Work(
        kind="train",
        name=Path(run).name,
        words=(*words, *chosen, "--folder", run),
        folder=Path(run),
        plan=plan,
        recipe=given,
    )


def _serving(arguments: argparse.Namespace, words: list[str], folder: str | None, *, is_local: bool) -> Work:
    if arguments.api_key is not None:
        raise ShardwiseError(
            "an --api-key would be in the script, where everyone can read it", remedy="export SHARDWISE_API_KEY=KEY"
        )
    if arguments.port == 0:
        raise ShardwiseError("--port 0: clients must know the port", remedy="--port 8000")
    if arguments.model is None:
        raise ShardwiseError("serve needs the model that is served on the machines", remedy="-- serve MODEL")
    plan = None if arguments.plan == "auto" else Plan.parse(arguments.plan)
    chosen = [] if plan is None else ["--plan", str(plan)]
    name = arguments.name or Path(arguments.model).name
    host = "0.0.0.0" if arguments.host == "127.0.0.1" and not is_local else arguments.host
    return Work(
        kind="serve",
        name=name,
        words=(*_without(words, "--host", "--plan"), *chosen, "--host", host),
        folder=Path(folder or f"runs/serve-{name}"),
        plan=plan,
        port=arguments.port,
    )


def _without(words: list[str], *options: str) -> list[str]:
    """Return the words without these options and their values."""
    kept, skip = [], False
    for word in words:
        if skip:
            skip = False
        elif word in options:
            skip = True
        elif word.partition("=")[0] not in options:
            kept.append(word)
    return kept
