"""Every constant of the cost model that is not on a data sheet, with its origin.

"Fitted" means: on the quality A rows of published/runs.csv, by least absolute errors of log time, on all rows that a
constant affects together, never on a single source. [llmf] and so on name the sources with most influence on a
constant, with their number of rows. docs/planning.md describes how to repeat the fit.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """The constants, as a value, so that a fit can vary them."""

    # Share of the best matmul (Device.matmul_efficiency) sustained through a training step: clocks fall under load.
    # Fitted: ampere [aleph 208, llmf 72, zb 54, bloom 62, sc21 16, korth 8], hopper [llmf 43], blackwell [bridge 113].
    # Cdna: the four rows of an MI300X [torchao]. Volta and others: a value between those, because there are no rows.
    sustained_volta: float = 0.8
    sustained_ampere: float = 0.895
    sustained_hopper: float = 0.852
    sustained_blackwell: float = 0.701
    sustained_cdna: float = 0.666
    sustained_other: float = 0.8
    # The same for 8 and 4 bits, relative to the bf16 share above. Fitted [bridge 113, bcard 11, llmf 4].
    narrow_fp8: float = 1.273
    narrow_mxfp8: float = 1.21
    narrow_nvfp4: float = 1.01
    # Rate of matmuls of many small groups of rows (experts), relative to one matmul of all rows; the second with
    # grouped kernels of 2026. SimuMax measured .30 to .51 of the peak on B200 (facts 3.2). Fitted [bridge 113].
    grouped: float = 0.537
    fast_grouped: float = 0.656
    # Start and end of a tile, as an additional length of k. Fitted [all on A100].
    tile_ramp: float = 233.0
    # Slowdown of batched products whose inner dimension is not a multiple of 8 elements: they cannot use the tensor
    # cores fully. Fitted [bloom 62: heads of 108 against 104 and 112].
    misaligned: float = 8.69
    # Share of the memory bandwidth that elementwise kernels reach, and their speedup if tensors fit the cache. Fitted;
    # SimuMax has .91 for A100 (facts 3.2).
    streaming: float = 0.857
    cached: float = 1.24
    # Traffic of unfused chains of elementwise operations and norms, relative to the formulas. Fitted [aleph 208].
    unfused: float = 1.32
    # Exposed share of the time to accumulate weight gradients over microbatches: matmuls hide the rest. Fitted.
    accumulation: float = 0.323
    # Passes over the matrix of scores, relative to the formulas: with torch's single operations, and with Megatron's
    # fused softmax. Fitted [aleph: 11 torch, 15 fused; zb 54, sc21 16, korth 8, bloom 62].
    scores_torch: float = 1.03
    scores_megatron: float = 0.72
    # CPU seconds of a kernel launch; a block cannot be faster than its launches. The second: in blocks with experts.
    # Fitted [llmf small models; for the second bskill 8, and bridge mixtures with one sequence per microbatch].
    launch_seconds: float = 6.1e-6
    expert_launch_seconds: float = 12.5e-6
    # Seconds between two kernels of a CUDA graph, in addition to their work. Measured on one H200 (serving.md).
    graph_seconds: float = 1.3e-6
    # The same in a step of one row, whose kernels start while the previous one ends and load weights ahead: fitted to
    # steps of two models (Qwen3 0.6B and 8B, serving.md).
    overlapped_seconds: float = 0.5e-6
    # Routing to experts takes many small kernels to choose experts and sort rows, and the CPU waits for the number of
    # rows of each expert. The first is their time in launches. The second is the share of it if one kernel sends and
    # sorts rows (DeepEP, HybridEP) or a graph launches them. Fitted [bskill 8, bridge mixtures; for the second moezoo,
    # automodel].
    routing_kernels: float = 150.0
    fast_routing: float = 0.533
    # Seconds of a blocking launch (CUDA_LAUNCH_BLOCKING=1). Fitted [bloom 60].
    blocking_seconds: float = 195e-6
    # Time of state space scans, relative to their matrix products at the rate of kernels written for Ampere. Fitted
    # [bridge, bskill: Nemotron 3, 34].
    scan: float = 22.0
    # Share of the bf16 peak that attention kernels reach: forward and backward, long causal sequences. Fitted
    # [flash1: aleph 56, llmf 115; flash2: aleph 126].
    flash1_forward: float = 0.625
    flash1_backward: float = 0.246
    flash2_forward: float = 0.749
    flash2_backward: float = 0.412
    # FlashAttention 3 and cuDNN's, not fitted: no row separates them from the rest of a step. Shah et al. 2024
    # measured .60 forward for cuDNN's alone with heads of 128 on an H100. In a step it reaches 0.85 of that, as matmuls
    # do; a backward reaches a fifth less (M). With heads of 64, both passes together reached .387 alone on one H200, at
    # 4,096 positions (peers.md), which gives the last constant.
    flash3_forward: float = 0.51
    flash3_backward: float = 0.42
    flash3_small_heads: float = 0.82
    # Kernels written for Ampere reach a smaller share of the peak on later devices. Fitted [llmf 43 on H100].
    flash_on_hopper: float = 0.526
    # Sequence length at which a flash kernel reaches half of these shares. Fitted.
    attention_ramp: float = 463.0
    # Collectives that compute waits for, relative to nccl-tests: additional seconds of each call, and the share of the
    # rate. Fitted [aleph, bloom, sc21, korth: tensor parallel rows].
    sync_seconds: float = 84e-6
    sync_rate: float = 0.924
    # Seconds lost at each hop, gather and reduction of gradients, in addition to the message, because ranks wait for
    # each other. On GPUs this is part of the shares below; on CPUs it is measured (`probing/meetings.py`).
    meeting_seconds: float = 0.0
    # Share of the rate for reductions of gradients and for hops between stages. Fitted [aleph, bloom, sc21, zb].
    exchange_rate: float = 0.44
    hop_rate: float = 0.983
    # The same for ZeRO-3's gathers and scatters, which are large and prefetched. Fitted [llmf 115, titan, moezoo].
    gather_rate: float = 0.91
    # The same for all-to-alls of experts, by NCCL and by specialised kernels (HybridEP), relative to rings: above 1
    # because nothing is sent twice, and rows are sent in 8 bits if layers compute in 8 bits. Fitted [bridge mixtures].
    dispatch_rate: float = 1.385
    fast_dispatch_rate: float = 1.285
    # Share of overlapped communication that can be hidden: tensor parallel reductions, those during weight gradients
    # (Megatron 2022), all-to-alls of experts, hops, gradients. Fitted [bridge; korth 8 for the second].
    tp_hidden: float = 0.368
    tp_hidden_backward: float = 0.688
    ep_hidden: float = 0.649
    hop_hidden: float = 0.952
    dp_hidden: float = 0.857
    # Time lost at the start of a step, in microbatches, if each instruction of a pipeline goes through Python (as in
    # DeepSpeed). Fitted [bloom 60: batches of 32 to 128 microbatches].
    pipe_fill: float = 0.521
    # For pipelines that allocate new buffers for every microbatch: the share of a step that the allocator loses if the
    # device is full, and the share of memory in use at which losses begin. Fitted [aleph 193, bloom 60]: .062 on the
    # first alone, .095 on the second, and each improves the other. No such trend in zb and sc21 (Megatron-LM).
    pressed: float = 0.058
    pressed_from: float = 0.75
    # Share of the overlap of communication and compute that compute loses. Fitted [llmf 115]; Echo found 38 % for
    # overlapping kernels (facts 2.4), calculon assumes 15 % of the multiprocessors. The overlap is the time that the
    # bytes would take inside a node.
    overlap_loss: float = 0.67
    # The same if collectives work on persistent buffers and copy nothing: calculon's 15 %, not fitted.
    registered_loss: float = 0.15
    # Time of Adam's step, relative to 30 bytes per parameter at the memory bandwidth. Fitted.
    optimizer: float = 1.08
    # Seconds of a step outside all parts: data, loss scale, norm of gradients, logging. Fitted [llmf].
    step_seconds: float = 0.0243
    # Bytes of a CUDA context with its kernels (facts 4.3: 0.47 to 0.92 GiB, up to 2), of NCCL's buffers for each group
    # that a rank is in (544 to 688 MB on A100, facts 4.3), and of libraries' workspaces.
    context_bytes: float = 0.9 * 2**30
    group_bytes: float = 0.4 * 2**30
    workspace_bytes: float = 0.3 * 2**30
    # Fragmentation of the allocator, as a share of temporary tensors, and of weights and gradients. Chosen to separate
    # the out-of-memory rows from the successes [aleph 289 and 210, bloom 5 and 62, llmf 116, zb 54].
    fragments: float = 0.20
    fragments_states: float = 0.26


CONSTANTS = Constants()
