"""Every private name of torch that Shardwise stands on, and nothing else.

Private names may go with any release. Here each has a line that says what it is for and what the public way would be;
`tests/promises/test_torch_private.py` finds those that are used elsewhere. All of them were tried on torch 2.11 (on an
H200) and on torch 2.13 (on the CPU): `docs/hooks.md` says which rooms reach into a user's module with them.

Not here, because they cannot be: methods of torch that our classes override (`nn.Module._apply` in `nets/rotary.py`,
`nets/router.py` and `placing/placed.py`), and names of operators in tables of strings (`"_softmax"`), which are data.

torch is imported when this is: rooms without torch must not import it.
"""

import inspect
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import CodeType, FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import Backend as GroupBackend
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch._guards import CompileContext, TracingContext, compile_context, detect_fake_mode, tracing
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.autograd import graph as autograd_graph
from torch.autograd.graph import Node
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormModule
from torch.nn.modules.batchnorm import _NormBase as RunningNormModule
from torch.nn.modules.dropout import _DropoutNd as DropoutModule
from torch.optim import Optimizer, lr_scheduler
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "BatchNormModule",
    "CompileContext",
    "DataDependentOutputException",
    "DropoutModule",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "GroupBackend",
    "OpOverload",
    "PrefixStore",
    "RunningNormModule",
    "Store",
    "TCPStore",
    "TorchDispatchMode",
    "TracingContext",
    "compile_context",
    "detect_fake_mode",
    "pytree",
    "tracing",
]

# The imports above, one by one:
# pytree                     Arguments and results of modules as flat lists of leaves. A public `torch.utils.pytree` is
#                            announced; neither 2.11 nor 2.13 has it.
# TorchDispatchMode          To see every operator that runs. Documented ("Extending PyTorch"), yet in a private module.
# FakeTensor, FakeTensorMode Tensors with shapes and no memory, and what they raise when asked for numbers. The meta
#                            device is public, and does not say where a tensor would be.
# PrefixStore, Store,        What ranks tell each other by keys. At run time `torch.distributed` has them publicly; its
# TCPStore                   types do not say so.
# GroupBackend               What a group sends with (`cpu_backend`), to see its sends and receives. No public name.
# OpOverload                 The type of an operator in a graph. No public name.
# CompileContext ... tracing What the compiler knows while it compiles a unit, to compile halves of it later.
# BatchNormModule,           What all batch norms, all norms with running statistics and all dropouts have in common.
# RunningNormModule,         The public way is a list of classes, and misses those of a user.
# DropoutModule

aten = torch.ops.aten

# ---------------------------------------------------------------------------------------------------------------------
# Operators. ATen's names with an underscore are what torch's public functions end in; a dispatch mode sees only these.

#: `torch.nn.functional.scaled_dot_product_attention` ends in one of these. They are called where the log-sum-exp of the
#: scores is wanted too, to put parts of a sequence together; the public function returns none.
FLASH_ON_CPU = aten._scaled_dot_product_flash_attention_for_cpu
FLASH_ON_CPU_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward
FLASH = aten._scaled_dot_product_flash_attention
FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_backward
EFFICIENT_ATTENTION = aten._scaled_dot_product_efficient_attention
EFFICIENT_ATTENTION_BACKWARD = aten._scaled_dot_product_efficient_attention_backward
CUDNN_ATTENTION = aten._scaled_dot_product_cudnn_attention
CUDNN_ATTENTION_BACKWARD = aten._scaled_dot_product_cudnn_attention_backward
#: `torch.nn.functional.grouped_mm`.
GROUPED_MM = aten._grouped_mm
#: `Tensor.to` of another type or device.
TO_COPY = aten._to_copy
#: `Tensor.item`.
LOCAL_SCALAR = aten._local_scalar_dense
#: Asked by checks of values, as in `torch.distributions`.
IS_ALL_TRUE = torch.ops.aten._is_all_true
#: `torch.unique` without a dim.
UNIQUE = aten._unique2
#: A softmax that gives zeros, not NaN, for a row in which everything is masked. No public way.
SAFE_SOFTMAX = aten._safe_softmax

#: Whole attention layers in one call, which `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` take outside of
#: training. A function mode is given these objects.
FUSED_ATTENTION_CALLS = (torch._native_multi_head_attention, torch._transformer_encoder_layer_fwd)


def scaled_mm(
    left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], dtype: torch.dtype, bias: Tensor | None, *, fast: bool,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Multiply rows of one by rows of the other, both in 8 bits with their scales: [] or [rows, 1]. `out` is the
    target.

    `torch.nn.functional.scaled_mm` is public from 2.10 on, and 2.11's compiler does not know it yet. Products with a
    scale for each row come in bfloat16 alone, and a bias is added in no more than 16 bits.
    """
    made_in = torch.bfloat16 if left[1].dim() else dtype
    inside = bias is not None and made_in is not torch.float32
    how: dict[str, Any] = {"out_dtype": made_in, "use_fast_accum": fast}
    if inside and bias is not None:
        how["bias"] = bias.to(made_in)
    if out is not None and out.dtype is made_in:
        how["out"] = out
    made: Tensor = torch._scaled_mm(left[0], right[0].t(), left[1], right[1].t(), **how)
    if bias is not None and not inside:
        made = made + bias
    if out is None:
        return made.to(dtype)
    return made if made is out else out.copy_(made)


def schema_of(operator: Any) -> Any:
    """Return the names, defaults and mutations of an operator's arguments. No public way."""
    return operator._schema


def is_mutable(operator: Any) -> bool:
    """Whether an operator writes into one of its arguments; no for what has no schema. No public way."""
    return bool(getattr(getattr(operator, "_schema", None), "is_mutable", False))


def foreach_scale(tensors: list[Tensor], factor: float) -> None:
    """Multiply many tensors in place, in few launches. What `torch.nn.utils` clips with; no public way."""
    torch._foreach_mul_(tensors, factor)


def foreach_divide(tensors: list[Tensor], divisor: Tensor) -> None:
    """Divide many tensors in place by a number of the device's. No public way."""
    torch._foreach_div_(tensors, divisor)


def foreach_norm(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the 2-norm of each tensor, in one kernel. `torch.linalg.vector_norm` is public: one kernel for each."""
    return list(torch._foreach_norm(tensors, 2, dtype=dtype))  # type: ignore[call-arg, unused-ignore]


def can_step_divided(optimizer: Optimizer) -> bool:
    """Whether it can divide gradients, and leave a step out, by numbers of the device's. `GradScaler` asks the same."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def fuse(optimizer: Optimizer) -> None:
    """Have an optimizer of torch's fused whose parameters are to be on a GPU and are not there yet. The public way is
    `fused=True` when it is made, which refuses parameters on the meta device."""
    for group in optimizer.param_groups:
        group["fused"] = True
    optimizer.defaults["fused"] = True
    setattr(optimizer, "_step_supports_amp_scaling", True)  # noqa: B010 - torch's types do not know it


def step_divided(optimizer: Optimizer, divisor: Tensor, skips: Tensor) -> None:
    """A step of a fused optimizer with its gradients over `divisor`, or none where `skips` is 1.

    The public way is a `GradScaler`, which has a scale of its own and no word for clipping.
    """
    setattr(optimizer, "grad_scale", divisor)  # noqa: B010 - torch's types do not know them
    setattr(optimizer, "found_inf", skips)  # noqa: B010
    try:
        optimizer.step()
    finally:
        delattr(optimizer, "grad_scale")
        delattr(optimizer, "found_inf")


#: What torch's fused Adam and AdamW call for their weights on one device. There is no public way to step with another
#: kernel but a whole optimizer, which users would have to choose. Tried on 2.11 and 2.13.
FUSED_ADAM, FUSED_ADAMW = torch._fused_adam_, torch._fused_adamw_


class _FusedSteps:
    """What this thread's fused optimizers call. Torch's own functions are back when no thread has others."""

    def __init__(self) -> None:
        self._of_thread, self._lock, self._num_entered = threading.local(), threading.Lock(), 0

    @contextmanager
    def replaced(self, functions: tuple[Callable[..., None], Callable[..., None]]) -> Iterator[None]:
        before = self._now()
        self._of_thread.functions = functions
        self._enter(1)
        try:
            yield
        finally:
            self._of_thread.functions = before
            self._enter(-1)

    def _enter(self, by: int) -> None:
        with self._lock:
            self._num_entered += by
            has_any = self._num_entered > 0
            setattr(torch, "_fused_adam_", self._adam if has_any else FUSED_ADAM)  # noqa: B010 - an operator to types
            setattr(torch, "_fused_adamw_", self._adamw if has_any else FUSED_ADAMW)  # noqa: B010

    def _now(self) -> tuple[Callable[..., None], Callable[..., None]]:
        return getattr(self._of_thread, "functions", (FUSED_ADAM, FUSED_ADAMW))

    def _adam(self, *given: Any, **settings: Any) -> None:
        self._now()[0](*given, **settings)

    def _adamw(self, *given: Any, **settings: Any) -> None:
        self._now()[1](*given, **settings)


_FUSED_STEPS = _FusedSteps()


def fused_adam_by(adam: Callable[..., None], adamw: Callable[..., None]) -> AbstractContextManager[None]:
    """Return a context in which torch's fused optimizers call these functions, with the same arguments: in this thread.
    Others may step meanwhile, with torch's functions or in contexts of their own."""
    return _FUSED_STEPS.replaced((adam, adamw))


#: The operator by which Python reads a number of a tensor: `.item()`, `float(x)`, `if x > 0:`.
READ_NUMBER = torch.ops.aten._local_scalar_dense.default


class EagerDispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that no compiled code runs under. Else torch puts a call of its compiler around operators."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def without_torch_function() -> AbstractContextManager[None]:
    """No function mode and no subclass of tensors sees what is called inside. Documented, without a public name."""
    return torch._C.DisableTorchFunction()


def without_subclasses() -> AbstractContextManager[None]:
    """Subclasses of tensors are plain tensors inside. Documented, without a public name."""
    return torch._C.DisableTorchFunctionSubclass()


# ---------------------------------------------------------------------------------------------------------------------
# Modules.


def parameter_slots(module: nn.Module) -> dict[str, Any]:
    """Return a module's dictionary of its own parameters. `named_parameters` is public and cannot be written."""
    return cast(dict[str, Any], module._parameters)


def buffer_slots(module: nn.Module) -> dict[str, Any]:
    """Return a module's dictionary of its own buffers. `named_buffers` is public and cannot be written."""
    return cast(dict[str, Any], module._buffers)


def submodules(module: nn.Module) -> dict[str, Any]:
    """Return a module's dictionary of its submodules. `named_children` leaves some out."""
    return module._modules


def share_slots(module: nn.Module, other: nn.Module) -> None:
    """Let a module hold what another holds, under the same names, with nothing between them. No public way."""
    module._parameters, module._buffers, module._modules = other._parameters, other._buffers, other._modules


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """Whether a buffer is saved in `state_dict`, which is the public way and copies."""
    return buffer not in module._non_persistent_buffers_set


def forward_hooks(module: nn.Module) -> Iterator[tuple[Callable[..., Any], bool]]:
    """Yield a module's forward hooks, and whether each takes keyword arguments. The public way is only to call it."""
    for key, hook in module._forward_hooks.items():
        yield hook, key in module._forward_hooks_with_kwargs


def has_hooks_of_places(module: nn.Module) -> bool:
    """Whether a module has hooks that are given what it was called with by place, and no keywords. No public way."""
    before = module._forward_pre_hooks.keys() - module._forward_pre_hooks_with_kwargs.keys()
    return bool(before or module._forward_hooks.keys() - module._forward_hooks_with_kwargs.keys())


def hooks_of(module: nn.Module) -> list[str]:
    """Return the kinds of hooks that a module has itself. The public way is only to call it."""
    kinds = {
        "forward": module._forward_hooks,
        "forward pre": module._forward_pre_hooks,
        "backward": module._backward_hooks,
        "backward pre": module._backward_pre_hooks,
    }
    return [kind for kind, hooks in kinds.items() if hooks]


def every_hook_of(module: nn.Module) -> Iterator[Callable[..., Any]]:
    """Yield the hooks of a module's calls and of their backwards. The public way is only to call it."""
    yield from module._forward_hooks.values()
    yield from module._forward_pre_hooks.values()
    yield from module._backward_hooks.values()
    yield from module._backward_pre_hooks.values()


def num_hooks(modules: Iterable[nn.Module]) -> int:
    """Return how many hooks modules have, with those of all modules, which may see each of their calls. No public
    way."""
    from torch.nn.modules import module as home

    every = len(home._global_forward_hooks) + len(home._global_forward_pre_hooks) + len(home._global_backward_hooks)
    return every + sum(
        len(each._forward_hooks) + len(each._forward_pre_hooks) + len(each._backward_hooks)
        + len(each._backward_pre_hooks)
        for each in modules
    )  # fmt: skip


@contextmanager
def uncached_parametrizations() -> Iterator[None]:
    """Compute parametrized weights in each forward, also where a script has put `parametrize.cached()` around: torch
    keeps the graph of the first backward for all. There is no public way to end a cache within its context."""
    home = sys.modules.get("torch.nn.utils.parametrize")
    before = getattr(home, "_cache_enabled", 0)
    if not before:
        yield
        return
    vars(home)["_cache_enabled"] = 0
    try:
        yield
    finally:
        vars(home)["_cache_enabled"] = before


def get_compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """Return the function that replaces a module's call, hooks included. `Module.compile` is the public way to set
    it."""
    return module._compiled_call_impl


def set_compiled_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Set what a module runs in place of its plain call. Copies and pickles leave it out, mostly."""
    module._compiled_call_impl = call


def plain_call(module: nn.Module) -> Callable[..., Any]:
    """Return a module's call with its hooks, even if it was replaced. `Module.__call__` is public and goes there
    too."""
    return module._call_impl


# ---------------------------------------------------------------------------------------------------------------------
# Tensors.


def storage_id(storage: torch.UntypedStorage) -> int:
    """Return an id of a storage, unique while it lives. `data_ptr` is public, and 0 for all on the meta device."""
    return int(storage._cdata)


def num_uses(tensor: Tensor) -> int:
    """Return how many tensors share a tensor's storage, and one more. No public way."""
    found: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return found


def is_wrapped(tensor: Tensor) -> bool:
    """Whether `torch.func` (`grad`, `vmap`) stands around it: then it has no memory of its own. No public way."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was written in place: autograd checks saved tensors by it. No public way."""
    return tensor._version


def is_view(tensor: Tensor) -> bool:
    """Whether a tensor is a view of another, with which it counts writes. No public way."""
    return tensor._is_view()


def before_gradient(tensor: Tensor, call: Callable[[], None]) -> None:
    """Have a function called when a backward comes from a tensor to what has made it.

    A view that is written in place later (a block that begins with `nn.ReLU(inplace=True)`) is made by something else
    from then on, and its hooks are not called: autograd goes from there to what it is a view of. No public way.
    """
    tensor.register_hook(lambda _: call())  # type: ignore[no-untyped-call]
    base = tensor._base
    if base is not None and base.grad_fn is not None:
        base.grad_fn.register_prehook(lambda _: call())


def gradient_hooks(tensor: Tensor) -> Mapping[Any, Callable[[Tensor], Tensor | None]]:
    """Hooks of `register_hook`, to call where a gradient does not come from autograd. No public way."""
    return tensor._backward_hooks or {}


def remove_hooks_but(tensor: Tensor, kept: Collection[Any]) -> None:
    """Remove hooks of `register_hook` other than these, by their keys. The public way is that of who registered one."""
    hooks = tensor._backward_hooks or {}
    for key in [key for key in hooks if key not in kept]:
        del hooks[key]


def accumulated_hooks(tensor: Tensor) -> Mapping[Any, Callable[[Tensor], None]]:
    """Hooks of `register_post_accumulate_grad_hook`, to call where a gradient does not come from autograd."""
    return getattr(tensor, "_post_accumulate_grad_hooks", None) or {}


def step_hooks(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """Hooks of an optimizer's steps, and of those of all optimizers. They can be registered and not listed."""
    from torch.optim import optimizer as home

    # One that is wrapped around another may never have called its class's `__init__`.
    own = [getattr(optimizer, f"_optimizer_step_{when}_hooks", {}) for when in ("pre", "post")]
    every = (home._global_optimizer_pre_hooks, home._global_optimizer_post_hooks)
    return [hook for hooks in (*own, *every) for hook in hooks.values()]


#: What engines put in front of an optimizer's step: it changes nothing of what a step does.
step_wrappers: set[CodeType] = set()


def step_is_replaced(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer.step` is another than its class has (`optimizer.step = ...`), behind what schedulers and
    engines put in front. Schedulers leave no mark that a wrapper of somebody else's would not copy, so they are known
    by the file that they are in."""
    step: Any = vars(optimizer).get("step")
    while step is not None:
        function = getattr(step, "__func__", step)
        if function is type(optimizer).step:
            return False
        code = getattr(function, "__code__", None)
        if code is None or not (code in step_wrappers or code.co_filename == lr_scheduler.__file__):
            return True
        step = function.__wrapped__
    return False


def drop_step_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Let nobody look at the steps of an optimizer."""
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = OrderedDict(), OrderedDict()


# ---------------------------------------------------------------------------------------------------------------------
# Autograd.

#: The engine without what `torch.autograd.backward` and `grad` check first; None where it is missing: then these do
#: the same more slowly.
engine_run_backward: Callable[..., Any] | None = getattr(autograd_graph, "_engine_run_backward", None)
#: The same without handing this thread's context to those of devices, which a CPU has none of.
run_in_thread: Callable[..., Any] | None = getattr(
    getattr(torch.autograd.Variable, "_execution_engine", None), "run_backward", None
)
#: The type of nodes written in Python. `torch.autograd.function.BackwardCFunction` leaves out compiled ones.
PythonNode: Any = torch._C._FunctionBase


def function_of(node: Node) -> Any:
    """Return the `autograd.Function` of a node written in Python; None for other nodes. No public way."""
    return getattr(type(node), "_forward_cls", None)


def num_outputs(node: Node) -> int:
    """Return how many outputs the forward of a node had, and so how many gradients arrive there. No public way."""
    return len(node._input_metadata)


def current_node() -> Any:
    """Return the node whose backward this thread is in. No public way: only one's own nodes are passed in."""
    return torch._C._current_autograd_node()


def is_wanted(node: Node) -> bool:
    """Whether the pass of autograd that this thread is in goes on to a node. No public way."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # Raised for a leaf whose gradient was requested by name.
        return True


def is_input_wanted(ctx: Any, number: int) -> bool:
    """Whether this run of backward goes on to an input of a function: halves of a backward ask for some only.

    `ctx.are_tensors` says of each input, up to this one, whether it was a tensor: the engine knows no others.
    """
    if not ctx.needs_input_grad[number]:
        return False
    return is_wanted(ctx.next_functions[sum(ctx.are_tensors[:number])][0])


def checkpoint_here() -> Any:
    """Return the hook of the `torch.utils.checkpoint` that keeps, or recomputes, what is computed now; None outside
    one. No public way: it is recognised by the hooks for saved tensors."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks[0] if hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint" else None


def checkpoint_frame(hook: Any) -> tuple[Any, bool]:
    """Return the checkpoint of a hook from `checkpoint_here`, one object for its first run and its second, and whether
    this is the second; None if torch does not say. No public way: it is in the hook's closure."""
    plain = inspect.unwrap(hook)
    held = dict(zip(plain.__code__.co_freevars, plain.__closure__ or (), strict=True))
    if "frame" in held:
        return held["frame"].cell_contents, False
    return (held["target_frame_ref"].cell_contents(), True) if "target_frame_ref" in held else (None, False)


def is_in_checkpoint() -> bool:
    """Whether what is computed now is inside a `torch.utils.checkpoint`."""
    return checkpoint_here() is not None


def backward_id() -> int:
    """Return the number of the backward that this thread is in, -1 for none. No public way."""
    return int(torch._C._current_graph_task_id())


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call a function when the backward that this thread is in is over. Torch's own FSDP does the same."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


def saved_tensor_hooks() -> object:
    """Return the innermost `saved_tensors_hooks` of this thread, to see if it is still the same. No public way."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


# ---------------------------------------------------------------------------------------------------------------------
# CUDA and process groups.

#: The current stream of a GPU as a number; -1 without CUDA. `torch.cuda.current_stream` is public, and makes an object
#: at every call: this is asked at every launch of a kernel.
raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (lambda _: -1)
#: The current GPU. `torch.cuda.current_device` is public, and asks first whether CUDA was begun.
current_gpu: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", None) or (lambda: -1)


def cpu_backend(group: torch.distributed.ProcessGroup) -> Any:
    """Return the backend that sends a group's CPU tensors. The public group does too, after torch's dispatcher."""
    return group._get_backend(torch.device("cpu"))


#: How `torch.distributed` asks a group for what it is to do, to see all of it: by the name of the method, what we call
#: it. Some names are of torch 2.11 and some of 2.13. The public functions above them do not see what is asked directly.
GROUP_METHODS: Mapping[str, str] = {
    "allreduce": "all_reduce", "broadcast": "broadcast", "reduce": "reduce", "barrier": "barrier",
    "allgather": "all_gather_list", "_allgather_base": "all_gather", "all_gather_single": "all_gather",
    "_reduce_scatter_base": "reduce_scatter", "reduce_scatter_single": "reduce_scatter",
    "alltoall_base": "all_to_all", "all_to_all_single": "all_to_all", "gather": "gather", "scatter": "scatter",
}  # fmt: skip
GET_BACKEND = "_get_backend"  # How a group is asked for the backend of a device.


def default_backend(device: torch.device) -> Any:
    """Return the backend that sends a device's tensors in the default group. `get_backend_config` is public: text."""
    return torch.distributed.distributed_c10d._get_default_group()._get_backend(device)


class DeviceProfiler:
    """Torch's profiler (Kineto over CUPTI) of the device alone. `torch.profiler.profile` is public, and its `events()`
    leave out streams and what launched what."""

    def __init__(self) -> None:
        # Launches are attributed by CUDA calls: torch's own numbers in addition cost a fifth of the time of a look
        # (H200).
        config = torch._C._profiler._ExperimentalConfig(disable_external_correlation=True)
        self.profile: Any = torch.autograd.profiler.profile(
            use_device="cuda", use_kineto=True, use_cpu=False, experimental_config=config
        )

    def start(self) -> None:
        self.profile.__enter__()

    def stop(self) -> list[Any]:
        """Return what Kineto has recorded, when the device is done."""
        self.profile.__exit__(None, None, None)
        return list(self.profile.kineto_results.events())


def find_gpu_backend(group: torch.distributed.ProcessGroup) -> Any | None:
    """What a group sends tensors of GPUs with, if that is NCCL; None if not. `ProcessGroup.abort` is public, and raises
    for a group that has gloo too."""
    try:
        backend = group._get_backend(torch.device("cuda"))
    except RuntimeError:  # It has no backend for them, or has been destroyed.
        return None
    return backend if backend.name() == "nccl" else None


def default_store() -> Store:
    """Return the store that the default group was made with. Public only for its creator."""
    return torch.distributed.distributed_c10d._get_default_store()


# ---------------------------------------------------------------------------------------------------------------------
# The compiler. It takes seconds to import, so this happens inside.


def has_cpp_compiler() -> bool:
    """Whether inductor finds a C++ compiler. The public way is to compile something and see."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return True


def has_triton() -> bool:
    """Whether inductor finds a Triton that serves this GPU. The public way is to compile something and see."""
    from torch.utils._triton import has_triton

    return bool(has_triton())


def is_watched() -> bool:
    """Whether a dispatch mode sees the operators that run now. No public way."""
    return bool(torch._C._len_torch_dispatch_stack())


def aot_eager(graph: Any, inputs: list[Any], compile_backward: Callable[..., Any]) -> Any:
    """Return a backend of `torch.compile` that runs graphs unchanged, with our own compiler for the backward.

    Public are backends by name, and they compile both. `compile_backward` is called with what compiles a graph.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return aot_autograd(
        fw_compiler=boxed_nop,
        bw_compiler=lambda part, given: compile_backward(boxed_nop, part, given),
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )(graph, inputs)


def inductor(graph: Any, inputs: list[Any], compile_part: Callable[..., Any]) -> Any:
    """Inductor as a backend of `torch.compile`, with a function of ours between it and each graph.

    Public are backends by name. `compile_part` is called with what compiles a graph, the graph, inputs and options.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def inner(part: Any, given: list[Any], **options: Any) -> Any:
        return compile_part(compile_fx_inner, part, given, **options)

    with functorch_settings(enable_autograd_cache=False):
        return compile_fx(graph, inputs, inner_compile=inner)


def donate_nothing(context: TracingContext | None) -> None:
    """Let no input of a backward that is being compiled be overwritten by it: it is run in two passes.

    The setting `donated_buffer` does it for the whole process, and would have to stay: it is read at every backward.
    """
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


def takes_a_list(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Tell AOTAutograd that a compiled graph takes its inputs in one list, which it may empty. No public way."""
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def functorch_settings(**settings: bool) -> AbstractContextManager[None]:
    """Settings of AOTAutograd inside a block, and as they were after it. No public way to these."""
    import torch._functorch.config

    return cast(AbstractContextManager[None], torch._functorch.config.patch(dict[str, Any](settings)))


class RecompileLimits:
    """The limit of torch's recompilations of a function: the highest of all living owners, and the original if none
    lives.

    The public way is `torch.compile(recompile_limit=...)`, which 2.13 has and 2.11 has not.
    """

    def __init__(self) -> None:
        self._needed: list[int] = []
        self._before = 0, 0

    def raise_for(self, owner: object, needed: int) -> None:
        """Raise the limits for as long as an object lives."""
        import torch._dynamo

        config = torch._dynamo.config
        if not self._needed:
            self._before = config.recompile_limit, config.accumulated_recompile_limit
        self._needed.append(needed)
        self._set()
        weakref.finalize(owner, self._drop, needed).atexit = False

    def _drop(self, needed: int) -> None:
        self._needed.remove(needed)
        self._set()

    def _set(self) -> None:
        config = torch._dynamo.config
        needed = max(self._needed, default=0)
        config.recompile_limit = max(self._before[0], needed)
        config.accumulated_recompile_limit = max(self._before[1], needed)


#: A setting of the whole process, so there is one of it.
RECOMPILE_LIMITS = RecompileLimits()


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile(module)` has made it, or `module.compile()` was called. There is no public way to ask."""
    return isinstance(getattr(module, "_orig_mod", None), nn.Module) or module._compiled_call_impl is not None


#: The beginning of the qualified name of the code that calls what `torch.compile` has made.
COMPILED_CALL = "_TorchDynamoContext.__call__."


def is_compiled_function(function: object) -> bool:
    """Whether `torch.compile(function)` has made it. There is no public way to ask."""
    return getattr(function, "_torchdynamo_orig_callable", None) is not None


def attend_within_modes(*args: Any, **kwargs: Any) -> Any:
    """Call `multi_head_attention_forward`, within function modes that see what it calls.

    It asks for modes itself, and is a single call to them; no public way into it.
    """
    whole = functional.multi_head_attention_forward
    names = {**vars(functional), "has_torch_function": lambda _: False}
    return FunctionType(whole.__code__, names, whole.__name__, whole.__defaults__)(*args, **kwargs)
