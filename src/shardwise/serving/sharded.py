"""An engine by a plan: a model sharded over ranks, and replicas of it."""

import warnings
from dataclasses import replace

import torch

from shardwise.errors import ShardwiseError
from shardwise.planner.plan import Plan
from shardwise.ranks.spawn import Ranks
from shardwise.serving.assemble import Identity, Room, make_engine
from shardwise.serving.blocks import BlockPool
from shardwise.serving.engine import LLMEngine
from shardwise.serving.kv_cache import block_bytes
from shardwise.serving.limits import Limits, check_room, count_blocks, reserve_bytes
from shardwise.serving.ranked import Model, RankedRunner, layers_by_speed, ranks_for
from shardwise.serving.ranked_tiers import make_ranked_tiers
from shardwise.serving.replicas import Replicas
from shardwise.serving.scheduler import Scheduler
from shardwise.serving.seating import seat
from shardwise.serving.shards import Shard, check_shard
from shardwise.serving.sources import describe_source

_SHORT = {"bf16": torch.bfloat16, "fp16": torch.float16}


def load_sharded(
    source: str,
    plan: str | Plan,
    limits: Limits,
    *,
    random_weights: bool = False,
    dtype: torch.dtype | None = None,
    seed: int | None = None,
    ranks: Ranks | None = None,
    cluster: str | None = None,
) -> LLMEngine | Replicas:
    """Load the engine of a model by a plan of tp, pp, ep and dp. `ranks` are processes that are up already; otherwise
    new ones start, on a named `cluster` placed so that their communication is cheapest.

    As in training, experts are sharded over dp ranks: `dp=2,ep=2` is one model on two ranks, `dp=2` is two replicas.
    """
    found, planned = _for_serving(plan if isinstance(plan, Plan) else Plan.parse(plan))
    dtype = dtype or planned
    num_replicas = found.dp // found.ep
    shard = Shard(tp=found.tp, pp=found.pp, ep=found.ep, counts=found.layers)
    if found.cp > 1:
        raise ShardwiseError(
            f"the plan {found} has cp={found.cp}, and serving does not split sequences", remedy="tp, pp or ep"
        )
    check_room(limits, None if torch.cuda.is_available() else torch.device("cpu"))
    settings, kind, identity = describe_source(source, random_weights=random_weights, dtype=dtype)
    check_shard(settings, shard)
    model = Model(source=source, random_weights=random_weights, settings=settings, dtype=kind, shard=shard,
                  weights=limits.weights)  # fmt: skip
    seating = None if ranks is not None else seat(settings, shard, num_replicas, str(found), cluster)

    limits.clear_folder(num_replicas, shard.num_ranks)

    def one(replica: int) -> LLMEngine:
        own = model
        up = ranks or ranks_for(shard, seating.variables[replica] if seating is not None else {}, num_replicas)
        differ = seating is not None and len(set(seating.gpus[replica])) > 1
        if shard.pp > 1 and shard.counts is None and differ:
            own = replace(model, shard=replace(shard, counts=layers_by_speed(up, settings, shard, kind)))
        share = limits.of_replica(replica, num_replicas)
        engine = _engine(own, up, share, identity, found, seed=seed, is_owner=ranks is None)
        seats = None if seating is None else seating.seats
        if seats is not None:
            engine.summary = replace(engine.summary, seats=seats.devices, seating=str(seats))
        return engine

    engines = [one(replica) for replica in range(num_replicas)]
    return engines[0] if num_replicas == 1 else Replicas(engines)


def _for_serving(plan: Plan) -> tuple[Plan, torch.dtype | None]:
    """Return how a plan splits the model, and its 16-bit dtype, if it has one (a plan that says nothing has fp32). A
    plan of a training has more, which is named in a warning.
    """
    # A rank that has several stages in training has other layers here: contiguous ones.
    layers = plan.layers if len(plan.layers or ()) == plan.pp else None
    precision = plan.precision if plan.precision in _SHORT else "fp32"
    used = Plan(dp=plan.dp, tp=plan.tp, pp=plan.pp, cp=plan.cp, ep=plan.ep, layers=layers, precision=precision)
    if used != plan:
        kept = str(used).split(",")
        unused = ",".join(each for each in str(plan).split(",") if each not in kept)
        warnings.warn(f"serving does not use {unused} of the plan {plan}", stacklevel=3)
    return replace(used, precision="fp32"), _SHORT.get(plan.precision)


def _engine(
    model: Model, ranks: Ranks, limits: Limits, identity: Identity, plan: Plan, *, seed: int | None, is_owner: bool
) -> LLMEngine:
    """Make the engine of one replica, which may use all of these limits."""
    num_replicas = plan.dp // plan.ep
    settings, shard, kind = model.settings, model.shard, model.dtype
    runner = RankedRunner(model, ranks, is_owner=is_owner)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    budget, most = limits.of_device(device)
    reserve = reserve_bytes(settings, budget, most, kind)
    # A block exists on all ranks, each with its own layers: the rank with the least room decides.
    layers = [len(replace(shard, rank=each).layers(settings.num_layers)) for each in range(shard.num_ranks)]
    sizes = [block_bytes(settings, each, kind, limits.block_size, shard.tp) for each in layers]
    shared = num_replicas if device.type == "cpu" else 1  # Replicas on GPUs have memory of their own.
    fullest = min(range(len(sizes)), key=lambda rank: (runner.rooms[rank][0] // shared - reserve) / sizes[rank])
    own = limits
    if limits.kv_bytes is not None:
        own = replace(limits, kv_bytes=limits.kv_bytes * sizes[fullest] // sum(sizes))
    num_blocks = count_blocks(own, sizes[fullest], runner.rooms[fullest][0] // shared - reserve, settings.length)
    tier_bytes = [limits.tiers(rank, shard.num_ranks) for rank in range(shard.num_ranks)] if limits.has_tiers else []
    runner.allocate(num_blocks, limits.block_size, tier_bytes)
    pool = BlockPool(num_blocks, limits.block_size)
    tiers = make_ranked_tiers(runner, sizes, tier_bytes, pool, measured=limits.measured) if tier_bytes else None
    room = Room(
        num_ranks=shard.num_ranks * num_replicas,
        num_parameters=sum(count for _, _, count in runner.rooms),
        weight_bytes=max(num_bytes for _, num_bytes, _ in runner.rooms),
        reserve_bytes=reserve,
        block_bytes=max(sizes),
    )
    scheduler = Scheduler(pool, token_budget=budget, max_running=most, beneath=tiers)
    return make_engine(
        runner, scheduler, settings, limits, identity, room, dtype=kind, device=device, tiers=tiers, seed=seed,
        plan=plan, split=str(shard),
    )  # fmt: skip
