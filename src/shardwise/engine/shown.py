"""What is seen of a module's parameters and buffers between steps: whole and new numbers, or a sentence.

Between two steps a rank may have half of the new weights while the rest is on its way (zero 1 and 2), no memory at all
for them (zero 3, `offload.parameters`), or a part (tp, ep, pp). So from the end of a step to the next call of the
engine the tensors are of a class that is asked before anybody computes with them:

    what a rank has                        a look at it
    all of it, new                         is not asked: the tensor is as it always was
    all of it, some on its way             waits for that, and is as it always was from then on
    a piece, a part, or none               raises, and says how to have all of it

Shapes, types and devices are told without asking. In a step the tensors have their own class: nothing is slower then.

Nobody is asked about a view that a script has taken (`weights = [p.data for p in ...]`) and looks at after later steps.
So where some look into the memory of what is on its way, it is waited for at the end of the step.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
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

#: To type checkers its properties are what they give.
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
#: What tells nothing of a tensor's numbers.
HARMLESS = frozenset(
    [getattr(_KIND, name).__get__ for name in _PROPERTIES if hasattr(_KIND, name)]
    + [_KIND.requires_grad.__set__, _KIND.grad.__set__, *_METHODS]
)
_DATA = _KIND.data.__get__
_GRADIENT = _KIND.grad.__get__
_SET_GRADIENT = _KIND.grad.__set__
_ZEROING = nn.Module.zero_grad.__code__


class View:
    """One tensor of the module. `wait` has all of it come; where that cannot be done alone, `problem` says why.

    `lacks_gradient` says why `grad` is not its gradient. Where a `thread` is given, others are not asked: updates may
    go on in them. It knows nothing of the tensor, nor of what waits: tensors outlive an engine, and their views with
    them.
    """

    def __init__(
        self, name: str, *, problem: str | None, wait: Callable[[], None] | None, lacks_gradient: str | None = None,
        thread: int | None = None,
    ) -> None:  # fmt: skip
        self.name, self.problem, self._thread = name, problem, thread
        self._wait = None if wait is None else WeakMethod(wait)
        self._lacks_gradient = problem if lacks_gradient is None else lacks_gradient
        #: Whether it is to be known what is written to it, also through `data`.
        self.counts_writes = False
        #: Whether it can be looked at when the engine is closed.
        self.ends_with_engine = False
        #: How many looked into its memory before a script did; None if none has.
        self._num_before: int | None = None
        #: Who wants to know of it, when it has come.
        self.on_look: WeakMethod[Callable[[Tensor], None]] | None = None

    @property
    def has_gradient(self) -> bool:
        """Whether `grad` is its gradient."""
        return self._lacks_gradient is None

    def look(self, tensor: Tensor, function: Any) -> None:
        """Somebody is about to compute with it."""
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
        """Wait for what is on its way."""
        wait = None if self._wait is None else self._wait()
        if wait is not None:
            wait()

    def is_held(self, tensor: Tensor) -> bool:
        """Whether somebody has kept a view that was taken between steps. The engine is about to work, not yet at it."""
        if self._num_before is not None and num_uses(tensor) <= self._num_before:
            self._num_before = None
        return self._num_before is not None


#: What is asked before a tensor is looked at. Not an attribute of the tensor: those are saved with it.
_VIEWS = WeakTensorKeyDictionary()
_CLASSES: dict[type, type] = {}


def guarded_class(kind: type) -> type:
    """A class of tensors like this one that asks first."""
    if kind not in _CLASSES:
        body = {"__torch_function__": classmethod(_asked), "__deepcopy__": _copied, "__reduce_ex__": _reduced}
        _CLASSES[kind] = type(kind)(kind.__name__, (kind,), {**body, "__module__": kind.__module__})
    return _CLASSES[kind]


def is_guarded(tensor: Tensor) -> bool:
    """Whether an engine has it, or had it, in a way that not all of it is there."""
    return type(tensor) in _CLASSES.values()


def has_come(tensor: Tensor) -> bool:
    """Whether all of it is here; what is on its way is waited for. Between steps of an engine."""
    if not is_guarded(tensor):
        return True
    view: View = _VIEWS[tensor]
    if view.problem is None:
        view.look(tensor, Tensor.detach)
    return not is_guarded(tensor)


def _asked(
    cls: type, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """Every function of torch that is given such a tensor comes here."""
    del cls, types
    kwargs = kwargs or {}
    if function == _GRADIENT and not _VIEWS[args[0]].has_gradient and _is_zeroing(sys._getframe(1)):
        # `module.zero_grad()`, out of habit: every step begins with none. Or before a backward of the script's own, to
        # which what the engine had left there, a part of its sum, would be added.
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
        function = Tensor.detach  # The same numbers; but what is written there counts as written to the tensor.
    with without_subclasses():
        return function(*args, **kwargs)


def _is_zeroing(frame: FrameType | None) -> bool:
    """Whether torch's `zero_grad` asks; between it and us stands what torch looks through, as `set_default_device`."""
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


#: Modules whose own `load_state_dict` looks first.
_HOOKED: WeakSet[nn.Module] = WeakSet()


def _look_before_loading(module: nn.Module, *_: Any) -> None:
    """A module is to be loaded by its own method, which else tells of each tensor in a sentence of torch's."""
    for each in (*module.parameters(), *module.buffers()):
        if is_guarded(each):
            _look(each, Tensor.copy_)


class Shown:
    """The tensors of a module that are not simply there between steps, each with what is asked."""

    def __init__(self, module: nn.Module, views: Iterable[tuple[Tensor, View]]) -> None:
        self._classes: list[tuple[Tensor, type, type]] = []
        for tensor, view in views:
            own = type(tensor) if type(tensor) not in _CLASSES.values() else type(tensor).__base__
            assert own is not None, "a class that asks stands above another"
            self._classes.append((tensor, own, guarded_class(own)))
            _VIEWS[tensor] = view
        self._depth, self._is_closed = 0, False
        #: Those of which a script holds views.
        self._held: list[View] = []
        #: Tensors that are of another class until the engine gets to work, each with its own.
        self._lent: list[tuple[Tensor, type]] = []
        #: Parameters whose gradients are whole here, and may be looked at.
        self.with_gradients: Sequence[nn.Parameter] = ()
        #: Where gradients of parameters are, and others may be put.
        self.places = GradientPlaces({})
        #: What is called when the engine gets to work, once its tensors are plain.
        self.on_open: Callable[[], None] | None = None
        if self._classes and module not in _HOOKED:
            _HOOKED.add(module)
            module.register_load_state_dict_pre_hook(_look_before_loading)  # type: ignore[no-untyped-call]

    def guard(self) -> None:
        """A step has ended, or an engine was made: whoever looks is asked from now on."""
        for view in self._held:
            view.have_come()
        for tensor, _, guarded in self._classes:
            _be(tensor, guarded)
        with without_subclasses():
            for each in self.with_gradients:
                if type(each.grad) is Tensor:
                    self.lend(each.grad, SpentGradient)

    def lend(self, tensor: Tensor, kind: type) -> None:
        """Have a tensor be of this class until the engine gets to work."""
        self._lent.append((tensor, type(tensor)))
        _be(tensor, kind)

    def _take_back(self) -> None:
        for tensor, own in self._lent:
            _be(tensor, own)
        self._lent.clear()

    @property
    def is_idle(self) -> bool:
        """Whether there is an engine, and it is not at work."""
        return not self._depth and not self._is_closed

    @contextmanager
    def open(self) -> Iterator[None]:
        """The engine is at work: its tensors are plain."""
        self._depth += 1
        if self._depth == 1:
            self._take_back()
            for tensor, own, _ in self._classes:
                tensor.__class__ = own
            self._held = [view for tensor, _, _ in self._classes if (view := _VIEWS[tensor]).is_held(tensor)]
            if self.on_open is not None:
                self.on_open()
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self.guard()

    def close(self) -> None:
        """The engine has ended. What is not whole here never will be, and still says so."""
        self._is_closed = True
        self.places.forget()
        self._take_back()
        ended = {id(tensor) for tensor, _, _ in self._classes if _VIEWS[tensor].ends_with_engine}
        for tensor, own, _ in self._classes:
            if id(tensor) in ended:
                tensor.__class__ = own
        self._classes = [each for each in self._classes if id(each[0]) not in ended]
