"""Requests answered: tokens in, tokens out, with KV blocks that are shared and move between memories.

A request waits in the scheduler until its blocks fit; the runner computes what the scheduler chose, and the sampler
draws. `step` is schedule, run, collect:

    request --> scheduler --> runner --> sampler --> tokens
                   |            |
                 blocks ---- KV cache
"""
