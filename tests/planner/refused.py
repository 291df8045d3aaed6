"""One plan for each rule of composition: what is said of it, and what is offered instead."""

REFUSED = {
    "zero without replicas": (
        "pp=2,zero=1",
        "zero=1 shares states out over replicas, and dp=1 x cp=1 is one alone",
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
        "schedule=dualpipe has all weights twice, and offload.parameters=0.5 brings each from one place on the host",
        "pp=2,microbatches=4,offload.parameters=0.5",
    ),
    "selective recomputation": (
        "pp=2,recompute=selective",
        "recompute=selective: the engines recompute all of a stage's forward or nothing yet",
        "pp=2,recompute=full",
    ),
    "recomputation of some layers": (
        "pp=2,recompute=full,recompute_layers=3",
        "recompute_layers=3: the engines recompute all of a stage's forward or nothing yet",
        "pp=2,recompute=full",
    ),
    "activations that are recomputed": (
        "pp=2,recompute=full,offload.activations=0.5",
        "recompute=full keeps what a stage was given and nothing else, so offload.activations=0.5 has nothing to move",
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
