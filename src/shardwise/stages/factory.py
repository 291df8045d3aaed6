"""Find a user's function that makes a module by name: `package.module:factory`, or `file.py:factory`."""

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from shardwise.errors import ShardwiseError, unknown
from shardwise.stages.split.lines import line_of_error


def _remedy(option: str) -> str:
    return f"{option}my_package.my_module:factory, or {option}my_file.py:factory"


def split_name(where: str, option: str) -> tuple[str, str]:
    """Return module and function. `option` is the text before it on a command line: `--module `, for example."""
    name, colon, attribute = where.partition(":")
    if not colon or not name or not attribute:
        raise ShardwiseError(f"{option}{where} is no package.module:factory", remedy=_remedy(option))
    return name, attribute


def find_factory(where: str, option: str, folder: str | None = None) -> Callable[[], Any]:
    """Return the function of this name. Modules in the working directory are found, as by `python -m`."""
    name, attribute = split_name(where, option)
    here = folder or str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        home = _from_file(Path(here, name)) if name.endswith(".py") else import_module(name)
    except Exception as error:
        why = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        raise ShardwiseError(f"{option}{where} cannot be imported: {why}", remedy=_remedy(option)) from None
    factory = getattr(home, attribute, None)
    if not callable(factory):
        functions = [key for key, each in vars(home).items() if callable(each) and not key.startswith("_")]
        told = unknown(f"function of {name}", attribute, functions)
        raise ShardwiseError(told.problem, remedy=told.remedy and f"{option}{name}:{told.remedy}")
    return lambda: _called(factory, where)


def _from_file(path: Path) -> Any:
    """Import a file as a module under its own name, so that its definitions are the same on all ranks."""
    if not path.is_file():
        raise ImportError(f"there is no file {path}")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None, "a name that ends in .py has a loader"
    assert spec.loader is not None, "and that is it"
    home = module_from_spec(spec)
    sys.modules[path.stem] = home
    spec.loader.exec_module(home)
    return home


def _called(factory: Callable[[], Any], where: str) -> Any:
    try:
        return factory()
    except ShardwiseError:
        raise
    except Exception as error:
        raise ShardwiseError(
            f"{where} raises {type(error).__name__}: {error}, at {line_of_error(error)}",
            remedy="a function without arguments that returns what it makes",
        ) from error
