"""The layer that scores words. On a GPU its logits wait for somebody who looks at them.

A cross entropy never does (`kernels/lazy_logits.py`). Whoever else is given them finds logits, of the shape and with
the gradients that they always have.
"""

from torch import Tensor, nn

from shardwise.kernels.lazy_logits import may_wait, waiting


class Head(nn.Linear):
    """A linear layer without a bias. Where it `waits`, its logits wait for somebody who looks at them: an engine has it
    so, which knows what becomes of them."""

    #: A compiler sees one product here, and nothing to fuse; what waits is not for it.
    keeps_eager = True

    def __init__(self, width: int, words: int) -> None:
        super().__init__(width, words, bias=False)
        self.waits = False

    def forward(self, input: Tensor) -> Tensor:  # torch's name for it, which a caller may use.
        if self.waits and may_wait(input, self.weight, training=self.training):
            return waiting(input, self.weight)
        return super().forward(input)
