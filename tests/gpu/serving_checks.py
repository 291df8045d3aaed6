"""Serving on a GPU: kernels against their definitions there, and the same tokens with and without all that is fast.

    python -m tests.gpu.serving_checks [part of a name]

pytest runs the same, where it is installed: `tests/serving/test_gpu_serving.py`.
"""

import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch

from shardwise.kernels.cache_write import Turn, write_cache
from shardwise.kernels.decode_step import decode_step
from shardwise.kernels.few_rows_linear import few_rows_linear
from shardwise.kernels.gated import Activation
from shardwise.kernels.latent_attention import latent_decode
from shardwise.kernels.narrow import KINDS, make_narrow
from shardwise.kernels.paged_attention import make_tiles, paged_attention_plain, paged_decode, paged_prefill, tile_of
from shardwise.kernels.row_linear import row_linear
from shardwise.kernels.sampling import make_key, sample
from shardwise.kernels.widen import widen
from shardwise.nets.initialise import initialise
from shardwise.nets.settings import Heads, Latent, Mlp, Rope, Settings
from shardwise.nets.transformer import Transformer
from shardwise.serving import assemble
from shardwise.serving.device_runner import DeviceRunner
from shardwise.serving.engine import LLMEngine
from shardwise.serving.limits import Limits
from shardwise.serving.runner import LocalRunner
from shardwise.serving.warm_up import begin_warm_up
from tests.serving.answers import ask, run, tokens_of


def check_attention(heads: int, shared: int, dim: int, window: int | None, dtype: torch.dtype) -> None:
    lengths = [1, 16, 700, 0, 4000, 333]
    counts = [-(-length // 16) for length in lengths]
    cache = torch.randn(sum(counts), 3, 2, shared, 16, dim).to(dtype)
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    order = torch.randperm(sum(counts)).int()
    for row, count in enumerate(counts):
        tables[row, :count], order = order[:count], order[count:]
    keys, values, told = cache[:, 1, 0], cache[:, 1, 1], torch.tensor(lengths, dtype=torch.int32)
    query = torch.randn(len(lengths), heads, dim).to(dtype)
    given: dict[str, Any] = {"scale": dim**-0.5, "window": window}
    exact_keys, exact_values = keys.float(), values.float()
    wanted = paged_decode(query.float(), exact_keys, exact_values, tables, told, **given, kernels=False)
    made = paged_decode(query, keys, values, tables, told, **given)
    limit = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    assert (made.float() - wanted).abs().max() < limit

    # Long pieces, and short ones, whose contexts are read in parts.
    for starts in ([0, 1, 17, 317, 317, 1317, 1650], [0, 1, 9, 25, 25, 41, 44]):
        query = torch.randn(starts[-1], heads, dim).to(dtype)
        out, tile = torch.zeros_like(query), tile_of(starts)
        tiles = torch.tensor(make_tiles(starts, 0, tile), dtype=torch.int32)
        begins = torch.tensor(starts, dtype=torch.int32)
        paged_prefill(query, keys, values, tables, told, begins, tiles, out, **given, tile=tile)
        for row in (0, 1, 2, 4, 5):
            here = slice(starts[row], starts[row + 1])
            plain = paged_attention_plain(
                query[here].float(),
                exact_keys,
                exact_values,
                tables[row, None],
                [lengths[row]],
                [0, here.stop - here.start],
                **given,
            )
            assert (out[here].float() - plain).abs().max() < limit, (row, tile)


def check_latent(heads: int, rank: int, dtype: torch.dtype) -> None:
    lengths = [1, 16, 700, 0, 4000, 333]
    counts = [-(-length // 16) for length in lengths]
    cache = torch.randn(sum(counts), 2, 16, rank + 64).to(dtype)[:, 1]
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    order = torch.randperm(sum(counts)).int()
    for row, count in enumerate(counts):
        tables[row, :count], order = order[:count], order[count:]
    query = torch.randn(len(lengths), heads, rank + 64).to(dtype)
    given: dict[str, Any] = {"rank": rank, "scale": (rank + 64) ** -0.5}
    told = torch.tensor(lengths, dtype=torch.int32)
    wanted = latent_decode(query.float(), cache.float(), tables, told, **given, kernels=False)
    made = latent_decode(query, cache, tables, told, **given)
    assert (made.float() - wanted).abs().max() < {torch.float32: 2e-5, torch.bfloat16: 3e-2}[dtype]
    assert not made[3].any()


def check_latent_tokens() -> None:
    """A small model with latent attention: tokens and prompts beside them, with the kernel and by its definition."""
    torch.backends.cuda.matmul.allow_tf32 = False
    model = small(
        attention=Latent(num_heads=8, q_rank=None, kv_rank=64, rope_dim=32, nope_dim=32, value_dim=32), rope=Rope()
    )
    requests = [ask(range(number, number + 5 + 9 * number), f"r{number}", 12 + number) for number in range(16)]

    def told(runner: Any, **limits: Any) -> dict[str, list[int]]:
        engine = engine_by(model, runner, **limits)
        found = tokens_of(run(engine, requests))
        assert engine.load().num_used_blocks == 0
        return found

    def plain(model: Transformer, cache: Any, **_: Any) -> LocalRunner:
        cache.kernels = False
        return LocalRunner(model, cache)

    wanted = told(plain, token_budget=64)
    assert told(local, token_budget=64) == wanted
    assert told(partial(DeviceRunner, uses_graphs=False)) == wanted
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # It can be captured.
        assert told(DeviceRunner) == wanted
        assert told(DeviceRunner, token_budget=64, max_running=5) == wanted


def check_cache_write(dtype: torch.dtype) -> None:
    angles = torch.randn(500, 64)
    turn = Turn(
        cosine=angles.cos(), sine=angles.sin(), q_norm=torch.randn(128).to(dtype), k_norm=torch.randn(128).to(dtype)
    )
    given = torch.randn(333, 48 * 128).to(dtype)
    slots, positions = torch.randperm(40 * 16)[:333].int() - 1, torch.randint(0, 500, (333,)).int()
    found = []
    for kernels in (True, False):
        cache = torch.zeros(40, 2, 2, 8, 16, 128, dtype=dtype)
        query = write_cache(given, cache[:, 1, 0], cache[:, 1, 1], positions, slots, turn, kernels=kernels)
        found.append((query, cache))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=6e-2 if dtype == torch.bfloat16 else 1e-4)


def check_decode_step(heads: int, shared: int, dim: int, window: int | None, dtype: torch.dtype) -> None:
    """Twice with the same counters, as layers follow each other: what one leaves is what the next begins with."""
    lengths = [1, 16, 700, 0, 3999, 333, 17, 65]
    counts = [-(-length // 16) for length in lengths]
    cache = torch.randn(sum(counts), 3, 2, shared, 16, dim).to(dtype)
    tables = torch.zeros(len(lengths), 256, dtype=torch.int32)
    order = torch.randperm(sum(counts)).int()
    for row, count in enumerate(counts):
        tables[row, :count], order = order[:count], order[count:]
    angles = torch.randn(4000, dim // 2)
    turn = Turn(
        cosine=angles.cos(), sine=angles.sin(), q_norm=torch.randn(dim).to(dtype), k_norm=torch.randn(dim).to(dtype)
    )
    told, counters = torch.tensor(lengths, dtype=torch.int32), torch.zeros(len(lengths) * shared, dtype=torch.int32)
    given = torch.randn(len(lengths), (heads + 2 * shared) * dim).to(dtype)
    limit = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 8e-2}[dtype]
    for _ in range(2):
        found = []
        for kernels in (True, False):
            own = cache.clone()
            seen = decode_step(
                given, own[:, 1, 0], own[:, 1, 1], tables, told, turn, scale=0.3 * dim**-0.5, window=window,
                counters=counters, kernels=kernels,
            )  # fmt: skip
            found.append((seen, own))
        for one, other in zip(*found, strict=True):
            assert (one.float() - other.float()).abs().max() < limit * max(1.0, float(other.abs().max()))
        assert not counters.any()


def check_draws(dtype: torch.dtype) -> None:
    rows = 64
    logits = (torch.randn(rows, 151_936) * 3).to(dtype)
    temperature = torch.rand(rows) * (torch.arange(rows) % 5 > 0)
    top_k = torch.randint(0, 50, (rows,)) * (torch.arange(rows) % 3 == 0)
    top_p = torch.where(torch.arange(rows) % 4 == 0, 0.8, 1.0)
    min_p = torch.where(torch.arange(rows) % 7 == 0, 0.1, 0.0)
    keys = torch.tensor([make_key(seed) for seed in range(rows)])
    given = logits, temperature, top_k, top_p, min_p, keys, torch.arange(rows)
    tokens, logprobs = sample(*given)
    wanted, told = sample(*given, kernels=False)
    # A draw between two words as close as their rounding may go either way.
    assert (tokens != wanted).sum() <= 1
    same = tokens == wanted
    torch.testing.assert_close(logprobs[same], told[same], atol=1e-3, rtol=1e-3)


def check_row_linear() -> None:
    for n, k, activation in ((4096, 1024, None), (12288, 4096, "silu"), (1000, 12288, None)):
        x, residual, norm = torch.randn(1, k).bfloat16(), torch.randn(1, k).bfloat16(), torch.randn(k).bfloat16()
        weight = (torch.randn(n, k) / k**0.5).bfloat16()
        given: dict[str, Any] = {"residual": residual, "norm": norm, "activation": activation}
        made, new = row_linear(x, weight, **given)
        exact: dict[str, Any] = {
            name: each.float() if isinstance(each, torch.Tensor) else each for name, each in given.items()
        }
        wanted, _ = row_linear(x.float(), weight.float(), **exact, kernels=False)
        assert torch.equal(new, x + residual)
        assert (made.float() - wanted).abs().max() < 0.05 * wanted.abs().max()


def check_few_rows_linear() -> None:
    """Rows of both sizes of tiles, a width that no large tile divides, and outputs that no program is full of."""
    gate: Activation = "silu"
    for rows, n, k, activation in (
        (2, 4096, 1024, None), (16, 6144, 4096, gate), (24, 1000, 12288, None), (32, 151936, 192, None)
    ):  # fmt: skip
        x, weight = torch.randn(rows, k).bfloat16(), (torch.randn(n, k) / k**0.5).bfloat16()
        bias = torch.randn(n).bfloat16()
        made = few_rows_linear(x, weight, bias, activation=activation)
        wanted = few_rows_linear(x.float(), weight.float(), bias.float(), activation=activation)
        assert (made.float() - wanted).abs().max() < 0.03 * wanted.abs().max()


def check_narrow_linear(kind: str) -> None:
    """Of one row with norm and gate, of few, of two tiles, and of so many that the weight is made wide for them."""
    gate: Activation = "silu"
    for n, k, activation in ((6144, 4096, None), (24576, 4096, gate), (1000, 12288, None), (130, 1100, None)):
        weight = make_narrow((torch.randn(n, k) / k**0.5).bfloat16(), kind)
        exact = replace(weight, dtype=torch.float32).wide()
        # Of 4 bits a product and a sum are rounded once or twice.
        assert (widen(weight) - weight.wide()).abs().max() <= 2**-7 * exact.abs().max()
        x, norm = torch.randn(300, k).bfloat16(), torch.randn(k).bfloat16()
        given: dict[str, Any] = {"residual": x[1:2], "activation": activation}
        made, new = row_linear(x[:1], weight, norm=norm, **given)
        given["residual"] = x[1:2].float()
        wanted, _ = row_linear(x[:1].float(), exact, norm=norm.float(), **given, kernels=False)
        assert torch.equal(new, x[:1] + x[1:2])
        assert (made.float() - wanted).abs().max() < 0.05 * wanted.abs().max()
        for rows in (2, 16, 33, 128, 300):
            made = few_rows_linear(x[:rows], weight, activation=activation)
            wanted = few_rows_linear(x[:rows].float(), exact, activation=activation)
            assert (made.float() - wanted).abs().max() < 0.03 * wanted.abs().max(), rows


def check_narrow_tokens(kind: str) -> None:
    """A prompt at once, in pieces of a few rows, and token by token in graphs, against definitions; and the tokens of
    many sequences with graphs and without."""
    model, prompt = small().half(), torch.randint(0, 1000, (150,)).tolist()

    def told(runner: Any, **limits: Any) -> torch.Tensor:
        given = [ask(prompt, "told", 1, prompt_logprobs=0)]
        first = run(engine_by(model, runner, max_running=1, **limits), given)["told"][0]
        assert first.prompt_logprobs is not None
        return torch.tensor([each.logprob for each in first.prompt_logprobs])

    wanted = told(partial(DeviceRunner, kernels=False, uses_graphs=False), weights=kind)
    for token_budget in (8192, 20, 1):
        # As float16 rounds; the weights as they were before they were made narrow are off by 0.1 in fp8.
        apart = (told(DeviceRunner, token_budget=token_budget) - wanted).abs()
        assert apart.mean() < 0.02, token_budget
        assert apart.max() < 0.15, token_budget
    requests = [ask(range(number, number + 5 + 9 * number), f"r{number}", 40) for number in range(40)]
    without, with_graphs = (
        tokens_of(run(engine_by(model, partial(DeviceRunner, uses_graphs=each)), requests)) for each in (False, True)
    )
    assert without == with_graphs


def check_warm_up(weights: str | None) -> None:
    """Whatever is asked, nothing is compiled behind the warm-up. Prompts that are computed, cached and beside others;
    graphs of some sizes, with cuts and without."""
    from triton import knobs  # type: ignore[import-untyped]

    model, limits = small().bfloat16(), Limits(kv_bytes=2**28, max_length=2048, weights=weights)
    begun = begin_warm_up(model.settings, torch.bfloat16, limits, model.embed.weight.device)
    engine = assemble.assemble(model, limits, seed=0)
    assert begun.result() > 20
    compiled: list[str] = []
    with knobs.compilation.scope():
        knobs.compilation.listener = lambda **told: compiled.append(told["src"].name)
        for count in (3, 17, 65, 270, 1500):
            run(engine, [ask([each % 1000 for each in range(count)], "alone", 4)])
            engine.add(ask(range(1, 7), "goes on", 9, temperature=0.5, top_k=5))
            engine.step()
            run(engine, [ask([*(each % 1000 for each in range(count)), 9, 9, 9], "again", 4)])
        run(engine, [ask(range(number, number + 2), f"{number}", 1 + number // 4) for number in range(200)])
    assert not compiled, compiled


def small(**others: Any) -> Transformer:
    attention = Heads(num_heads=8, num_kv_heads=4, head_dim=64, qk_norm=True)
    given = {"attention": attention, **others}
    settings = Settings(vocabulary=1000, width=256, num_layers=3, length=2048, mlp=Mlp(width=512), **given)
    with torch.device("meta"):
        model = Transformer(settings)
    initialise(model, 0, device=torch.get_default_device())
    for name, each in model.named_parameters():  # As large as trained ones, so that tokens differ.
        if "norm" not in name:
            each.data *= 4
    return model.eval().requires_grad_(False)


def engine_by(model: Transformer, runner: Any, **limits: Any) -> LLMEngine:
    with patch.object(assemble, "make_runner", runner):
        given = Limits(**{"kv_bytes": 2**28, "max_length": 2048, **limits})
        return assemble.assemble(model, given, assemble.Identity(), seed=0)


def local(model: Transformer, cache: Any, **_: Any) -> LocalRunner:
    return LocalRunner(model, cache)


def check_tokens() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    model = small()
    generator = torch.Generator("cpu").manual_seed(0)
    lengths = torch.randint(3, 400, (40,), generator=generator, device="cpu").tolist()
    given = [torch.randint(0, 1000, (each,), generator=generator, device="cpu").tolist() for each in lengths]
    requests = [
        ask(prompt, f"r{number}", 12 + number, temperature=0.8 * (number % 3 == 2), seed=number, top_k=number % 2 * 20)
        for number, prompt in enumerate(given)
    ]

    def told(runner: Any, *, overlaps: bool = True, **limits: Any) -> dict[str, list[int]]:
        engine = engine_by(model, runner, **limits)
        engine.overlaps = engine.overlaps and overlaps
        found = tokens_of(run(engine, requests))
        assert engine.load().num_used_blocks == 0
        return found

    wanted = told(partial(DeviceRunner, kernels=False, uses_graphs=False), overlaps=False)
    assert told(local) == wanted
    # Graphs, steps that overlap, and prompts in pieces: alone, and each with the others.
    pieces: dict[str, Any] = {"token_budget": 64, "max_running": 24}
    without = partial(DeviceRunner, uses_graphs=False)
    assert told(without, overlaps=False) == wanted
    assert told(without, **pieces) == wanted
    assert told(DeviceRunner) == wanted
    assert told(DeviceRunner, **pieces) == wanted


def check_tiers(num_host: int, num_files: int) -> None:
    """Prompts that come again and do not fit: their blocks come back from the host or from files."""
    torch.backends.cuda.matmul.allow_tf32 = False
    model, size = small(), 3 * 2 * 4 * 16 * 64 * 4
    given = [torch.randint(0, 1000, (300,)).tolist() for _ in range(12)]
    with TemporaryDirectory() as folder:
        tiers: dict[str, Any] = {"host_bytes": num_host * size}
        if num_files:
            tiers |= {"file_bytes": num_files * (size + 16), "kv_folder": Path(folder)}
        roomy = engine_by(model, DeviceRunner)
        tight = engine_by(model, DeviceRunner, kv_bytes=130 * size, measured=False, **tiers)
        for turn in range(3):
            requests = [ask(prompt, f"{turn}-{number}", 8) for number, prompt in enumerate(given)]
            assert tokens_of(run(tight, requests)) == tokens_of(run(roomy, requests)), turn
            if turn == 1:
                assert tight.load().kv_offload_load_bytes > 20 * size
        assert tight.load().num_used_blocks == 0
        tight.close()


def check_logprobs() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    model = small()
    requests = [
        ask(range(5, 40), "a", 12, logprobs=3),
        ask(range(9, 29), "b", 12, repetition_penalty=1.4),
        ask(range(3), "c", 20),
    ]
    plain = run(engine_by(model, local), requests)
    fast = run(engine_by(model, DeviceRunner), requests)
    assert tokens_of(fast) == tokens_of(plain)
    for one, other in zip(fast["a"], plain["a"], strict=True):
        assert one.logprob is not None
        assert other.logprob is not None
        assert abs(one.logprob.logprob - other.logprob.logprob) < 1e-3


#: By name, what is checked.
CHECKS: dict[str, Callable[[], None]] = {
    "tokens": check_tokens,
    "logprobs": check_logprobs,
    **{f"warm-up {weights}": partial(check_warm_up, weights) for weights in (None, *KINDS)},
    "tiers host": partial(check_tiers, 400, 0),
    "tiers files": partial(check_tiers, 0, 400),
    "tiers host, files": partial(check_tiers, 60, 400),
    **{
        f"attention {heads} {shared} {dim} {window} {dtype}": partial(
            check_attention, heads, shared, dim, window, dtype
        )
        for (heads, shared, dim), window, dtype in [
            ((16, 8, 128), None, torch.bfloat16),
            ((32, 8, 128), 300, torch.bfloat16),
            ((32, 8, 128), None, torch.float16),
            ((4, 4, 64), 300, torch.float32),
            ((6, 1, 80), None, torch.bfloat16),
        ]
    },
    **{f"cache write {dtype}": partial(check_cache_write, dtype) for dtype in (torch.bfloat16, torch.float32)},
    **{
        f"decode step {heads} {shared} {dim} {window} {dtype}": partial(
            check_decode_step, heads, shared, dim, window, dtype
        )
        for heads, shared, dim, window, dtype in [
            (16, 8, 128, None, torch.bfloat16),
            (32, 8, 128, 300, torch.bfloat16),
            (6, 1, 80, None, torch.float16),
            (4, 4, 64, 300, torch.float32),
        ]
    },
    **{f"draws {dtype}": partial(check_draws, dtype) for dtype in (torch.bfloat16, torch.float32)},
    "one row": check_row_linear,
    "few rows": check_few_rows_linear,
    **{
        f"latent {heads} {rank} {dtype}": partial(check_latent, heads, rank, dtype)
        for heads, rank, dtype in [(128, 512, torch.bfloat16), (16, 512, torch.bfloat16), (20, 128, torch.float32)]
    },
    "latent tokens": check_latent_tokens,
    **{f"narrow products {kind}": partial(check_narrow_linear, kind) for kind in KINDS},
    **{f"narrow tokens {kind}": partial(check_narrow_tokens, kind) for kind in KINDS},
}


def check(name: str) -> None:
    torch.manual_seed(0)
    with torch.device("cuda"):
        CHECKS[name]()


def main() -> None:
    wrong = []
    for name in (each for each in CHECKS if " ".join(sys.argv[1:]) in each):
        begun = time.perf_counter()
        try:
            check(name)
            said = "ok"
        except Exception as error:  # All of them are run, whatever one does.
            wrong.append(name)
            said = f"WRONG {type(error).__name__}: {str(error)[:300]}"
        print(f"{name}: {said} ({time.perf_counter() - begun:.1f} s)", flush=True)
    raise SystemExit(f"wrong: {', '.join(wrong)}" if wrong else 0)


if __name__ == "__main__":
    main()
