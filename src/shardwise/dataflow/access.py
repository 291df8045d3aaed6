"""Find which arguments a Triton kernel reads and writes, from the loads, stores and atomics in its source.

The analysis follows each local name back to the arguments that it may point into: through pointer arithmetic, branches,
loops, block pointers, descriptors and calls of other kernels. A pointer that escapes the analysis, for instance into a
function that is not a kernel or into memory, counts as both read and written.
"""

import ast
import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_LOADS = frozenset({"load", "load_tensor_descriptor", "gather", "_experimental_descriptor_load"})
_STORES = frozenset({"store", "store_tensor_descriptor", "scatter", "_experimental_descriptor_store"})
_ATOMICS = frozenset(f"atomic_{name}" for name in ("add", "and", "cas", "max", "min", "or", "xchg", "xor"))
# Calls whose result points into the same memory as their arguments, or is no pointer at all.
# fmt: off
_HARMLESS = frozenset({
    "abs", "advance", "arange", "argmax", "argmin", "associative_scan", "assume", "bool", "broadcast", "broadcast_to",
    "cast", "cat", "cdiv", "ceil", "clamp", "const", "constexpr", "cos", "cumprod", "cumsum", "debug_barrier",
    "device_assert", "device_print", "div_rn", "dot", "dot_scaled", "erf", "exp", "exp2", "expand_dims", "fdiv",
    "flip", "float", "floor", "fma", "full", "histogram", "inline_const", "int", "interleave", "isinstance", "item",
    "join", "len", "list", "log", "log2", "make_block_ptr", "make_tensor_descriptor", "max", "max_constancy",
    "max_contiguous", "maximum", "min", "minimum", "multiple_of", "num_programs", "permute", "pow", "print",
    "program_id", "rand", "randint", "randn", "range", "ravel", "reduce", "reduce_or", "reshape", "rsqrt", "sigmoid",
    "sin", "softmax", "sort", "split", "sqrt", "sqrt_rn", "static_assert", "static_print", "static_range", "sum",
    "swizzle2d", "tensor", "to", "trans", "tuple", "umulhi", "view", "where", "xor_sum", "zeros", "zeros_like",
})
# fmt: on

#: The arguments that a value may point into.
Origins = frozenset[str]
_NOWHERE: Origins = frozenset()


@dataclass(frozen=True, slots=True)
class Access:
    """How a kernel accesses one argument."""

    reads: bool
    writes: bool


def is_kernel(fn: object) -> bool:
    """Whether `fn` is a Triton kernel: compiled, interpreted, or either of them under autotuning or heuristics."""
    return type(fn).__module__.startswith("triton.runtime") and hasattr(fn, "arg_names") and hasattr(fn, "run")


def find_accesses(kernel: object) -> dict[str, Access] | str:
    """Return how each accessed argument is accessed, or a sentence that says why this cannot be determined."""
    try:
        function = _Function.of(kernel)
    except (OSError, TypeError, SyntaxError) as error:
        return f"its source cannot be read ({error})"
    found = _Found()
    names = {name: _NOWHERE if name in function.constants else frozenset({name}) for name in function.names}
    try:
        _Walk(function, names, found, ()).run()
    except _MadePointerError:
        return "it makes pointers out of numbers, which mean nothing at another place"
    named = sorted(found.read | found.written, key=function.names.index)
    return {name: Access(name in found.read, name in found.written) for name in named}


class _MadePointerError(Exception):
    """A kernel turns numbers into pointers."""


class _Found:
    """Arguments of the outermost kernel that were seen to be read and written."""

    def __init__(self) -> None:
        self.read: set[str] = set()
        self.written: set[str] = set()

    def add_both(self, origins: Origins) -> None:
        self.read |= origins
        self.written |= origins


@dataclass(frozen=True, slots=True)
class _Function:
    """A function's source, and the objects that its global names refer to."""

    tree: ast.FunctionDef
    scope: Mapping[str, object]

    @staticmethod
    def of(kernel: Any) -> "_Function":
        while not inspect.isfunction(kernel):
            inner = getattr(kernel, "fn", None)
            if inner is None:
                raise TypeError(f"{kernel!r} has no function inside")
            kernel = inner
        tree = ast.parse(textwrap.dedent(inspect.getsource(kernel))).body[0]
        if not isinstance(tree, ast.FunctionDef):
            raise TypeError(f"{kernel.__name__} is not a plain function")
        return _Function(tree, {**kernel.__globals__, **inspect.getclosurevars(kernel).nonlocals})

    @property
    def names(self) -> list[str]:
        given = self.tree.args
        return [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]

    @property
    def constants(self) -> set[str]:
        """Arguments that are compile-time constants, and therefore no pointers."""
        given = self.tree.args
        return {
            each.arg
            for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)
            if each.annotation is not None and ast.unparse(each.annotation).endswith("constexpr")
        }


class _Walk:
    """Walks one function statement by statement and tracks the origins of each name."""

    def __init__(self, function: _Function, names: dict[str, Origins], found: _Found, callers: tuple[str, ...]) -> None:
        self._function = function
        self._names = names
        self._found = found
        self._callers = (*callers, function.tree.name)
        self._returned: Origins = _NOWHERE
        if any(isinstance(each, ast.Attribute) and each.attr == "pointer_type" for each in ast.walk(function.tree)):
            raise _MadePointerError

    def run(self) -> Origins:
        """Walk the function and return what its result may point into."""
        self._block(self._function.tree.body)
        return self._returned

    def _block(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Assign(targets=targets, value=value):
                self._assign_all(targets, value)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._assign_all([target], value)
            case ast.AugAssign(target=target, value=value):
                self._assign(target, self._origins(target) | self._origins(value))
            case ast.For(target=target, iter=iterated, body=body, orelse=orelse):
                self._assign(target, self._origins(iterated))
                self._loop(body)
                self._block(orelse)
            case ast.While(test=test, body=body, orelse=orelse):
                self._origins(test)
                self._loop(body)
                self._block(orelse)
            case ast.If(test=test, body=body, orelse=orelse):
                self._origins(test)
                self._branches(body, orelse)
            case ast.Return(value=ast.expr() as value):
                self._returned |= self._origins(value)
            case ast.Expr(value=value):
                self._origins(value)
            case ast.Pass() | ast.Break() | ast.Continue() | ast.Return() | ast.Assert() | ast.AnnAssign():
                pass
            case _:  # A statement that kernels do not have: treat every name in it as both read and written.
                self._unsure(node)

    def _assign_all(self, targets: list[ast.expr], value: ast.expr) -> None:
        for target in targets:
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
                made = [self._origins(each) for each in value.elts]
                for one, origins in zip(target.elts, made, strict=True):
                    self._assign(one, origins)
            else:
                self._assign(target, self._origins(value))

    def _assign(self, target: ast.expr, origins: Origins) -> None:
        match target:
            case ast.Name(id=name):
                self._names[name] = origins
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                for part in parts:
                    self._assign(part, origins)
            case _:
                self._found.add_both(origins)

    def _loop(self, body: list[ast.stmt]) -> None:
        """Walk a loop body until the origins reach a fixed point: an iteration may start from the previous one's."""
        while True:
            before = dict(self._names)
            self._block(body)
            self._names = _joined(before, self._names)
            if self._names == before:
                return

    def _branches(self, body: list[ast.stmt], orelse: list[ast.stmt]) -> None:
        before = dict(self._names)
        self._block(body)
        after, self._names = self._names, before
        self._block(orelse)
        self._names = _joined(after, self._names)

    def _origins(self, node: ast.AST) -> Origins:
        """Return what an expression may point into, and record the loads and stores inside it."""
        match node:
            case ast.Name(id=name):
                return self._names.get(name, _NOWHERE)
            case ast.Call():
                return self._call(node)
            case ast.Compare() | ast.BoolOp() | ast.BinOp(op=ast.Mult() | ast.Div() | ast.FloorDiv() | ast.Mod()):
                for each in ast.iter_child_nodes(node):
                    self._origins(each)
                return _NOWHERE  # These never yield a pointer.
            case ast.Lambda() | ast.ListComp() | ast.GeneratorExp() | ast.SetComp() | ast.DictComp():
                self._unsure(node)
                return _NOWHERE
            case _:
                parts = [self._origins(each) for each in ast.iter_child_nodes(node)]
                return _NOWHERE.union(*parts)

    def _call(self, node: ast.Call) -> Origins:
        given = [self._origins(each.value if isinstance(each, ast.Starred) else each) for each in node.args]
        named = {each.arg: self._origins(each.value) for each in node.keywords}
        everything = _NOWHERE.union(*given, *named.values())
        callee = self._meaning(node.func) if everything else None  # Without a pointer, nothing is read or written.
        if is_kernel(callee) and not any(isinstance(each, ast.Starred) for each in node.args) and None not in named:
            return self._call_kernel(callee, given, {name: each for name, each in named.items() if name is not None})
        owner, name = _NOWHERE, ""
        if isinstance(node.func, ast.Attribute):
            owner, name = self._origins(node.func.value), node.func.attr
        elif isinstance(node.func, ast.Name):
            name = node.func.id
        return self._call_language(name, owner, given, named)

    def _call_language(
        self, name: str, owner: Origins, given: list[Origins], named: Mapping[str | None, Origins]
    ) -> Origins:
        """Handle a call of Triton's language: `tl.load(pointer, ...)`, or `pointer.load(...)` of a descriptor."""
        through = owner or (given[0] if given else named.get("pointer", named.get("desc", _NOWHERE)))
        if name in _LOADS:
            self._found.read |= through
            return _NOWHERE
        if name in _STORES:
            self._found.written |= through
            # A pointer that is itself stored can be loaded and used anywhere.
            values = given if owner else given[1:2]
            self._found.add_both(_NOWHERE.union(*values, named.get("value", _NOWHERE)) - through)
            return _NOWHERE
        if name in _ATOMICS:
            self._found.add_both(through)
            return _NOWHERE
        everything = owner.union(*given, *named.values())
        if name not in _HARMLESS:
            self._found.add_both(everything)
        return everything

    def _call_kernel(self, callee: object, given: list[Origins], named: dict[str, Origins]) -> Origins:
        everything = _NOWHERE.union(*given, *named.values())
        try:
            function = _Function.of(callee)
        except (OSError, TypeError, SyntaxError):
            function = None
        if function is None or function.tree.name in self._callers:  # No source, or a kernel that calls itself.
            self._found.add_both(everything)
            return everything
        names = dict(zip(function.names, given, strict=False)) | named
        return _Walk(function, names, self._found, self._callers).run()

    def _meaning(self, node: ast.expr) -> object:
        """Return the object that a name or dotted name refers to, if it is defined outside of the function."""
        if isinstance(node, ast.Name):
            return None if node.id in self._names else self._function.scope.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self._meaning(node.value)
            return None if owner is None else getattr(owner, node.attr, None)
        return None

    def _unsure(self, node: ast.AST) -> None:
        for each in ast.walk(node):
            if isinstance(each, ast.Name):
                self._found.add_both(self._names.get(each.id, _NOWHERE))


def _joined(one: dict[str, Origins], other: dict[str, Origins]) -> dict[str, Origins]:
    return {name: one.get(name, _NOWHERE) | other.get(name, _NOWHERE) for name in one.keys() | other.keys()}
