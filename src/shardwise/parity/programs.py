"""The NCCL calls of a plan's ranks, recorded by processes on this machine's CPU, and proven: `check --nccl`."""

from contextlib import ExitStack

import torch
import torch.distributed as dist

from shardwise.errors import ShardwiseError
from shardwise.nccl.check import Proof, prove
from shardwise.nccl.copies import Copies
from shardwise.nccl.program import Program
from shardwise.nccl.rehearsal import RehearsedWires
from shardwise.nccl.taps import put_instead, recording, touching
from shardwise.parity.memory_check import check_given
from shardwise.parity.problem import MakeProblem, small_matrices
from shardwise.parity.processes import check_plan, sentence_of
from shardwise.parity.ranks import engine_of
from shardwise.planner.plan import Offload, Plan
from shardwise.ranks.faults import Watch
from shardwise.ranks.rank_error import RankError
from shardwise.ranks.spawn import Ranks
from shardwise.ranks.wires import ManyProcesses

_LIMIT_SECONDS = 600.0
#: A call without an answer for this long counts as never answered.
STALL_SECONDS = 30.0


def record_on_rank(
    plan: Plan,
    make: MakeProblem,
    stall_seconds: float = STALL_SECONDS,
    rehearses: bool = True,
) -> Program:
    """Train, evaluate, predict and gather the state as one rank of a plan; return the recorded calls of its groups.

    With `rehearses` a CPU stands in for a GPU; without, ranks are on GPUs that NCCL connects.
    """
    with (
        small_matrices(),
        recording(rehearses=rehearses, limit_seconds=stall_seconds) as recorder,
        put_instead() as instead,
        ExitStack() as stack,
    ):
        if rehearses:
            Copies(recorder).attach(instead)
            if plan.offload != Offload():
                recorder.memories.follow()
        try:
            problem = make()
            kind = RehearsedWires if rehearses else ManyProcesses
            wires = kind(plan, Watch(dist.get_rank(), dist.get_world_size(), limit_seconds=stall_seconds))
            stack.callback(wires.watch.close)
            recorder.watch = wires.watch
            engine = engine_of(problem, plan, wires)
            recorder.name(wires.named_groups())
            for step, batch in enumerate(problem.batches):
                recorder.step = step
                with touching(recorder):
                    engine.train_step(batch)
            recorder.step = "the evaluation"
            with touching(recorder):
                engine.evaluate(problem.batches[0])
            if plan.cp == 1:  # Outputs of parts of sequences may be refused.
                recorder.step = "the prediction"
                with touching(recorder):
                    engine.predict(problem.batches[0])
            recorder.step = "the gathering of the state"
            with touching(recorder):
                engine.state_dict()
                engine.optimizer_state_dict()
            recorder.step = "the end"
            engine.close()
        except ShardwiseError as error:
            if not isinstance(error, RankError):
                raise
            return recorder.program(error.problem.splitlines()[0])
        except RuntimeError as error:
            # The other ranks are notified; the calls recorded so far show the reason.
            return recorder.program(f"{type(error).__name__}: {str(error).splitlines()[0]}")
        program = recorder.program()
        wires.close()
    return program


def check_programs(plan: Plan, make: MakeProblem, *, device: str = "cpu") -> Proof:
    """Record the NCCL calls of all ranks of a plan, each a process on this machine, and prove that they can complete.

    On CPUs they take the code path of GPUs over gloo; with `device="cuda"` they are on GPUs, which they may share.
    """
    check_plan(plan)
    if plan.num_ranks == 1:
        raise ShardwiseError(f"the plan {plan} has one rank, which issues no NCCL operations", remedy="--plan dp=2")
    with torch.random.fork_rng(devices=[]), small_matrices():
        check_given(make().module, plan, num_steps=0, device=device)
    rehearses = device == "cpu"
    with Ranks(plan.num_ranks, gpus="none" if rehearses else "shared") as ranks:
        try:
            programs = ranks.run(record_on_rank, plan, make, STALL_SECONDS, rehearses, timeout_seconds=_LIMIT_SECONDS)
        except RankError as error:
            raise sentence_of(error) from None
    return prove(programs)
