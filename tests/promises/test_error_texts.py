"""Every error that a user can cause: the command line, its exit status, and the text to the letter."""

from pathlib import Path

import pytest

from shardwise.cli import COMMANDS, main
from shardwise.model.catalogue import CATALOGUE
from shardwise.schedule.outcome import names

NAMES = ", ".join(names())
COMMAND_NAMES = ", ".join(command.name for command in COMMANDS)
OPTIONS = (
    "--help, --compare, --stages, --microbatches, --chunks, --times, --stage-times, --pair, --hop, --slowdown, "
    "--memory, --kept-for-weights, --save, --json"
)
BUILT = "llama, mistral, qwen2, qwen3, mixtral, qwen3_moe, deepseek_v2, deepseek_v3, gpt2"
FAULTS = "unscaled-gradients, missing-reduction, swapped-shard, unmasked-padding, stale-gather"
NUM_KNOWN = len(CATALOGUE)
KEYS = "name, microbatches, stages, pipes, skips, ties, steps, staleness, rank 0"
KINDS = "F, B, I, W, SEND_F, RECV_F, SEND_B, RECV_B, GATHER, RELEASE, REDUCE, STEP, OFFLOAD, RELOAD"

RUN_COLUMNS = (
    "id,model,layers,hidden,heads,sequence,gpu,num_gpus,gpus_per_node,dp,tp,pp,microbatch,global_batch,precision,"
    "outcome,step_seconds"
)

#: What lies in the folder where the commands are called, beside an empty `folder`.
FILES = {
    "three.csv": b"1,1,1\n1,1,1\n1,1,1\n",
    "four.csv": b"1,1,1\n1,1,1\n1,1,1\n1,1,1\n",
    "wrong.csv": b"1,1,1\n1,one,1\n",
    "wrong.json": b"[[1, 1, 1], 1]",
    "binary": b"\xff\xfe\x00",
    "binary.schedule": b"\xff\xfe\x00",
    "empty.schedule": b"",
    "gap.schedule": b"rank 0: 0F0 0B0\nrank 2: 1F0 1B0\n",
    "word.schedule": b"name: mine\n\nrank 0: 0F0 0X0\n",
    "key.schedule": b"microbatch: 2\nrank 0: 0F0 0B0\n",
    "late.schedule": b"rank 0: 0B0 0F0\n",
    "stuck.schedule": b"rank 0: 0F0 0B0 0F1 0B1\nrank 1: 1F1 1B1 1F0 1B0\n",
    "short.schedule": b"microbatches: 3\nrank 0: 0F0 0B0\n",
    "header.csv": RUN_COLUMNS.encode() + b"\n",
    "thin.csv": RUN_COLUMNS.replace("microbatch,", "micro_batch,").encode() + b"\n",
}

ERRORS: list[tuple[str, int, str]] = [
    # Probe, and where ranks sit.
    (
        "train tiny --devices 2 --cluster 4xcpu",
        1,
        """
error: --cluster 4xcpu has 4 devices, and the run 2 ranks
  try: --devices 4, or a cluster of 2: shardwise probe --save cluster.toml
""",
    ),
    (
        "probe link",
        1,
        """
error: unknown thing to measure 'link'; known: devices, links, collectives
  try: links
""",
    ),
    (
        "probe --devices 0",
        1,
        """
error: --devices 0: it must be at least 1
  try: --devices 2
""",
    ),
    (
        "probe links --devices 1",
        1,
        """
error: links are between devices, and there is 1
  try: --devices 2, or torchrun --nnodes 2 ... -m shardwise probe
""",
    ),
    (
        "probe --save cluster.json",
        1,
        """
error: --save cluster.json: a cluster's file ends in .toml
  try: --save cluster.toml
""",
    ),
    (
        "probe links --save cluster.toml",
        1,
        """
error: --save cluster.toml of links alone: a cluster has devices too
  try: shardwise probe --save cluster.toml
""",
    ),
    # Serving.
    (
        "serve folder --host 0.0.0.0",
        1,
        """
error: --host 0.0.0.0 can be reached from other machines, and there is no API key
  try: --api-key KEY, or --host 127.0.0.1
""",
    ),
    (
        "serve folder --port 70000",
        1,
        """
error: --port 70000: ports are from 0 to 65535
  try: --port 0 takes a free one
""",
    ),
    (
        "serve folder --port 0 --queue 0",
        1,
        """
error: --queue 0: it must be at least 1
  try: --queue 256
""",
    ),
    (
        "bench --workload 256 --show",
        1,
        """
error: unknown workload '256'; known: 256-requests, 32-sequences, one-sequence, tiny
""",
    ),
    (
        "bench --rate 1,fast --show",
        1,
        """
error: --rate 1,fast: rates are positive numbers of requests a second
  try: --rate 1,2,4
""",
    ),
    (
        "bench --requests 0 --show",
        1,
        """
error: --requests 0: it must be at least 1
  try: --requests 16
""",
    ),
    (
        "bench http:// --workload tiny",
        1,
        """
error: http:// is not the address of a server
  try: http://127.0.0.1:8000
""",
    ),
    # The command line itself.
    (
        "shedule zb-v",
        2,
        f"""
error: unknown command 'shedule'; known: {COMMAND_NAMES}
  try: shardwise schedule
""",
    ),
    (
        "frobnicate",
        2,
        f"""
error: unknown command 'frobnicate'; known: {COMMAND_NAMES}
  try: shardwise --help
""",
    ),
    (
        "--verson",
        2,
        f"""
error: the first word must be a command, not '--verson'; known: {COMMAND_NAMES}
  try: shardwise --version
""",
    ),
    (
        "-x schedule",
        2,
        f"""
error: the first word must be a command, not '-x'; known: {COMMAND_NAMES}
  try: shardwise --help
""",
    ),
    # What is asked for.
    (
        "schedule",
        1,
        f"""
error: no schedule is named
  try: shardwise schedule 1f1b, or one of: {NAMES}
""",
    ),
    (
        "schedule 1f1b",
        1,
        """
error: --stages is missing
  try: --stages 4
""",
    ),
    (
        "schedule 1f1b --stages 4",
        1,
        """
error: --microbatches is missing
  try: --microbatches 8
""",
    ),
    (
        "schedule zbv --stages 4 --microbatches 8",
        1,
        f"""
error: unknown schedule 'zbv'; known: {NAMES}
  try: shardwise schedule zb-v, or the path of a schedule file
""",
    ),
    (
        "schedule frobnicate",
        1,
        f"""
error: unknown schedule 'frobnicate'; known: {NAMES}
  try: shardwise schedule 1f1b, or the path of a schedule file
""",
    ),
    (
        "schedule 1f1b --stages four --microbatches 8",
        2,
        """
error: --stages wants a whole number, not 'four'
  try: shardwise schedule zb-v --stages 4 --microbatches 8
""",
    ),
    (
        "schedule 1f1b --stages 4 --microbatches 2.5",
        2,
        """
error: --microbatches wants a whole number, not '2.5'
  try: shardwise schedule zb-v --stages 4 --microbatches 8
""",
    ),
    (
        "schedule 1f1b --stages 4 --microbatches 8 --pair x",
        2,
        """
error: --pair wants a number, not 'x'
  try: shardwise schedule zb-v --stages 4 --microbatches 8
""",
    ),
    (
        "schedule 1f1b --stages",
        2,
        """
error: --stages wants a value
  try: shardwise schedule zb-v --stages 4 --microbatches 8
""",
    ),
    (
        "schedule 1f1b --stagse 4",
        2,
        f"""
error: unknown option '--stagse'; known: {OPTIONS}
  try: --stages
""",
    ),
    (
        "schedule 1f1b gpipe --stages 4",
        2,
        """
error: not understood: gpipe
  try: shardwise schedule zb-v --stages 4 --microbatches 8
""",
    ),
    # How many stages, microbatches and chunks.
    (
        "schedule 1f1b --stages 0 --microbatches 8",
        1,
        """
error: 0 stages: a pipeline has at least 1
  try: --stages 4
""",
    ),
    (
        "schedule 1f1b --stages -4 --microbatches 8",
        1,
        """
error: -4 stages: a pipeline has at least 1
  try: --stages 4
""",
    ),
    (
        "schedule 1f1b --stages 2000 --microbatches 1",
        1,
        """
error: 2000 stages: at most 1024 are played
  try: --stages 1024
""",
    ),
    (
        "schedule 1f1b --stages 4 --microbatches 0",
        1,
        """
error: 0 microbatches: a step has at least 1
  try: --microbatches 8
""",
    ),
    (
        "schedule 1f1b --stages 2 --microbatches 1000000",
        1,
        """
error: 1000000 microbatches through 2 stages are 2000000 forwards, but at most 200000 are played
  try: --microbatches 8: a longer step repeats itself
""",
    ),
    (
        "schedule interleaved --stages 2 --microbatches 8 --chunks 1000000",
        1,
        """
error: 8 microbatches through 2000000 stages are 16000000 forwards, but at most 200000 are played
  try: --chunks 2
""",
    ),
    (
        "schedule dualpipe-v --stages 4 --microbatches 6",
        1,
        """
error: dualpipe-v over 4 stages needs at least 8 microbatches, not 6
  try: --microbatches 8
""",
    ),
    (
        "schedule dualpipe-v --stages 1 --microbatches 1",
        1,
        """
error: dualpipe-v over 1 stage needs at least 2 microbatches, not 1
  try: --microbatches 2
""",
    ),
    (
        "schedule pipedream-2bw --stages 4 --microbatches 3",
        1,
        """
error: pipedream-2bw over 4 stages needs at least 4 microbatches, not 3
  try: --microbatches 4
""",
    ),
    (
        "schedule dualpipe --stages 3 --microbatches 8",
        1,
        """
error: dualpipe needs an even number of stages, not 3: microbatches meet in the middle
  try: --stages 4
""",
    ),
    (
        "schedule chimera --stages 3 --microbatches 8",
        1,
        """
error: chimera needs an even number of stages, not 3: microbatches meet in the middle
  try: --stages 4
""",
    ),
    (
        "schedule chimera --stages 4 --microbatches 5",
        1,
        """
error: chimera needs an even number of microbatches, not 5: half enter at each end
  try: --microbatches 6
""",
    ),
    (
        "schedule 1f1b --stages 4 --microbatches 8 --chunks 2",
        1,
        """
error: 1f1b has 1 chunk on a rank, not 2
  try: --chunks 1, or a schedule that takes any number, like interleaved
""",
    ),
    (
        "schedule zb-v --stages 4 --microbatches 8 --chunks 3",
        1,
        """
error: zb-v has 2 chunks on a rank, not 3
  try: --chunks 2, or a schedule that takes any number, like interleaved
""",
    ),
    (
        "schedule interleaved --stages 4 --microbatches 8 --chunks 0",
        1,
        """
error: 0 chunks: a rank has at least 1
  try: --chunks 2
""",
    ),
    (
        "schedule hanayo --stages 4 --microbatches 8 --chunks 3",
        1,
        """
error: hanayo takes an even number of chunks on a rank, 2 or more, not 3
  try: --chunks 4
""",
    ),
    # Memory.
    (
        "schedule 1f1b --stages 2 --microbatches 2 --memory 1",
        1,
        """
error: 1f1b holds 2 microbatch-stages on rank 0 at 0F1, but may hold 1 (1 too many)
    rank 0  0F0 0SEND_F0>1 0RECV_B0<1 [0F1] 0SEND_F1>1 0RECV_B1<1 0B0 0B1 ...
    rank 1  1RECV_F0<0 1RECV_F1<0 1F0 1B0 1SEND_B0>0 1F1 1B1 1SEND_B1>0 1STEP0
  try: --memory 2, or auto, which makes a schedule for the memory there is
""",
    ),
    (
        "schedule auto --stages 4 --microbatches 8 --memory 0.5",
        1,
        """
error: rank 0 may hold 0.5 microbatch-stages, but every schedule holds 1
  try: --memory 1
""",
    ),
    (
        "schedule --compare --stages 4 --microbatches 8 --memory 0.5",
        1,
        """
error: rank 0 may hold 0.5 microbatch-stages, but every schedule holds 1
  try: --memory 1
""",
    ),
    (
        "schedule 1f1b --stages 4 --microbatches 8 --memory 1,2",
        1,
        """
error: --memory has 2 limits for 4 ranks
  try: --memory 4, or a limit for each rank
""",
    ),
    (
        "schedule 1f1b --stages 4 --microbatches 8 --memory lots",
        1,
        """
error: --memory: 'lots' is not a number
  try: --memory 4, or a limit for each rank
""",
    ),
    # Times.
    (
        "schedule 1f1b --stages 4 --microbatches 8 --times -1,1,1",
        1,
        """
error: --times: -1 is below 0
  try: --times 1,1.2,0.8
""",
    ),
    (
        "schedule 1f1b --stages 4 --microbatches 8 --times 1,1",
        1,
        """
error: --times: there are three times, F,I,W, but '1,1' has 2
  try: --times 1,1.2,0.8
""",
    ),
    (
        "schedule 1f1b --stages 4 --microbatches 8 --times 1,x,1",
        1,
        """
error: --times: 'x' is not a number
  try: --times 1,1.2,0.8
""",
    ),
    (
        "schedule 1f1b --stages 4 --microbatches 8 --times 0,0,0",
        1,
        """
error: --times: the times of F, I and W are all 0: nothing to schedule
  try: --times 1,1,1
""",
    ),
    (
        "schedule 1f1b --stages 4 --microbatches 8 --times 1,1,1e300",
        1,
        """
error: --times: 1e300 is neither 0 nor between 1e-12 and 1e+12
  try: --times 1,1.2,0.8
""",
    ),
    (
        "schedule 1f1b --stages 4 --microbatches 8 --pair 9",
        1,
        """
error: --times: an overlapped pair of 9 is not between its longer half, 2, and both together, 3
  try: --pair 2
""",
    ),
    (
        "schedule 1f1b --stages 4 --microbatches 8 --hop -0.1",
        1,
        """
error: --hop: -0.1 is below 0
  try: --hop 0.05
""",
    ),
    (
        "schedule 1f1b --stages 4 --microbatches 8 --hop 1,2",
        1,
        """
error: --hop has 2 times, but between 4 ranks the number of boundaries is 3
  try: --hop 0.05, or a time for each boundary
""",
    ),
    (
        "schedule 1f1b --stages 4 --microbatches 8 --slowdown -1",
        1,
        """
error: a slowdown of -1 is not between 0 and 100
  try: --slowdown 0.1
""",
    ),
    (
        "schedule 1f1b --stages 4 --microbatches 8 --kept-for-weights 2",
        1,
        """
error: the part of an activation kept for W is 2, but a part is between 0 and 1
  try: --kept-for-weights 1
""",
    ),
    # Files of times.
    (
        "schedule 1f1b --stages 4 --microbatches 8 --times 1,1,1 --stage-times three.csv",
        1,
        """
error: --times and --stage-times both say how long stages take
  try: only one of them
""",
    ),
    (
        "schedule 1f1b --stages 4 --microbatches 8 --stage-times none.csv",
        1,
        """
error: the stage times in none.csv cannot be read: No such file or directory
  try: a file with 4 lines like 1,1.2,0.8
""",
    ),
    (
        "schedule 1f1b --stages 4 --microbatches 8 --stage-times binary",
        1,
        """
error: the stage times in binary cannot be read: it is not text
  try: a file with 4 lines like 1,1.2,0.8
""",
    ),
    (
        "schedule 1f1b --stages 4 --microbatches 8 --stage-times three.csv",
        1,
        """
error: three.csv has times for 3 stages, but there are 4 ranks
  try: 4 lines like 1,1.2,0.8, one for each rank
""",
    ),
    (
        "schedule 1f1b --stages 2 --microbatches 8 --stage-times wrong.csv",
        1,
        """
error: wrong.csv, line 2: 'one' is not a number
  try: 1,1.2,0.8
""",
    ),
    (
        "schedule 1f1b --stages 2 --microbatches 8 --stage-times four.csv",
        1,
        """
error: times are given for 4 stages, but the schedule has 2 stages on 2 ranks
  try: a line of times for each rank, 2 in all
""",
    ),
    (
        "schedule auto --stages 1 --microbatches 8 --stage-times four.csv",
        1,
        """
error: times are given for 4 stages, but auto cuts a model into at most 2
  try: a line of times for each rank, 1 in all
""",
    ),
    (
        "schedule auto --stages 2 --microbatches 8 --stage-times four.csv --chunks 1",
        1,
        """
error: times are given for 4 stages, but auto cuts a model into at most 2
  try: a line of times for each rank, 2 in all
""",
    ),
    (
        "schedule 1f1b --stages 2 --microbatches 8 --stage-times wrong.json",
        1,
        """
error: wrong.json, stage 1: 1 is not a list of times
  try: [1, 1.2, 0.8] or {"F": 1, "I": 1.2, "W": 0.8}
""",
    ),
    # Schedule files.
    (
        "schedule none.schedule",
        1,
        """
error: the schedule file none.schedule cannot be read: No such file or directory
  try: shardwise schedule 1f1b --stages 4 --microbatches 8 --save 1f1b.schedule, which writes one
""",
    ),
    (
        "schedule folder/",
        1,
        """
error: the schedule file folder cannot be read: Is a directory
  try: shardwise schedule 1f1b --stages 4 --microbatches 8 --save 1f1b.schedule, which writes one
""",
    ),
    (
        "schedule binary.schedule",
        1,
        """
error: the schedule file binary.schedule cannot be read: it is not text
  try: shardwise schedule 1f1b --stages 4 --microbatches 8 --save 1f1b.schedule, which writes one
""",
    ),
    (
        "schedule empty.schedule",
        1,
        """
error: empty.schedule: ranks must be numbered from 0 without a gap; found: none
  try: a line 'rank 0: 0F0 0F1 0B0 0B1', and one for each other rank
""",
    ),
    (
        "schedule gap.schedule",
        1,
        """
error: gap.schedule: ranks must be numbered from 0 without a gap; found: 0, 2
  try: a line 'rank 0: 0F0 0F1 0B0 0B1', and one for each other rank
""",
    ),
    (
        "schedule word.schedule",
        1,
        f"""
error: word.schedule, line 3, rank 0, instruction 2: unknown instruction 'X'; known: {KINDS}
  try: 2F0, 1I3, 0SEND_F2>1 or 2STEP0
""",
    ),
    (
        "schedule key.schedule",
        1,
        f"""
error: key.schedule, line 1: unknown key 'microbatch'; known: {KEYS}
  try: microbatches
""",
    ),
    (
        "schedule late.schedule",
        1,
        """
error: rank 0: 0B0 needs 0F0, which comes only after it
    rank 0  [0B0] [0F0] 0STEP0
  try: 0F0 before 0B0
""",
    ),
    (
        "schedule stuck.schedule",
        1,
        """
error: ranks wait for each other: rank 0 at 0B0 for 1B0 of rank 1, rank 1 at 1F1 for 0F1 of rank 0
    rank 0  0RECV_B1<1 0RECV_B0<1 0F0 0SEND_F0>1 [0B0] 0F1 0SEND_F1>1 0B1 0STEP0
    rank 1  1RECV_F0<0 1RECV_F1<0 [1F1] 1B1 1SEND_B1>0 1F0 1B0 ...
  try: one of these instructions earlier
""",
    ),
    (
        "schedule short.schedule",
        1,
        """
error: microbatch 1 never goes forward (microbatches: 3)
    rank 0  0F0 0B0 0STEP0
  try: 0F1 in the line of rank 0
""",
    ),
    (
        "schedule stuck.schedule --stages 4",
        1,
        """
error: stuck.schedule is a file that already gives its stages, microbatches and chunks
  try: shardwise schedule stuck.schedule
""",
    ),
    # Comparing and saving.
    (
        "schedule --compare 1f1b --stages 4 --microbatches 8",
        1,
        """
error: --compare covers all schedules and cannot be combined with 1f1b
  try: --compare without 1f1b
""",
    ),
    (
        "schedule --compare --stages 4 --microbatches 8 --save all.svg",
        1,
        """
error: --compare covers all schedules and cannot be combined with --save
  try: --compare without --save
""",
    ),
    (
        "schedule --compare",
        1,
        """
error: --stages is missing
  try: --stages 4
""",
    ),
    (
        "schedule 1f1b --stages 4 --microbatches 8 --save x.pdf",
        1,
        """
error: x.pdf: nothing is known to be saved as '.pdf'
  try: x.svg, x.json (for Perfetto) or x.schedule
""",
    ),
    (
        "schedule 1f1b --stages 4 --microbatches 8 --save none/x.svg",
        1,
        """
error: none/x.svg cannot be written: there is no folder none
  try: mkdir -p none
""",
    ),
    (
        "schedule 1f1b --stages 4 --microbatches 8 --save folder",
        1,
        """
error: folder cannot be written: it is a folder
  try: --save folder/schedule.svg, a file in it
""",
    ),
    (
        "schedule 1f1b --stages 4 --microbatches 8 --chunks -1",
        1,
        """
error: -1 chunks: a rank has at least 1
  try: --chunks 2
""",
    ),
    # Tables of published runs.
    (
        "validate",
        2,
        """
error: missing: RUNS.csv
  try: shardwise validate korthikanti-2022
""",
    ),
    (
        "validate korthikanti",
        1,
        """
error: unknown table of runs 'korthikanti'; known: korthikanti-2022
  try: korthikanti-2022
""",
    ),
    (
        "validate nowhere.csv",
        1,
        """
error: the table of runs nowhere.csv cannot be read: No such file or directory
  try: a CSV file, like runs.csv
""",
    ),
    (
        "validate thin.csv",
        1,
        f"""
error: thin.csv has no column microbatch; a table of runs has at least {RUN_COLUMNS.replace(",", ", ")}
  try: rename micro_batch to microbatch
""",
    ),
    (
        "validate header.csv",
        1,
        """
error: header.csv has a header and no run
  try: one line for each run
""",
    ),
    (
        "validate korthikanti-2022 --quality D",
        1,
        """
error: unknown quality 'D'; known: A, B, C
  try: --quality A
""",
    ),
    (
        "validate korthikanti-2022 --quality C",
        1,
        """
error: none of the 8 runs has quality C; there are: A
  try: --quality A
""",
    ),
    # A plan against one device.
    (
        "check",
        2,
        """
error: missing: --plan
  try: shardwise check --plan tp=2 --model gpt2
""",
    ),
    (
        "check --plan dp=2 --steps 0",
        1,
        """
error: --steps 0: at least 1 is needed
  try: --steps 8
""",
    ),
    (
        "check --plan none.toml",
        1,
        """
error: the plan file none.toml cannot be read: No such file or directory
  try: a short form like pp=2,microbatches=8
""",
    ),
    (
        "check --plan pp=2,zero=1",
        1,
        """
error: zero=1 shards states over replicas, but with dp=1 and cp=1 there is only one
  try: pp=2
""",
    ),
    (
        "check --plan dp=64",
        1,
        """
error: the plan has 64 ranks, and each is a process here: at most 32
  try: --plan dp=2, the same axes in small
""",
    ),
    (
        "check --plan dp=2 --model lama3-8b",
        1,
        f"""
error: unknown model 'lama3-8b'; {NUM_KNOWN} are known, and those of {BUILT} are built here
  try: --model llama3-8b
""",
    ),
    (
        "check --plan dp=2 --model gemma2-2b",
        1,
        f"""
error: gemma2-2b is a gemma2 model, and those that are built here are {BUILT}
  try: --module package.module:factory, with a function that returns the module, a batch and a loss
""",
    ),
    (
        "check --plan dp=2 --module nets",
        1,
        """
error: --module nets is no package.module:factory
  try: --module my_package.my_module:factory, or --module my_file.py:factory
""",
    ),
    (
        "check --plan dp=2 --module no_such_module:factory",
        1,
        """
error: --module no_such_module:factory cannot be imported: No module named 'no_such_module'
  try: --module my_package.my_module:factory, or --module my_file.py:factory
""",
    ),
    (
        "check --plan dp=2 --model gpt2 --module nets:factory",
        2,
        """
error: --module does not go with --model
  try: shardwise check --plan tp=2 --model gpt2
""",
    ),
    (
        "check --plan dp=2 --inject stale",
        1,
        f"""
error: unknown fault 'stale'; known: {FAULTS}
  try: --inject unscaled-gradients
""",
    ),
    (
        "check --plan dp=2 --inject swapped-shard",
        1,
        """
error: swapped-shard cannot be injected under dp=2: every tensor is whole where it is held
  try: --plan tp=2, or --plan dp=2,zero=1
""",
    ),
    (
        "check --plan dp=1 --nccl",
        1,
        """
error: the plan dp=1 has one rank, which issues no NCCL operations
  try: --plan dp=2
""",
    ),
    (
        "check --plan dp=2 --nccl --inject stale-gather",
        1,
        """
error: --inject stale-gather makes numbers wrong, and --nccl looks at none
  try: --inject stale-gather without --nccl
""",
    ),
    # Training.
    (
        "train byts",
        1,
        """
error: unknown recipe 'byts'; known: bytes, tiny, resnet50
  try: shardwise train bytes, or the path of a TOML file
""",
    ),
    (
        "train tiny --set steps=many",
        1,
        """
error: steps in --set wants a whole number, and is 'many'
  try: steps=4
""",
    ),
    (
        "train tiny --set balance.bias_rate=0.001",
        1,
        """
error: balance.bias_rate=0.001 balances experts, and model.experts=0 has none
  try: model.experts=8, or balance.bias_rate=0
""",
    ),
    (
        "train tiny --set model.dropout=1",
        1,
        """
error: model.dropout=1.0 is a share from 0 to 1
  try: model.dropout=0.1
""",
    ),
    (
        "train tiny --set optimizer.schedule=cosin",
        1,
        """
error: unknown optimizer.schedule 'cosin'; known: cosine, linear, constant, wsd (in --set)
  try: optimizer.schedule=cosine
""",
    ),
    (
        "train absent.toml",
        1,
        """
error: the recipe absent.toml cannot be read: No such file or directory
  try: shardwise train bytes, or a file that is there
""",
    ),
    (
        "train runs/absent",
        1,
        """
error: there is no recipe runs/absent
  try: shardwise train --folder runs/absent, to train there; or a TOML file
""",
    ),
    (
        "train tiny --verify-steps -1",
        1,
        """
error: --verify-steps -1: it must be 0 (never) or more
  try: --verify-steps 100
""",
    ),
    (
        "train tiny --metrics-port 70000",
        1,
        """
error: --metrics-port 70000: ports are 1 to 65535
  try: --metrics-port 9400
""",
    ),
    (
        "train tiny --metrics-file train.txt",
        1,
        """
error: --metrics-file train.txt: node_exporter reads files that end in .prom
  try: --metrics-file train.prom
""",
    ),
    (
        "train tiny --lr 1e-3",
        2,
        """
error: unknown option '--lr'; known: --help, --plan, --devices, --cluster, --share-gpus, --set, --folder, --verify-steps, --leave-out-slow, --metrics-port, --metrics-host, --metrics-file, --copies-every, --show, --json
  try: --set optimizer.rate=1e-3
""",  # noqa: E501
    ),
    (
        "train tiny --copies-every -1",
        1,
        """
error: --copies-every -1: it must be a number of steps
  try: --copies-every 0 for none
""",
    ),
    (
        "train tiny --batch-size=4",
        2,
        """
error: unknown option '--batch-size'; known: --help, --plan, --devices, --cluster, --share-gpus, --set, --folder, --verify-steps, --leave-out-slow, --metrics-port, --metrics-host, --metrics-file, --copies-every, --show, --json
  try: --set batch=4
""",  # noqa: E501
    ),
    (
        "train tiny --resume mine",
        2,
        """
error: unknown option '--resume'; known: --help, --plan, --devices, --cluster, --share-gpus, --set, --folder, --verify-steps, --leave-out-slow, --metrics-port, --metrics-host, --metrics-file, --copies-every, --show, --json
  try: --folder mine
""",  # noqa: E501
    ),
    (
        "train folder",
        1,
        """
error: folder is a folder, not a recipe
  try: shardwise train --folder folder
""",
    ),
    (
        "train tiny --set precision=float16",
        1,
        """
error: unknown precision 'float16'; known: auto, fp32, bf16, fp16, fp8, fp8-rows (in --set)
  try: precision=fp16
""",
    ),
    (
        "check --plan dp=2,precision=bfloat16",
        1,
        """
error: unknown precision 'bfloat16'; known: fp32, bf16, fp16, fp8, fp8-rows
  try: precision=bf16
""",
    ),
    (
        "check --plan dp=2 pad=True",
        1,
        """
error: pad is no key of a plan, but an argument of sw.parallelize
  try: sw.parallelize(module, plan, pad=True, ...)
""",
    ),
    (
        "check --plan dp=2 tp=2",
        2,
        """
error: not understood: tp=2
  try: --plan dp=2,tp=2
""",
    ),
    (
        "train tiny --set batch=7 --plan dp=2",
        1,
        """
error: a batch of 7 rows cannot be divided evenly under dp=2
  try: --set batch=6 or --set batch=8
""",
    ),
    (
        "train tiny --devices 0",
        1,
        """
error: --devices 0: it must be at least 1
  try: --devices 1
""",
    ),
    (
        "train tiny --plan dp=3 --devices 2",
        1,
        """
error: plan dp=3 needs 3 ranks but there are 2
  try: 3 ranks, or a plan whose dp, tp, pp and cp multiply to 2
""",
    ),
    (
        "train tiny --plan dp=2 --set data.source=absent.tokens",
        1,
        """
error: the token file absent.tokens cannot be read: No such file or directory
  try: shardwise data INPUT --save FILE makes a token file
""",
    ),
    (
        "data",
        1,
        """
error: there is nothing to read
  try: shardwise data stdlib, or a file of text
""",
    ),
    (
        "data absent.txt",
        1,
        """
error: absent.txt does not exist
  try: a file of text, .jsonl or .parquet, or stdlib
""",
    ),
    (
        "data --check three.csv",
        1,
        """
error: three.csv is not a token file: its header, from byte 0 on, does not say so
  try: shardwise data INPUT --save FILE makes a token file
""",
    ),
    (
        "data empty.schedule --save out.tokens",
        1,
        """
error: empty.schedule is empty, at byte 0
  try: a file with text in it
""",
    ),
    (
        "convert",
        1,
        """
error: SOURCE is missing
  try: shardwise convert SOURCE TARGET
""",
    ),
    (
        "convert folder target",
        1,
        """
error: folder has neither index.json nor config.json nor .metadata, so it is not a checkpoint that Shardwise can read
  try: a run, one of its checkpoints, or a Hugging Face folder
""",
    ),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


@pytest.mark.parametrize(("words", "status", "text"), ERRORS, ids=[words for words, _, _ in ERRORS])
def test_the_error_says_what_is_wrong_and_what_to_type(
    words: str, status: int, text: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == status
    captured = capsys.readouterr()
    assert captured.err == text.removeprefix("\n")
    assert captured.out == ""
    assert {path.name for path in folder.iterdir()} == {*FILES, "folder"}, "a mistake leaves nothing behind"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["schedule", ""], f"error: unknown schedule ''; known: {NAMES}\n"),
        (["schedule", "ünï çødé"], f"error: unknown schedule 'ünï çødé'; known: {NAMES}\n"),
        (["schedule", "n" * 400], f"error: unknown schedule '{'n' * 57}...'; known: {NAMES}\n"),
        (["schedule", "\0.schedule"], "error: the schedule file \0.schedule cannot be read: it is not text\n"),
        (["schedule", "n" * 400 + ".schedule"], f"error: the schedule file {'n' * 400}.schedule cannot be read: "),
        (["--times", ""], "error: --times: there are three times, F,I,W, but '' has 0\n"),
        (["--hop", " "], "error: --hop: '' is not a number\n"),
        (["--memory", ""], "error: --memory: '' is not a number\n"),
        (["--stage-times", ""], "error: the stage times in . cannot be read: Is a directory\n"),
        (["--save", ""], "error: . cannot be written: it is a folder\n"),
        (["--save", f"{'n' * 400}.svg"], f"error: {'n' * 400}.svg cannot be written: File name too long\n"),
    ],
)
def test_what_no_shell_line_shows_is_told_too(
    words: list[str], text: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if words[0] != "schedule":
        words = ["schedule", "1f1b", "--stages", "2", "--microbatches", "2", *words]
    assert main(words) == 1
    assert capsys.readouterr().err.startswith(text)
    assert {path.name for path in folder.iterdir()} == {*FILES, "folder"}
