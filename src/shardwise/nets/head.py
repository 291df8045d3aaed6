"""The output layer (LM head). On a GPU its logits may be lazy: computed only when they are read.

The cross entropy never reads them (`kernels/lazy_logits.py`). Any other reader finds ordinary logits, of the same shape
and with the same gradients.
"""

from torch import Tensor, nn

from shardwise.kernels.lazy_logits import may_wait, waiting


class Head(nn.Linear):
    """A linear layer without a bias. If `waits`, its logits are lazy. An engine sets this, as it knows how the logits
    are used."""

    #: A compiler could fuse nothing here, as there is only one product; and lazy logits are not meant for it.
    keeps_eager = True

    def __init__(self, width: int, words: int) -> None:
        super().__init__(width, words, bias=False)
        self.waits = False

    def forward(self, input: Tensor) -> Tensor:  # torch's name for it, which a caller may use.
        if self.waits and may_wait(input, self.weight, training=self.training):
            return waiting(input, self.weight)
        return super().forward(input)
