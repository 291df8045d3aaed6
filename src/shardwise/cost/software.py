"""How the software runs a model: what two programs with one layout may still do differently."""

from dataclasses import dataclass

#: Kernels of attention: torch's operations one by one; Megatron's fused softmax between two batched products;
#: FlashAttention 1 and 2; and 3, or cuDNN's, which are alike.
ATTENTION = ("torch", "megatron", "flash1", "flash2", "flash3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """What is fused, overlapped and kept in which precision: many small facts, each of which a run may state."""

    # Of matmuls in layers: fp32, fp16, bf16, fp8 (one scale a tensor), mxfp8 (one a block of 32), nvfp4.
    precision: str = "bf16"
    attention: str = "flash2"
    # The kernel under context parallelism, if it is another; and whether keys and values are repeated for it, for all
    # heads that share them (ours: torch's flash kernel is the one that gives the sums which pieces are joined by).
    context_attention: str | None = None
    repeats_keys: bool = False
    # One kernel for a chain of elementwise operations; for a norm; for the loss, which then writes over the logits.
    fused: bool = True
    fused_norms: bool = True
    fused_loss: bool = False
    # Queries and keys are rotated as complex numbers in fp32, which no compiler fuses with anything (torchtitan).
    complex_rotation: bool = False
    # Each tensor parallel rank takes the loss of its part of the vocabulary; else logits are gathered first.
    parallel_loss: bool = True
    # Under sequence parallelism, what columns read is gathered once and kept, and the model's ends are whole (ours);
    # else it is gathered again in the backward, and the ends are shared out too (Korthikanti et al. 2022).
    gathered_once: bool = False
    # Experts are shared out over replicas, and each is cut over tensor parallel ranks (ours); else they are shared out
    # over these too, and are whole (Megatron with expert tensor parallelism of 1).
    cuts_experts: bool = False
    # Weights are in fp32 and are what the optimizer works on; what a forward casts of them is saved for its backward
    # (autocast: ours, of modules in fp32), also of weights that ZeRO-3 gathered; else they are cast when they are
    # gathered, and freed with what was gathered (FSDP).
    saves_casts: bool = False
    # Weights are in 16 bits, with masters beside them that ZeRO shares out too (ours, of modules in 16 bits); else the
    # shards of ZeRO-3 are the masters, and nothing but these (FSDP).
    shards_both: bool = False
    # What selective recomputation means: matmuls and attention are kept and the rest is made again (`by_operation`:
    # torch's, and ours); else the scores of attention are made again, and nothing else (Korthikanti et al. 2022).
    by_operation: bool = False
    # Of the matmuls that it would keep, every second one is made again too (torchtitan).
    every_second: bool = False
    # Shards are gathered parameter by parameter, copied out, and freed in order, so that the allocator loses nothing;
    # a pipeline's stage stays gathered until the step's last backward (FSDP2).
    shards_parameters: bool = False
    # So does all of a model without a pipeline, and gradients are reduced with the last microbatch alone (Automodel's
    # mixtures).
    stays_gathered: bool = False
    # What is gathered and scattered lies in buffers that stay, and nothing is copied into or out of them
    # (Megatron-FSDP).
    registered_buffers: bool = False
    # Weights of layers that compute in 8 bits are sent so too (Megatron's fp8 parameters).
    narrow_gathers: bool = False
    # Where backwards are run in two halves, a stage is recomputed at once and not layer by layer (ours).
    recomputes_stages: bool = False
    # In 8 bits are linear layers alone, not those of experts; what they read is kept so too, and weights are cast again
    # in the backward (ours).
    fp8_layers: bool = False
    # Bytes of memory traffic for each element of an operand that is cast to 8 or 4 bits: read once and written in both
    # orders with a scale from before (Transformer Engine); read once more for its scale; or a scale for each row, so
    # that both orders are cast by themselves.
    cast_bytes: int = 4
    # Gradients of weights are added to earlier ones by the product's own kernel.
    fused_accumulation: bool = True
    # What runs beside compute: reductions of gradients; gathers of shards; tensor parallel sums, all of them or only
    # those of the backward, beside the gradients of weights; all-to-alls of experts; hops between stages.
    overlap_gradients: bool = True
    overlap_parameters: bool = True
    overlap_tp: bool = False
    async_tp: bool = False
    overlap_experts: bool = False
    overlap_hops: bool = False
    # Where states are shared out, a rank gets the sum of its part of the gradients only; else of all of them.
    scatters_gradients: bool = True
    # All-to-alls and grouped products made for experts (HybridEP and the kernels of its time).
    fast_dispatch: bool = False
    # Kernels that choosing experts, sending rows to them and bringing them back each launch, where they were counted
    # (ours); else as many as Megatron's take the time of, which is fitted.
    routing_kernels: float | None = None
    # One kernel multiplies the rows of all experts of a rank; else each expert's is launched by itself.
    one_grouped: bool = False
    # A tensor parallel rank sends its part of an activation to the next stage, not all of it.
    split_hops: bool = True
    # The pipeline's instructions go through Python one by one, and what is sent is kept (DeepSpeed).
    interpreted_pipe: bool = False
    # What a stage receives and sends is allocated anew for every microbatch (DeepSpeed's and Aleph Alpha's pipelines).
    fresh_buffers: bool = False
    # A rank that has its gradients takes its step and goes on, without waiting for the others (Qi et al. 2023, 4).
    steps_overlap: bool = False
    # Attention is given a mask, as where no token sees another document. On processors alone it is priced.
    masks_documents: bool = False
    # Kernels are not launched one by one: none of them, or none of those that choose experts and prepare to send rows;
    # or each is waited for (CUDA_LAUNCH_BLOCKING=1).
    cuda_graphs: bool = False
    graphed_routing: bool = False
    blocking_launches: bool = False
    # Bytes of a gradient as it is accumulated and as it is reduced, and of the optimizer's states with the masters.
    gradient_bytes: int = 4
    reduce_bytes: int = 4
    state_bytes: float = 12

    @property
    def is_flash(self) -> bool:
        return self.attention.startswith("flash")

    @property
    def width(self) -> int:
        """Bytes of an activation's element, and of a weight as it is computed with."""
        return 4 if self.precision == "fp32" else 2

    @property
    def gather_bytes(self) -> int:
        """Bytes of a weight as it is gathered."""
        return 1 if self.narrow_gathers and self.precision == "fp8" else self.held_width

    @property
    def held_width(self) -> int:
        """Bytes of a weight as a rank holds it to compute with, before it is cast."""
        return 4 if self.saves_casts else self.width

    @property
    def matmul_precision(self) -> str:
        """What the tensor cores compute in."""
        return {"mxfp8": "fp8", "nvfp4": "fp4"}.get(self.precision, self.precision)

    @property
    def wide_precision(self) -> str:
        """What stays out of 8 and 4 bits: attention, the head, routers."""
        return "bf16" if self.matmul_precision in ("fp8", "fp4") else self.precision
