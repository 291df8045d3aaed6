"""Triton's interpreter for kernels of ours, whoever has imported Triton before."""

# mypy: ignore-errors

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch


@contextmanager
def interpreted() -> Iterator[None]:
    """Triton decides when a function is made whether it is interpreted. Its own were made when it was imported, perhaps
    by another test: here they are made again, and put back."""
    import triton.experimental.gluon  # noqa: F401 - imported later, it would find functions that are interpreted
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    rooms = (tl, tl.standard, tl.math)
    made = {}
    before = [(room, name, value) for room in rooms for name, value in vars(room).items() if type(value) is JITFunction]
    for room, name, value in before:
        setattr(room, name, made.setdefault(id(value), InterpretedFunction(value.fn)))
    try:
        _import_kernels()
        with _patched_once_a_launch(), _nothing_for_nobody():
            yield
    finally:
        for room, name, value in before:
            setattr(room, name, value)


def _import_kernels() -> None:
    """Make all kernels while the setting is there."""
    with patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
        from shardwise.kernels import (  # noqa: F401
            adamw_triton,
            cache_write_triton,
            compact_states_triton,
            cross_entropy_triton,
            device_functions,
            experts_triton,
            few_rows_linear_triton,
            fp8_triton,
            gated_triton,
            latent_attention_triton,
            linear_cross_entropy_triton,
            norm_triton,
            paged_attention_triton,
            paged_decode_triton,
            paged_functions,
            rotary_triton,
            row_linear_triton,
            sampling_triton,
            scale_triton,
            step_inputs_triton,
            widen_triton,
        )


@contextmanager
def _patched_once_a_launch() -> Iterator[None]:
    """Whenever one function of a kernel calls another, Triton looks through its whole language for what to patch: a
    third of what a kernel takes. Here it does so at the first call of a launch, for each of its modules."""
    import triton.language as tl
    from triton.runtime import interpreter

    look_through, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[int] = set()

    def patch_lang(fn):
        seen = {id(each) for each in fn.__globals__.values() if each is tl or each is tl.core}
        if seen and seen <= patched:
            return None  # Only a launch asks for what is to be put back, and there nothing is patched yet.
        patched.update(seen)
        return look_through(fn)

    def call(self, *args, **kwargs):
        patched.clear()
        try:
            return launch(self, *args, **kwargs)
        finally:
            patched.clear()

    with (
        patch.object(interpreter, "_patch_lang", patch_lang),
        patch.object(interpreter.GridExecutor, "__call__", call),
    ):
        yield


@contextmanager
def _nothing_for_nobody() -> Iterator[None]:
    """Before whole numbers are added or multiplied, Triton does so in 64 bits and compares, to assert that nothing
    overflows; but its interpreter leaves out every assertion (`debug` is off there). That, and a table of NumPy's types
    that is made again at each look, are half of what a kernel takes."""
    from triton.runtime import interpreter

    builder, look = interpreter.interpreter_builder, interpreter._get_np_dtype
    assert not builder.options.debug
    known = {}

    def look_once(of):
        if of.name not in known:
            known[of.name] = look(of)
        return known[of.name]

    with (
        patch.object(builder, "options", replace(builder.options, sanitize_overflow=False)),
        patch.object(interpreter, "_get_np_dtype", look_once),
    ):
        yield
