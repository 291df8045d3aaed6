"""The serving engine: tokens in, tokens out, over KV blocks that requests share and that move between tiers of memory.

A request waits in the scheduler until there are blocks for it. The runner computes what the scheduler chose, and the
sampler draws the next tokens. `step` is schedule, run, collect:

    request --> scheduler --> runner --> sampler --> tokens
                   |            |
                 blocks ---- KV cache
"""
