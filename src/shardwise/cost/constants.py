"""Every constant of the cost model that no data sheet gives, with where it comes from.

"fitted" means: on quality A rows of published/runs.csv, by least absolute errors of log time, all rows that a constant
has a part in together, never one source by itself. [llmf] and so on name the sources whose rows decide a constant
most, with their number. docs/planning.md says how to fit again.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """The constants, as a value, so that a fit can try others."""

    # Share of the best matmul (Device.matmul_efficiency) that holds through a training step: clocks fall under load.
    # Fitted: ampere [aleph 208, llmf 72, zb 54, bloom 62, sc21 16, korth 8], hopper [llmf 43], blackwell [bridge 113].
    # Cdna: the four rows of an MI300X [torchao]. Volta and others: between those, for want of rows.
    sustained_volta: float = 0.8
    sustained_ampere: float = 0.895
    sustained_hopper: float = 0.852
    sustained_blackwell: float = 0.701
    sustained_cdna: float = 0.666
    sustained_other: float = 0.8
    # The same for 8 and 4 bits, against the bf16 share above. Fitted [bridge 113, bcard 11, llmf 4].
    narrow_fp8: float = 1.273
    narrow_mxfp8: float = 1.21
    narrow_nvfp4: float = 1.01
    # Products of many small groups of rows (experts) against one of all rows; the second with grouped kernels of 2026.
    # SimuMax measured .30 to .51 of the peak on B200 (facts 3.2). Fitted [bridge 113].
    grouped: float = 0.537
    fast_grouped: float = 0.656
    # Length of k that a tile's start and end cost. Fitted [all on A100].
    tile_ramp: float = 233.0
    # Batched products whose inner dimension is no multiple of 8 elements cannot use the tensor cores fully: slower by
    # this factor. Fitted [bloom 62: heads of 108 against 104 and 112].
    misaligned: float = 8.69
    # Share of the memory's rate that elementwise kernels reach, and how much faster they are while tensors fit the
    # cache. Fitted; SimuMax has .91 for A100 (facts 3.2).
    streaming: float = 0.857
    cached: float = 1.24
    # Chains of elementwise operations and norms that are not fused: kernels that move more than the formulas say.
    # Fitted [aleph 208].
    unfused: float = 1.32
    # Share of the time to add up gradients of weights over microbatches that the products do not hide. Fitted.
    accumulation: float = 0.323
    # Matrices of scores: passes over them against what the formulas say, torch one by one and Megatron's fused softmax.
    # Fitted [aleph: 11 torch, 15 fused; zb 54, sc21 16, korth 8, bloom 62].
    scores_torch: float = 1.03
    scores_megatron: float = 0.72
    # Seconds of a kernel's launch that the processor spends; a block cannot be faster than its launches. Fitted
    # [llmf small models; bskill 8 and bridge mixtures of one sequence a microbatch for the second].
    launch_seconds: float = 6.1e-6
    expert_launch_seconds: float = 12.5e-6
    # Seconds between two kernels that a graph launches, beside their work. Measured on one H200 (serving.md).
    graph_seconds: float = 1.3e-6
    # The same in a step of one row, whose kernels begin while the one before them ends: 0.10 ms less of 368. Measured.
    overlapped_seconds: float = 1.0e-6
    # Choosing experts and sorting rows for them takes many small kernels, and the processor waits for the number of
    # rows of each expert: together as long as so many launches; and the share of them where one kernel sends rows and
    # sorts them (DeepEP, HybridEP) or a graph launches them. Fitted [bskill 8, bridge mixtures; moezoo, automodel for
    # the second].
    routing_kernels: float = 150.0
    fast_routing: float = 0.533
    # Seconds of a launch that is waited for (CUDA_LAUNCH_BLOCKING=1). Fitted [bloom 60].
    blocking_seconds: float = 195e-6
    # Scans of state space models against their products at the rate that kernels of Ampere's time reach. Fitted
    # [bridge, bskill: Nemotron 3, 34].
    scan: float = 22.0
    # Share of the bf16 peak that attention kernels reach: forward and backward, long causal sequences. Fitted
    # [flash1: aleph 56, llmf 115; flash2: aleph 126].
    flash1_forward: float = 0.625
    flash1_backward: float = 0.246
    flash2_forward: float = 0.749
    flash2_backward: float = 0.412
    # FlashAttention 3 and cuDNN's, not fitted: no row tells them from what is around them. Shah et al. 2024 measured
    # .60 forward by cuDNN's with heads of 128 on an H100; by itself, so that in a step it is 0.85 of that, as of
    # matmuls; a backward reaches less, by a fifth (M). With heads of 64 both passes together reached .387 by themselves
    # on one H200, at 4,096 positions (peers.md), which gives the last.
    flash3_forward: float = 0.51
    flash3_backward: float = 0.42
    flash3_small_heads: float = 0.82
    # Kernels written for Ampere reach less of the peak of later devices. Fitted [llmf 43 on H100].
    flash_on_hopper: float = 0.526
    # Positions at which a flash kernel reaches half of that. Fitted.
    attention_ramp: float = 463.0
    # Collectives that compute waits for: seconds of each call beside those of nccl-tests, and the share of their rate.
    # Fitted [aleph, bloom, sc21, korth: tensor parallel rows].
    sync_seconds: float = 84e-6
    sync_rate: float = 0.924
    # What each hop, gather and exchange of gradients loses beside its message where ranks wait for each other. On GPUs
    # it is part of the shares below; on processors it is measured (`probing/meetings.py`).
    meeting_seconds: float = 0.0
    # How much longer a backward takes in two halves, as a fraction. On GPUs nothing was fitted; on processors it is
    # measured (`probing/whole_steps.py`): gradients that wait for the second half take memory that is new to the cache.
    split_overhead: float = 0.0
    # The same of exchanges of gradients and of hops between stages. Fitted [aleph, bloom, sc21, zb].
    exchange_rate: float = 0.44
    hop_rate: float = 0.983
    # Of gathers and scatters of ZeRO-3, which are large and asked for ahead. Fitted [llmf 115, titan, moezoo].
    gather_rate: float = 0.91
    # Of all-to-alls of experts, NCCL's and those made for it (HybridEP), against the rate of rings: above 1 because
    # nothing is sent twice, and in 8 bits where layers compute in them. Fitted [bridge mixtures].
    dispatch_rate: float = 1.385
    fast_dispatch_rate: float = 1.285
    # Share of an overlapped exchange that can hide: of tensor parallel sums, of those beside the gradients of weights
    # (Megatron 2022), of all-to-alls of experts, hops, gradients. Fitted [bridge; korth 8 for the second].
    tp_hidden: float = 0.368
    tp_hidden_backward: float = 0.688
    ep_hidden: float = 0.649
    hop_hidden: float = 0.952
    dp_hidden: float = 0.857
    # Microbatches that a pipeline loses at the start of a step where each instruction goes through Python (DeepSpeed's
    # way). Fitted [bloom 60: batches of 32 to 128 microbatches].
    pipe_fill: float = 0.521
    # Where a pipeline takes fresh buffers for every microbatch: the share of a step that the allocator loses when the
    # device is full, and the share of its memory from which on it loses anything. Fitted [aleph 193, bloom 60]: .062 on
    # the first alone, .095 on the second, and each makes the other better. No such trend in zb and sc21 (Megatron-LM).
    pressed: float = 0.058
    pressed_from: float = 0.75
    # Of the time that communication and compute overlap, how much compute loses. Fitted [llmf 115]; Echo found 38 % for
    # the kernels that overlap (facts 2.4), calculon takes 15 % of the multiprocessors. Counted by bytes, as long as
    # they would take inside a node.
    overlap_loss: float = 0.67
    # The same where collectives work on buffers that stay, and copy nothing: calculon's 15 %, not fitted.
    registered_loss: float = 0.15
    # Adam's step against 30 bytes a parameter at the memory's rate. Fitted.
    optimizer: float = 1.08
    # Seconds of a step that no part explains: data, loss scale, norm of gradients, logging. Fitted [llmf].
    step_seconds: float = 0.0243
    # Bytes of a CUDA context with its kernels (facts 4.3: 0.47 to 0.92 GiB, up to 2), of NCCL's buffers for each group
    # that a rank is in (544 to 688 MB on A100, facts 4.3), and of libraries' workspaces.
    context_bytes: float = 0.9 * 2**30
    group_bytes: float = 0.4 * 2**30
    workspace_bytes: float = 0.3 * 2**30
    # What the allocator takes beyond: of what comes and goes within a step, and of weights and gradients. Chosen where
    # the out-of-memory rows and the successes part [aleph 289 and 210, bloom 5 and 62, llmf 116, zb 54].
    fragments: float = 0.20
    fragments_states: float = 0.26


CONSTANTS = Constants()
