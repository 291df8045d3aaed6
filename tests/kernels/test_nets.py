"""Models of ours with kernels train as they do without: alone, in pipelines, recomputed, with backwards in halves."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import shardwise as sw
from shardwise.kernels.choose import settle
from shardwise.kernels.lazy_logits import LazyLogits, before_a_loss
from shardwise.kernels.norm import add_rms_norm
from shardwise.nets.loss import has_lazy_logits, next_token_loss
from shardwise.nets.settings import Heads, Mixture, Mlp, Rope, Settings
from shardwise.nets.transformer import Transformer


def settings(**changed: Any) -> Settings:
    known: dict[str, Any] = {
        "vocabulary": 29,
        "width": 16,
        "num_layers": 1,
        "length": 8,
        "attention": Heads(num_heads=4, num_kv_heads=2, head_dim=4),
        "mlp": Mlp(width=24),
        "rope": Rope(),
        "tied": True,
    }
    return Settings(**{**known, **changed})


def model(**changed: Any) -> Transformer:
    torch.manual_seed(3)
    return Transformer(settings(**changed))


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(29, (2, 6), generator=generator, device="cpu").to(torch.get_default_device())
    labels = ids.roll(-1, 1)
    labels[:, -1] = -100
    return {"input_ids": ids, "labels": labels}


def losses(module: nn.Module, plan: str, **options: Any) -> list[float]:
    engine = sw.parallelize(
        module, plan, loss=next_token_loss, optimizer=partial(SGD, lr=0.5), example=batch(), **options
    )
    # The second loss tells of the gradients of the first: a third would tell of no more.
    return [float(engine.train_step(batch())) for _ in range(2)]


@pytest.mark.parametrize(
    "plan",
    # Plain dp=1 is that of compiled blocks, below.
    [
        pytest.param("dp=1", marks=pytest.mark.whole),
        "dp=1,recompute=full",
        # The other way round in `tests/fusion/test_fuse.py`.
        pytest.param("pp=2,schedule=zb-h1,microbatches=2", marks=pytest.mark.whole),
    ],
)
def test_a_step_with_kernels_is_one_without(plan: str) -> None:
    num_layers = 2 if "pp=2" in plan else 1
    with_kernels, without = (losses(model(num_layers=num_layers), plan, kernels=each) for each in (True, False))
    assert with_kernels == pytest.approx(without, rel=1e-5)
    assert with_kernels[1] < with_kernels[0]


def test_in_an_engine_a_residual_is_added_within_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    added = []

    def noting(*given: Any) -> tuple[Tensor, Tensor]:
        added.append(given[0].shape)
        return add_rms_norm(*given)

    monkeypatch.setattr("shardwise.nets.norm.add_rms_norm", noting)
    engine = sw.parallelize(
        model(num_layers=2), "dp=1", loss=next_token_loss, optimizer=partial(SGD, lr=0.5), example=batch()
    )
    added.clear()  # What was tried before the engine was there.
    engine.train_step(batch())
    assert added == [torch.Size([2, 6, 16])] * 2


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_in_compiled_blocks_the_head_still_waits_for_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def noting(output: Any, batch: Any) -> Any:
        seen.append(has_lazy_logits(output))
        return plain(output, batch)

    plain = next_token_loss
    monkeypatch.setitem(globals(), "next_token_loss", noting)
    made = losses(model(), "dp=1", compile="aot_eager")
    assert seen[-1], "logits were made whole"
    assert made == pytest.approx(losses(model(), "dp=1", kernels=False), rel=1e-5)


def test_experts_with_kernels_are_those_without() -> None:
    mixture = Mixture(num_experts=3, num_chosen=2, width=8, num_shared=1, auxiliary=0.01)
    made = losses(model(mixture=mixture), "dp=1"), losses(model(mixture=mixture), "dp=1", kernels=False)
    assert made[0] == pytest.approx(made[1], rel=1e-5)


def test_logits_wait_in_training_and_look_as_they_would_be() -> None:
    module, given = model(), batch()
    settle(module, next_token_loss)
    logits = module(given["input_ids"])
    assert has_lazy_logits(logits)
    assert isinstance(logits, LazyLogits)
    assert logits.shape == (2, 6, 29)
    assert (logits.size(-1), logits.dim(), logits.dtype) == (29, 3, torch.float32)
    assert logits._logits is None, "nobody has looked at a number"
    total, count = next_token_loss(logits, given)
    assert logits._logits is None, "nor has the loss"
    settle(module, next_token_loss, kernels=False)
    plain = module(given["input_ids"])
    assert type(plain) is Tensor
    torch.testing.assert_close(total / count, next_token_loss(plain, given)[0] / count)
    torch.testing.assert_close(logits * 1, plain)
    torch.testing.assert_close(logits[:, -1].argmax(-1), plain[:, -1].argmax(-1))
    torch.testing.assert_close(torch.cat([logits, logits]), torch.cat([plain, plain]))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_where_nobody_has_settled_how_it_is_trained_or_the_loss_is_compiled_no_logit_waits() -> None:
    module, given = model(), batch()
    assert type(module(given["input_ids"])) is Tensor
    settle(module, torch.compile(next_token_loss))
    assert type(module(given["input_ids"])) is Tensor


def test_logits_that_somebody_wrote_into_are_what_the_loss_sees() -> None:
    module, given = model(), batch()
    settle(module, next_token_loss)
    logits = module(given["input_ids"])
    logits.mul_(0.0)
    total, count = next_token_loss(logits, given)
    torch.testing.assert_close((total / count).detach(), torch.tensor(29.0).log())


def test_an_evaluation_has_its_logits_at_once_where_no_loss_is_known_to_follow() -> None:
    module = model()
    settle(module, next_token_loss)
    with torch.no_grad():
        assert type(module(batch()["input_ids"])) is Tensor
        module.eval()
        assert type(module(batch()["input_ids"])) is Tensor
        with before_a_loss():
            assert has_lazy_logits(module(batch()["input_ids"]))
    assert type(module(batch()["input_ids"])) is Tensor


def test_the_loss_of_an_evaluation_takes_logits_that_wait_and_a_prediction_has_them() -> None:
    seen = []

    def noting(output: Any, batch: Any) -> Any:
        seen.append(has_lazy_logits(output))
        return next_token_loss(output, batch)

    engine = sw.parallelize(model(), "dp=1", loss=noting, optimizer=partial(SGD, lr=0.5), example=batch())
    plain = sw.parallelize(
        model(), "dp=1", loss=next_token_loss, optimizer=partial(SGD, lr=0.5), example=batch(), kernels=False
    )
    seen.clear()
    assert engine.evaluate(batch()) == pytest.approx(plain.evaluate(batch()), rel=1e-6)
    assert seen == [True]
    assert type(engine.predict(batch())) is Tensor
