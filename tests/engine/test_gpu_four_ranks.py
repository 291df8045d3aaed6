"""Plans of four ranks that share a GPU: the losses and weights of one device by plain torch."""

import pytest
import torch

from tests.engine import gpu_plans

ON_FOUR = [
    *(f"pp=4,schedule={each},microbatches=8" for each in ("1f1b", "zb-h2", "zb-v", "dualpipe", "chimera")),
    "pp=4,schedule=interleaved,chunks=2,microbatches=4",
    "pp=2,dp=2,schedule=1f1b,microbatches=4",
    "pp=2,dp=2,zero=1,schedule=zb-v,microbatches=4",
    "pp=2,dp=2,zero=3,schedule=1f1b,microbatches=4",
    "pp=2,tp=2,sp=true,schedule=1f1b,microbatches=4",
    "pp=2,cp=2,schedule=zb-h1,microbatches=4",
    "dp=2,tp=2,zero=2",
]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_four_ranks_on_a_gpu_train_what_one_device_trains() -> None:
    wrong = gpu_plans.differences(4, "shared", ON_FOUR)
    assert not wrong, "\n".join(wrong)
