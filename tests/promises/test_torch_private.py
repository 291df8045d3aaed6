"""Private names of torch are used in `torch_private.py` and nowhere else; what is set for the process is set back."""

import ast
import gc
from collections.abc import Iterator

from torch import nn

from shardwise import torch_private
from tests.promises.lines import read_rows, room_of, row_of
from tests.promises.sources import Source, all_sources, nodes_of

HOME = "torch_private.py"
#: Private attributes that are not torch's: of named tuples, the interpreter, argparse, and Hugging Face's models.
OF_OTHERS = {
    "_replace",
    "_fields",
    "_asdict",
    "_getframe",
    "_exit",
    "_negative_number_matcher",
    "_option_string_actions",
    "_attn_implementation",
    "_supports_attention_backend",
}

_DEFINED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def imported_names(node: ast.Import | ast.ImportFrom) -> list[str]:
    """What a line imports, with dots. No source of ours says it relatively."""
    if isinstance(node, ast.Import):
        return [each.name for each in node.names]
    return [f"{node.module}.{each.name}" for each in node.names]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_attributes() -> set[str]:
    """Private attributes that Shardwise itself defines: methods, fields, slots, and what is assigned to `self`."""
    names = set()
    for source in all_sources():
        for node in nodes_of(source):
            if isinstance(node, ast.ClassDef):
                names |= {each.name for each in node.body if isinstance(each, _DEFINED)}
                names |= {
                    each.id
                    for part in node.body
                    for each in ast.walk(part)
                    if isinstance(each, ast.Name) and is_assigned(each)
                }
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
                names.add(node.attr)
    return {name for name in names if is_private(name)}


def is_assigned(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def is_of_torch(node: ast.AST) -> bool:
    """Whether an expression begins with `torch.`. To write each out as text takes ten times as long."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return isinstance(node, ast.Name) and node.id == "torch"


def private_names(source: Source, own: set[str]) -> Iterator[str]:
    """What a source uses of torch that is private, with the line where it does."""
    for node in nodes_of(source):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for name in imported_names(node):
                parts = name.split(".")
                if parts[0] == "torch" and any(map(is_private, parts)):
                    yield f"{source.name}:{node.lineno} {name}"
        elif (
            isinstance(node, ast.Attribute)
            and is_private(node.attr)
            and (is_of_torch(node) or (node.attr not in own and node.attr not in OF_OTHERS))
        ):
            yield f"{source.name}:{node.lineno} {ast.unparse(node)}"


def test_private_names_of_torch_are_used_in_one_file() -> None:
    own = own_attributes()
    found = [name for source in all_sources() if source.name != HOME for name in private_names(source, own)]
    assert found == []


def test_a_private_name_would_be_found() -> None:
    text = (
        "import torch._dynamo\nfrom torch.utils import _pytree\ntorch._C.f()\nmodule._parameters\nself._mine\na._mine\n"
    )
    source = Source(path=all_sources()[0].path, module="shardwise.x", text=text, tree=ast.parse(text))
    found = [name.split(" ")[1] for name in private_names(source, {"_mine"})]
    assert sorted(found) == ["module._parameters", "torch._C", "torch._dynamo", "torch.utils._pytree"]


def test_rooms_without_torch_do_not_load_the_private_names() -> None:
    found = []
    for source in all_sources():
        row = row_of(room_of(source.module) or "", read_rows())
        if row is None or row.may_use_torch or source.name.startswith("model/tra"):  # That is loaded with a module.
            continue
        imports = [each for each in source.tree.body if isinstance(each, (ast.Import, ast.ImportFrom))]
        names = [name for each in imports for name in imported_names(each)]
        found += [f"{source.name} {name}" for name in names if name.startswith("shardwise.torch_private")]
    assert found == []


def test_every_name_in_it_is_there_in_this_torch() -> None:
    assert all(hasattr(torch_private, name) for name in torch_private.__all__)
    assert torch_private.engine_run_backward is not None
    assert torch_private.run_in_thread is not None


def test_limits_of_compilation_are_raised_while_somebody_needs_them_and_set_back() -> None:
    import torch._dynamo

    gc.collect()  # A compiled engine of an earlier test that were found now would set the limits back in between.
    config, limits = torch._dynamo.config, torch_private.RecompileLimits()
    before = config.recompile_limit, config.accumulated_recompile_limit
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    limits.raise_for(first, 1000)
    limits.raise_for(second, 500)
    assert (config.recompile_limit, config.accumulated_recompile_limit) == (1000, 1000)
    del first
    gc.collect()
    assert (config.recompile_limit, config.accumulated_recompile_limit) == (500, 500)
    del second
    gc.collect()
    assert (config.recompile_limit, config.accumulated_recompile_limit) == before


def test_settings_of_the_compiler_hold_inside_a_block_only() -> None:
    import torch._functorch.config as config

    before = config.enable_autograd_cache
    with torch_private.functorch_settings(enable_autograd_cache=not before):
        assert config.enable_autograd_cache is not before
    assert config.enable_autograd_cache is before
