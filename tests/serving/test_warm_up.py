"""Kernels that are compiled ahead are those that requests launch, as an engine on the meta device tells."""

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwise.kernels import compile_ahead
from shardwise.kernels.launch import Gpu, Launch, Rehearsal, StandIn, launch
from shardwise.nets.settings import Heads, Latent, Mlp, Rope, Settings
from shardwise.nets.transformer import Transformer
from shardwise.serving import assemble, device_runner, load
from shardwise.serving.limits import Limits
from shardwise.serving.narrow_weights import narrow
from shardwise.serving.warm_up import find_launches
from tests.kernels.interpreter import interpreted
from tests.serving.answers import ask, run

pytest.importorskip("triton", reason="no Triton for this machine")

GPU = Gpu(num_processors=132, overlaps=True)
HEADS, LATENT = (
    Heads(num_heads=8, num_kv_heads=4, head_dim=64, qk_norm=True),
    Latent(num_heads=8, q_rank=None, kv_rank=64, rope_dim=32, nope_dim=32, value_dim=32),
)


@pytest.fixture(scope="module", autouse=True)
def in_interpreter() -> Iterator[None]:
    """Nothing is launched here, but kernels are made when they are first imported: as the tests beside these want
    them."""
    if torch.cuda.is_available():
        yield
        return
    with interpreted():
        yield


@pytest.mark.parametrize(
    ("attention", "weights", "window"),
    [
        (HEADS, "int4", 100),
        *(pytest.param(*each, marks=pytest.mark.whole) for each in ((HEADS, None, None), (HEADS, "fp8", None))),
        pytest.param(LATENT, None, None, marks=pytest.mark.whole),
    ],
)
def test_requests_launch_what_was_rehearsed_and_nothing_else(
    attention: Any, weights: str | None, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(
        vocabulary=2048, width=256, num_layers=2, length=2048, mlp=Mlp(width=512), attention=attention, rope=Rope(),
        window=window, windowed_layers=None if window is None else (1,),
    )  # fmt: skip
    limits = Limits(kv_bytes=2**30, weights=weights, max_running=160, token_budget=600)
    known = {each.key() for each in find_launches(settings, torch.bfloat16, limits, GPU)}
    with torch.device("meta"):
        model = Transformer(settings).bfloat16().eval().requires_grad_(False)
    narrow(model, weights, is_rehearsed=True)
    monkeypatch.setattr(assemble, "make_runner", lambda *a, **o: device_runner.DeviceRunner(*a, **o, uses_graphs=False))
    monkeypatch.setattr(device_runner._Copied, "wait", lambda told: [0] * len(told.tokens))
    engine = assemble.assemble(model, limits, seed=0)
    with Rehearsal(GPU) as seen:
        for count in (3, 17, 65, 270, 1500):  # Alone, and again behind what is cached, beside one that goes on.
            run(engine, [ask(range(count), "alone", 2)])
            engine.add(ask(range(1, 7), "goes on", 5, temperature=0.5, top_k=5))
            engine.step()
            run(engine, [ask([*range(count), 9, 9, 9], "again", 2)])
        run(engine, [ask(range(count // 8, count // 8 + 2), f"many {count}", count // 8) for count in range(8, 150)])
    assert set(seen.launches) - known == set(), "compiled while somebody waits"
    assert known - set(seen.launches) == set(), "compiled for nobody"


def test_a_launch_is_known_by_what_triton_compiles_anew_for() -> None:
    def kernel(x: Any, at: Any, n: int, m: int) -> None: ...

    told = {"do_not_specialize": ["m"], "do_not_specialize_on_alignment": ["at"]}
    made = SimpleNamespace(fn=kernel, arg_names=["x", "at", "n", "m"], kwargs=told)
    x, out = torch.zeros(64, dtype=torch.bfloat16), torch.zeros(8)

    def number_of(*calls: Any) -> int:
        with Rehearsal(GPU) as seen:
            for *given, options in calls:
                launch(made, (1,), *given, **options)
        return len(seen.launches)

    first = (x, out, 48, 3, {"ROWS": 8})
    assert number_of(first, (x[8:], out[1:], 16, 1, {"ROWS": 8}), (x, out, 4096, 16, {"ROWS": 8})) == 1
    for other in (
        (x.float(), out, 48, 3, {"ROWS": 8}),
        (x[1:], out, 48, 3, {"ROWS": 8}),
        (x, None, 48, 3, {"ROWS": 8}),
        (x, out, 47, 3, {"ROWS": 8}),
        (x, out, 1, 3, {"ROWS": 8}),
        (x, out, 2**35, 3, {"ROWS": 8}),
        (x, out, 48, 3, {"ROWS": 4}),
    ):
        assert number_of(first, other) == 2, other


def test_all_are_compiled_and_loaded_and_an_error_leaves_them_to_the_first_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded: list[str] = []

    def warmup(name: str, *given: Any, **options: Any) -> Any:
        if name == "wrong":
            raise ValueError("not here")
        assert given == (StandIn(torch.float32), 16)
        assert options == {"grid": (1,), "ROWS": 2}
        loaded.append(name)
        return SimpleNamespace(run=name)

    def of(name: str) -> Launch:
        return Launch(SimpleNamespace(warmup=partial(warmup, name)), (StandIn(torch.float32), 16), {"ROWS": 2})

    monkeypatch.setattr(compile_ahead, "compiles", lambda _: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    device = torch.device("cuda", 0)
    assert compile_ahead.begin_to_compile(lambda: map(of, "abc"), device).result() == 3
    assert sorted(loaded) == ["a", "b", "c"]
    with pytest.warns(UserWarning, match="first needed"):
        assert compile_ahead.begin_to_compile(lambda: [of("wrong")], device).result() == 0


@pytest.mark.parametrize("shape", [("settings", torch.float16), None])
def test_compiling_begins_before_weights_are_read_where_the_shape_is_known(
    shape: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    model = SimpleNamespace(settings="read", embed=SimpleNamespace(weight=torch.zeros(1, dtype=torch.float16)))

    def begin(settings: str, dtype: torch.dtype, *_: Any) -> Any:
        assert dtype == torch.float16
        told.append(f"compile for {settings}")
        return SimpleNamespace(result=lambda: told.append("compiled"))

    def noted(what: str, made: Any) -> Any:
        def call(*_: Any, **__: Any) -> Any:
            told.append(what)
            return made

        return call

    monkeypatch.setattr(load, "find_shape", lambda *_, **__: shape)
    monkeypatch.setattr(load, "begin_warm_up", begin)
    monkeypatch.setattr(load, "read_source", noted("read", (model, None)))
    monkeypatch.setattr(load, "assemble", noted("assemble", "engine"))
    given: Any = {"random_weights": False, "dtype": None, "seed": None}
    made: Any = load._load_here("model", torch.device("cuda", 0), Limits(), **given)
    assert made == "engine"
    order = ["compile for settings", "read"] if shape else ["read", "compile for read"]
    assert told == [*order, "assemble", "compiled"]
