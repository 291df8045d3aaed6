"""How the software runs a model: differences between programs that have the same layout."""

from dataclasses import dataclass

#: Attention kernels: torch's single operations; Megatron's fused softmax between two batched products; FlashAttention
#: 1 and 2; FlashAttention 3 or cuDNN's, which are equally fast.
ATTENTION = ("torch", "megatron", "flash1", "flash2", "flash3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """What is fused, overlapped and stored in which precision: many small facts, each of which a run may state."""

    # Precision of matmuls in layers: fp32, fp16, bf16, fp8 (a scale per tensor), mxfp8 (one per block of 32), nvfp4.
    precision: str = "bf16"
    attention: str = "flash2"
    # The kernel under context parallelism, if different; and whether keys and values are repeated for it, once for each
    # query head that shares them (ours: only torch's flash kernel returns the log-sum-exp that merges pieces).
    context_attention: str | None = None
    repeats_keys: bool = False
    # One kernel for a chain of elementwise operations; for a norm; for the loss, which then overwrites the logits.
    fused: bool = True
    fused_norms: bool = True
    fused_loss: bool = False
    # Queries and keys are rotated as complex numbers in fp32, which no compiler fuses with anything (torchtitan).
    complex_rotation: bool = False
    # Each tensor parallel rank computes the loss of its part of the vocabulary; else logits are gathered first.
    parallel_loss: bool = True
    # Under sequence parallelism, inputs of column-parallel layers are gathered once and saved, and embedding and head
    # are not cut by sequence (ours); else they are gathered again in the backward, and embedding and head are cut too
    # (Korthikanti et al. 2022).
    gathered_once: bool = False
    # Experts are spread over replicas, and each is cut over tensor parallel ranks (ours); else whole experts are spread
    # over tensor parallel ranks too (Megatron with expert tensor parallelism of 1).
    cuts_experts: bool = False
    # The optimizer updates fp32 weights; a forward casts them and saves the casts for its backward, also if ZeRO-3
    # gathered them (autocast: ours, for modules in fp32); else weights are cast when they are gathered, and the casts
    # are freed with the gathered weights (FSDP).
    saves_casts: bool = False
    # Weights are in 16 bits, and ZeRO-3 shards both them and their master weights (ours, for modules in 16 bits); else
    # the shards of ZeRO-3 are the master weights alone (FSDP).
    shards_both: bool = False
    # Selective recomputation saves the outputs of matmuls and attention and recomputes the rest (`by_operation`:
    # torch's, and ours); else it recomputes only attention scores (Korthikanti et al. 2022).
    by_operation: bool = False
    # With `by_operation`, every second matmul is recomputed too (torchtitan).
    every_second: bool = False
    # Shards are gathered parameter by parameter, copied out, and freed in order, so that there is no fragmentation; a
    # pipeline's stage stays gathered until the step's last backward (FSDP2).
    shards_parameters: bool = False
    # A model without a pipeline also stays gathered, and gradients are reduced only with the last microbatch
    # (Automodel's mixtures).
    stays_gathered: bool = False
    # Gathers and scatters use persistent buffers, and nothing is copied into or out of them (Megatron-FSDP).
    registered_buffers: bool = False
    # Weights of layers that compute in 8 bits are also gathered in 8 bits (Megatron's fp8 parameters).
    narrow_gathers: bool = False
    # If the backward is split in two halves, a whole stage is recomputed at once, not layer by layer (ours).
    recomputes_stages: bool = False
    # Only linear layers compute in 8 bits, not experts. They save their inputs in 8 bits too, and cast weights again in
    # the backward (ours).
    fp8_layers: bool = False
    # Bytes of memory traffic for each element of an operand that is cast to 8 or 4 bits. With an earlier scale, it is
    # read once and written in both orders (Transformer Engine). A current scale takes another read. With a scale for
    # each row, the two orders are cast separately.
    cast_bytes: int = 4
    # The matmul's own kernel accumulates weight gradients.
    fused_accumulation: bool = True
    # Communication that overlaps with compute: reductions of gradients; gathers of shards; tensor parallel reductions,
    # all of them or only those during weight gradients; all-to-alls of experts; hops between stages.
    overlap_gradients: bool = True
    overlap_parameters: bool = True
    overlap_tp: bool = False
    async_tp: bool = False
    overlap_experts: bool = False
    overlap_hops: bool = False
    # If states are sharded, gradients are reduce-scattered; else they are all-reduced.
    scatters_gradients: bool = True
    # Specialised all-to-alls and grouped matmuls for experts (HybridEP and kernels of that time).
    fast_dispatch: bool = False
    # Kernels of each of the router, dispatch and combine, if they were counted (ours); else None: the fitted number
    # that gives the time of Megatron's.
    routing_kernels: float | None = None
    # One kernel multiplies the rows of all experts of a rank; else each expert has its own launch.
    one_grouped: bool = False
    # A tensor parallel rank sends its part of an activation to the next stage, not all of it.
    split_hops: bool = True
    # The pipeline's instructions go through Python one by one, and sent activations are kept (DeepSpeed).
    interpreted_pipe: bool = False
    # A stage allocates new send and receive buffers for every microbatch (DeepSpeed's and Aleph Alpha's pipelines).
    fresh_buffers: bool = False
    # A rank steps as soon as it has its gradients, without waiting for the other ranks (Qi et al. 2023, 4).
    steps_overlap: bool = False
    # Attention has a mask, such as one that separates documents. Priced on CPUs only.
    masks_documents: bool = False
    # CUDA graphs launch all kernels; or only those that choose experts and prepare to send rows; or each launch blocks
    # (CUDA_LAUNCH_BLOCKING=1).
    cuda_graphs: bool = False
    graphed_routing: bool = False
    blocking_launches: bool = False
    # Gradients are in 16 bits like their weights. At the step a rank copies those that it updates to fp32, all at once,
    # when activations are freed (ours, for modules in 16 bits).
    widens_gradients: bool = False
    # Bytes of a gradient in accumulation and in reduction, and of the optimizer's states with the master weights.
    gradient_bytes: int = 4
    reduce_bytes: int = 4
    state_bytes: float = 12

    @property
    def is_flash(self) -> bool:
        return self.attention.startswith("flash")

    @property
    def width(self) -> int:
        """Bytes of an activation's element, and of a weight in compute."""
        return 4 if self.precision == "fp32" else 2

    @property
    def gather_bytes(self) -> int:
        """Bytes of a weight in a gather."""
        return 1 if self.narrow_gathers and self.precision == "fp8" else self.held_width

    @property
    def held_width(self) -> int:
        """Bytes of a weight that a rank holds for compute, before it is cast."""
        return 4 if self.saves_casts else self.width

    @property
    def matmul_precision(self) -> str:
        """The precision of the tensor cores."""
        return {"mxfp8": "fp8", "nvfp4": "fp4"}.get(self.precision, self.precision)

    @property
    def wide_precision(self) -> str:
        """The precision of operations that never run in 8 or 4 bits: attention, the head, routers."""
        return "bf16" if self.matmul_precision in ("fp8", "fp4") else self.precision
