"""One plan for each rule of composition: what is said of it, and what is offered instead."""

REFUSED = {
    "zero without replicas": (
        "pp=2,zero=1",
        "zero=1 shards states over replicas, but with dp=1 and cp=1 there is only one",
        "pp=2",
    ),
    "two weight versions under ZeRO": (
        "dp=2,pp=2,schedule=pipedream-2bw,microbatches=2,zero=1",
        "schedule=pipedream-2bw steps on two versions of the weights in turn, and with zero=1 a rank updates its shard"
        " of one",
        "dp=2,pp=2,microbatches=2,zero=1",
    ),
    "weights twice on the host": (
        "pp=2,schedule=dualpipe,microbatches=4,offload.parameters=0.5",
        "schedule=dualpipe keeps two copies of each weight, but offload.parameters=0.5 stores only one on the host",
        "pp=2,microbatches=4,offload.parameters=0.5",
    ),
    "recomputation of some layers": (
        "pp=2,schedule=zb-h1,recompute=full,recompute_layers=3",
        "schedule=zb-h1 runs backwards in two halves and recomputes a stage at once, not recompute_layers=3 of it",
        "pp=2,schedule=zb-h1,recompute=full",
    ),
    "activations that are recomputed": (
        "pp=2,recompute=full,offload.activations=0.5",
        "recompute=full keeps little of what offload.activations=0.5 would move, and the engine does one or the other",
        "pp=2,recompute=full",
    ),
    "many chunks of auto": (
        "pp=2,chunks=3,schedule=auto",
        "schedule=auto makes 1 or 2 chunks on a rank, not 3",
        "pp=2,chunks=2,schedule=auto",
    ),
    "layers of auto": (
        "pp=2,schedule=auto,layers=1+1+2",
        "layers is for 3 stages, but schedule=auto over pp=2 makes 2 or 4",
        "pp=2,schedule=auto",
    ),
}
