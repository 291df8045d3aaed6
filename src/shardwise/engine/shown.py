"""Guard a module's parameters and buffers between steps: an access sees whole, current values, or raises an error.

Between two steps a rank may have half of the new weights while the rest is in transit (zero 1 and 2), no memory for
them (zero 3, `offload.parameters`), or only a part (tp, ep, pp). So from the end of a step to the next call of the
engine, these tensors have a guarded subclass, which intercepts every operation on them:

    what a rank has                        an access to it
    all of it, current                     is not guarded: the tensor keeps its class
    all of it, some in transit             waits for the rest, and the tensor has its own class from then on
    a piece, a part, or none               raises, with a remedy that gives the whole tensor

Shapes, types and devices are not guarded. During a step the tensors have their own class, so steps are not slower.

A view that a script keeps (`weights = [p.data for p in ...]`) and reads after later steps cannot be guarded. So if a
script holds views into memory that is in transit, the end of the step waits for it.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from threading import get_ident
from types import FrameType
from typing import Any
from weakref import WeakMethod, WeakSet

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from shardwise.engine.spent_gradients import GradientPlaces, SpentGradient, check_put
from shardwise.errors import ShardwiseError
from shardwise.torch_private import num_uses, pytree, without_subclasses

#: `Any`, because type checkers take the class's properties for their values.
_KIND: Any = Tensor
_PROPERTIES = (
    "shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "is_meta", "is_cuda", "is_cpu", "is_sparse",
    "is_quantized", "ndim", "nbytes", "itemsize", "grad_fn", "output_nr", "names",
)  # fmt: skip
_METHODS = (
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.stride, Tensor.is_contiguous,
    Tensor.is_floating_point, Tensor.is_complex, Tensor.get_device, Tensor.requires_grad_, Tensor.__hash__,
    Tensor.data_ptr, Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.__len__,
)  # fmt: skip
#: Functions that neither read nor write a tensor's values.
HARMLESS = frozenset(
    [getattr(_KIND, name).__get__ for name in _PROPERTIES if hasattr(_KIND, name)]
    + [_KIND.requires_grad.__set__, _KIND.grad.__set__, *_METHODS]
)
_DATA = _KIND.data.__get__
_GRADIENT = _KIND.grad.__get__
_SET_GRADIENT = _KIND.grad.__set__
_ZEROING = nn.Module.zero_grad.__code__


class View:
    """The guard of one tensor of the module. `wait` completes it; if one rank cannot do that alone, `problem` says why.

    `lacks_gradient` says why `grad` is not its gradient. If a `thread` is given, only that thread is guarded: updates
    may run in others. A view has no reference to its tensor, and only a weak one to `wait`: tensors outlive an engine,
    and their views with them.
    """

    def __init__(
        self, name: str, *, problem: str | None, wait: Callable[[], None] | None, lacks_gradient: str | None = None,
        thread: int | None = None,
    ) -> None:  # fmt: skip
        self.name, self.problem, self._thread = name, problem, thread
        self._wait = None if wait is None else WeakMethod(wait)
        self._lacks_gradient = problem if lacks_gradient is None else lacks_gradient
        #: Whether writes to the tensor must be detected, also those through `data`.
        self.counts_writes = False
        #: Whether the guard ends when the engine is closed.
        self.ends_with_engine = False
        #: The number of references to its memory before a script accessed it; None if no script has.
        self._num_before: int | None = None
        #: Called with the tensor on an access, once it is complete.
        self.on_look: WeakMethod[Callable[[Tensor], None]] | None = None

    @property
    def has_gradient(self) -> bool:
        """Whether `grad` is the gradient of the tensor."""
        return self._lacks_gradient is None

    def look(self, tensor: Tensor, function: Any) -> None:
        """Handle an access: wait for the tensor, or raise. Restore its class unless writes are to be detected."""
        if self._thread is not None and self._thread != get_ident():
            return
        if function == _GRADIENT:
            if self._lacks_gradient is not None:
                raise ShardwiseError(
                    f"the gradient of {self.name} is not here: {self._lacks_gradient}",
                    remedy=f"engine.gradients()[{self.name!r}] on every rank; nothing has to be set to zero between"
                    " steps",
                )
            return
        if self.problem is not None:
            raise ShardwiseError(
                f"{self.name} cannot be read or written on this rank: {self.problem}",
                remedy="engine.state_dict() on every rank, which has all of it; engine.load_state_dict(state) to write"
                " it",
            )
        self.have_come()
        if self._wait is not None and self._num_before is None:
            with without_subclasses():
                self._num_before = num_uses(tensor)
        told = None if self.on_look is None else self.on_look()
        if told is not None:
            with without_subclasses():
                told(tensor)
        if not self.counts_writes:
            _be(tensor, type(tensor).__base__)

    def have_come(self) -> None:
        """Wait for the values in transit."""
        wait = None if self._wait is None else self._wait()
        if wait is not None:
            wait()

    def is_held(self, tensor: Tensor) -> bool:
        """Whether a script still holds a view taken between steps. Called just before the engine starts to work."""
        if self._num_before is not None and num_uses(tensor) <= self._num_before:
            self._num_before = None
        return self._num_before is not None


#: The guards of tensors. Not an attribute of the tensor: attributes are saved with it.
_VIEWS = WeakTensorKeyDictionary()
_CLASSES: dict[type, type] = {}


def guarded_class(kind: type) -> type:
    """Return the guarded subclass of a tensor class."""
    if kind not in _CLASSES:
        body = {"__torch_function__": classmethod(_asked), "__deepcopy__": _copied, "__reduce_ex__": _reduced}
        _CLASSES[kind] = type(kind)(kind.__name__, (kind,), {**body, "__module__": kind.__module__})
    return _CLASSES[kind]


def is_guarded(tensor: Tensor) -> bool:
    """Whether a tensor is guarded: an engine holds it, or held it, incompletely."""
    return type(tensor) in _CLASSES.values()


def has_come(tensor: Tensor) -> bool:
    """Wait for values in transit, and return whether the whole tensor is here. Call it between steps of an engine."""
    if not is_guarded(tensor):
        return True
    view: View = _VIEWS[tensor]
    if view.problem is None:
        view.look(tensor, Tensor.detach)
    return not is_guarded(tensor)


def _asked(
    cls: type, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """Intercept a torch function with a guarded tensor among its arguments (`__torch_function__`)."""
    del cls, types
    kwargs = kwargs or {}
    if function == _GRADIENT and not _VIEWS[args[0]].has_gradient and _is_zeroing(sys._getframe(1)):
        # A habitual `module.zero_grad()`: every step begins without gradients anyway. Or one before a backward of the
        # script's own: that would accumulate into the partial sum that the engine left here.
        with without_subclasses():
            args[0].grad = None
        return None
    if function == _SET_GRADIENT and isinstance(args[1], Tensor) and not _VIEWS[args[0]].has_gradient:
        check_put(_VIEWS[args[0]].name, args[1])
    if function not in HARMLESS:
        for each in pytree.tree_leaves((args, kwargs)):
            if isinstance(each, Tensor) and is_guarded(each):
                _look(each, function)
    if function == _DATA and _VIEWS[args[0]].counts_writes:
        function = Tensor.detach  # The same memory, but writes to it bump the tensor's version.
    with without_subclasses():
        return function(*args, **kwargs)


def _is_zeroing(frame: FrameType | None) -> bool:
    """Whether torch's `zero_grad` is calling; frames of torch may be in between, as with `set_default_device`."""
    while frame is not None and frame.f_code is not _ZEROING:
        frame = frame.f_back if frame.f_globals.get("__name__", "").startswith("torch.") else None
    return frame is not None


def _be(tensor: Any, kind: type | None) -> None:
    tensor.__class__ = kind


def _look(tensor: Tensor, function: Any) -> None:
    view: View = _VIEWS[tensor]
    view.look(tensor, function)


def _copied(tensor: Tensor, memo: dict[int, Any]) -> Any:
    with _as_ever(tensor):
        return deepcopy(tensor, memo)


def _reduced(tensor: Any, protocol: Any) -> Any:
    with _as_ever(tensor):
        return tensor.__reduce_ex__(protocol)


@contextmanager
def _as_ever(tensor: Tensor) -> Iterator[None]:
    _look(tensor, deepcopy)
    guarded = type(tensor)
    if guarded in _CLASSES.values():
        _be(tensor, guarded.__base__)
    try:
        yield
    finally:
        _be(tensor, guarded)


#: Modules whose own `load_state_dict` checks the guards first.
_HOOKED: WeakSet[nn.Module] = WeakSet()


def _look_before_loading(module: nn.Module, *_: Any) -> None:
    """Check the guards before a module's own `load_state_dict`, which would wrap our error in torch's, per tensor."""
    for each in (*module.parameters(), *module.buffers()):
        if is_guarded(each):
            _look(each, Tensor.copy_)


class Shown:
    """The tensors of a module that may be incomplete between steps, with their guards."""

    def __init__(self, module: nn.Module, views: Iterable[tuple[Tensor, View]]) -> None:
        self._classes: list[tuple[Tensor, type, type]] = []
        for tensor, view in views:
            own = type(tensor) if type(tensor) not in _CLASSES.values() else type(tensor).__base__
            assert own is not None, "a class that asks stands above another"
            self._classes.append((tensor, own, guarded_class(own)))
            _VIEWS[tensor] = view
        self._depth, self._is_closed = 0, False
        #: Guards of tensors that a script holds views of.
        self._held: list[View] = []
        #: Tensors with a temporary class until the engine starts to work, each with its own class.
        self._lent: list[tuple[Tensor, type]] = []
        #: Parameters whose gradients are whole here, and may be read.
        self.with_gradients: Sequence[nn.Parameter] = ()
        #: Detects gradients that a script assigns between steps.
        self.places = GradientPlaces({})
        #: The context of evaluations of the module.
        self.in_evaluation_mode: Callable[[], AbstractContextManager[None]] = nullcontext
        #: Called when the engine starts to work, once its tensors have their own classes.
        self.on_open: Callable[[], None] | None = None
        for each in module.modules() if self._classes else ():
            if each not in _HOOKED:  # A script may load one block alone.
                _HOOKED.add(each)
                each.register_load_state_dict_pre_hook(_look_before_loading)  # type: ignore[no-untyped-call]

    def guard(self) -> None:
        """Guard the tensors from now on: a step has ended, or an engine was made."""
        for view in self._held:
            view.have_come()
        for tensor, _, guarded in self._classes:
            _be(tensor, guarded)
        with without_subclasses():
            for each in self.with_gradients:
                if type(each.grad) is Tensor:
                    self.lend(each.grad, SpentGradient)

    def lend(self, tensor: Tensor, kind: type) -> None:
        """Give a tensor this class until the engine starts to work."""
        self._lent.append((tensor, type(tensor)))
        _be(tensor, kind)

    def _take_back(self) -> None:
        for tensor, own in self._lent:
            _be(tensor, own)
        self._lent.clear()

    @property
    def is_idle(self) -> bool:
        """Whether the engine is open and not at work."""
        return not self._depth and not self._is_closed

    @contextmanager
    def open(self) -> Iterator[None]:
        """Give the tensors their own classes while the engine works."""
        self._depth += 1
        if self._depth == 1:
            self._begin()
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self.guard()

    def _begin(self) -> None:
        self._take_back()
        for tensor, own, _ in self._classes:
            tensor.__class__ = own
        self._held = [view for tensor, _, _ in self._classes if (view := _VIEWS[tensor]).is_held(tensor)]
        if self.on_open is not None:
            self.on_open()

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """Guard the tensors while the engine works, as code of the user's runs that is no forward."""
        self.guard()
        try:
            yield
        finally:
            self._begin()

    def close(self) -> None:
        """Close the guards with the engine. A tensor that is not whole here never will be, and stays guarded."""
        self._is_closed = True
        self.places.forget()
        self._take_back()
        ended = {id(tensor) for tensor, _, _ in self._classes if _VIEWS[tensor].ends_with_engine}
        for tensor, own, _ in self._classes:
            if id(tensor) in ended:
                tensor.__class__ = own
        self._classes = [each for each in self._classes if id(each[0]) not in ended]
