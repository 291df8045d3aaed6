"""The plan, the search for it, and the reason of every choice.

question ---> search/               model, cluster, batch; every layout by bounds, then by price
   |            |
   |          account, placement/   one plan exactly, rank by rank; ranks on devices
   |            |
plan <------- planning              the best plan, with the reason for each choice
   |
composition                         choices that cannot be combined
   |
programs/                           the same plan for Megatron, torchtitan, DeepSpeed, Accelerate, vLLM
"""
