"""One layer's work over many ranks: tensor, sequence, context and expert parallelism; dropout that no plan changes.

tensor/     columns | rows of linear layers, vocabulary, sequence parallelism
context/    tokens of a sequence over ranks: ring attention, all-to-all attention
expert/     experts over ranks: permute, all-to-all, grouped experts, all-to-all, unpermute
    |
wrap_forward, rng_tracker, zigzag     shared by all three
dropout                               masks from seed, step, layer and position
"""
