"""`import shardwise` is light. Counted in modules, not in milliseconds: a busy machine must not fail this."""

from shardwise.cli import COMMANDS
from tests.promises.processes import run_python

HEAVY = {"torch", "triton", "numpy", "rich", "asyncio", "subprocess", "argparse", "dataclasses"}


def modules_loaded_by(statement: str) -> set[str]:
    report = "print(*(set(sys.modules) - before), file=sys.stderr)"
    finished = run_python("-c", f"import sys; before = set(sys.modules); {statement}; {report}")
    assert finished.returncode == 0, finished.stderr
    return set(finished.stderr.split())


def test_importing_the_package_loads_nothing_heavy_and_no_room_of_its_own() -> None:
    loaded = modules_loaded_by("import shardwise")
    assert loaded.isdisjoint(HEAVY)
    assert {name for name in loaded if name.startswith("shardwise")} == {"shardwise"}


def test_importing_the_package_loads_few_modules() -> None:
    assert len(modules_loaded_by("import shardwise")) <= 30  # `typing` and what it stands on.


def test_catching_our_error_loads_no_other_room() -> None:
    loaded = modules_loaded_by("import shardwise; shardwise.ShardwiseError")
    assert {name for name in loaded if name.startswith("shardwise")} == {"shardwise", "shardwise.errors"}


def test_asking_a_command_for_help_loads_neither_torch_nor_rich() -> None:
    """One after the other in one process: the first that loads any of them is told with it."""
    names = [command.name for command in COMMANDS]
    program = f"""
import sys
from shardwise.cli import main
for name in {names}:
    main([name, "--help"])
    print(name, *({{"torch", "triton", "rich"}} & set(sys.modules)), file=sys.stderr)
"""
    finished = run_python("-c", program)
    assert finished.stderr.splitlines() == names


def test_the_overview_loads_no_command() -> None:
    loaded = modules_loaded_by("from shardwise.cli import main; main([])")
    assert loaded.isdisjoint(command.module for command in COMMANDS)


def test_a_model_is_served_by_one_process_without_what_ranks_and_training_need() -> None:
    """It took longer to load than torch itself, at every start."""
    size = "Settings(vocabulary=8, width=8, num_layers=1, length=8, attention=Heads(num_heads=1, num_kv_heads=1, "
    shape = f"{size}head_dim=8), mlp=Mlp(width=8), rope=Rope())"
    imports = "import torch, shardwise.serving.load; from shardwise.nets.settings import *; "
    program = f"{imports}from shardwise.nets.transformer import Transformer; "
    program += f"torch.set_default_device('meta'); Transformer({shape})"
    loaded = modules_loaded_by(program)
    assert "torch" in loaded
    assert loaded.isdisjoint({"torch.distributed.checkpoint", "torch.distributed.tensor", "torch._dynamo", "sympy"})
