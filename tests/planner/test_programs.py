"""Plans as other programs' arguments and files: what is written is read back, and their own parsers take it."""

import dataclasses
import json
import shlex
import tomllib
from typing import Any, cast

import pytest

from shardwise.cli import main
from shardwise.command_line import CommandModule, make_parser, parse
from shardwise.planner import fit_command
from shardwise.planner.plan import Plan
from shardwise.planner.programs import vllm
from shardwise.planner.programs.choose import PROGRAMS, recognise
from shardwise.planner.programs.program import Job, Machine

PLANS = (
    "dp=8,microbatches=2,zero=1,precision=bf16",
    "dp=8,microbatches=2,zero=3,zero_group=4,recompute=full,precision=bf16",
    "dp=2,tp=2,pp=2,sp=true,microbatches=4,zero=1,schedule=interleaved,chunks=2,layers=7+8+9+8,precision=bf16",
    "dp=2,cp=2,tp=2,zero=2,recompute=selective,precision=fp8",
    "pp=8,microbatches=16,schedule=zb-v,precision=bf16,offload.activations=1",
    "dp=4,pp=2,microbatches=3,schedule=dualpipe-v,order=dp-pp-cp-tp,offload.optimizer=0.5,precision=fp16"
    .replace("dualpipe-v", "zb-h1"),
    "dp=8,ep=4,microbatches=2,zero=3,offload.parameters=1,recompute=full,recompute_layers=4,precision=fp8-rows",
    "dp=8",
)  # fmt: skip
MACHINE = Machine(num_devices=8, num_layers=32)


def written(name: str, text: str) -> tuple[Plan, str]:
    program = PROGRAMS[name]
    plan = program.nearest(Plan.parse(text))
    stages = plan.num_stages or 1
    layers = plan.layers or tuple(32 // stages + (stage < 32 % stages) for stage in range(stages))
    plan = program.with_layers(plan, layers)
    job = Job(plan=plan, batch=4 * plan.dp * plan.microbatches, sequence=4096)
    return plan, program.write(job)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("text", PLANS)
def test_what_is_written_is_read_back_as_the_same_plan(name: str, text: str) -> None:
    plan, made = written(name, text)
    program = PROGRAMS[name]
    assert not program.problems(plan)
    assert recognise(made) is program
    read = program.read(made, MACHINE)
    assert read.plan == plan
    assert read.batch == 4 * plan.dp * plan.microbatches
    assert plan.num_ranks == 8


def test_what_a_program_cannot_express_is_said_with_the_plans_own_values() -> None:
    found = PROGRAMS["megatron"].problems(Plan.parse("pp=8,microbatches=16,schedule=zb-v,precision=bf16"))
    assert found == ["Megatron-LM runs 1F1B, with or without virtual stages, and not schedule=zb-v"]


def test_megatrons_text_is_this() -> None:
    assert written("megatron", PLANS[2])[1].split("\n")[:9] == [
        "--tensor-model-parallel-size 2",
        "--pipeline-model-parallel-size 2",
        "--context-parallel-size 1",
        "--micro-batch-size 4",
        "--global-batch-size 32",
        "--seq-length 4096",
        "--pipeline-model-parallel-layout 'Ettttttt|tttttttt|ttttttttt|ttttttttL'",
        "--sequence-parallel",
        "--use-distributed-optimizer",
    ]


def test_megatron_core_takes_the_layout_of_stages() -> None:
    layout = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout", exc_type=ImportError)
    words = shlex.split(written("megatron", PLANS[2])[1])
    text = words[words.index("--pipeline-model-parallel-layout") + 1]
    made = layout.PipelineParallelLayerLayout.from_str(text, 2)
    made.validate_layer_layout(num_layers=32, mtp_num_layers=0)


@pytest.mark.parametrize("text", PLANS)
def test_torchtitans_settings_are_those_of_its_own_classes(text: str) -> None:
    configs: Any = pytest.importorskip("torchtitan.config.configs", exc_type=ImportError)
    tree = tomllib.loads(written("torchtitan", text)[1])
    made = configs.ParallelismConfig(**tree["parallelism"])
    assert made.tensor_parallel_degree == tree["parallelism"]["tensor_parallel_degree"]
    assert configs.TrainingConfig(**tree["training"]).seq_len == 4096
    assert {"enable"} <= {each.name for each in dataclasses.fields(configs.CompileConfig)}


@pytest.mark.parametrize("text", PLANS)
def test_accelerate_reads_its_file(text: str, tmp_path: Any) -> None:
    config: Any = pytest.importorskip("accelerate.commands.config.config_args", exc_type=ImportError)
    plan, made = written("accelerate", text)
    path = tmp_path / "accelerate.yaml"
    path.write_text(made)
    found = config.load_config_from_file(str(path))
    assert found.num_processes == 8
    assert (found.distributed_type.value == "FSDP") == (plan.zero >= 2)


@pytest.mark.parametrize("text", PLANS)
def test_deepspeed_takes_its_file(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config: Any = pytest.importorskip("deepspeed.runtime.config", exc_type=ImportError)
    monkeypatch.setattr(config.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(config.dist, "get_world_size", lambda: 8)
    plan, made = written("deepspeed", text)
    assert config.DeepSpeedConfig(json.loads(made)).zero_config.stage == plan.zero


def test_a_command_line_of_vllm_is_read_with_short_and_long_names() -> None:
    found = vllm.read("vllm serve x -tp 4 --pipeline-parallel-size=2 --max-num-seqs 64 --max-model-len 2048")
    assert (found.tp, found.pp, found.dp, found.sequences, found.longest) == (4, 2, 1, 64, 2048)


def test_what_a_command_line_of_vllm_says_and_is_not_priced_is_told() -> None:
    said = "vllm serve x --quantization fp8 --kv_cache_dtype=fp8 --gpu-memory-utilization 0.90 --dtype auto -q none"
    assert vllm.read(said).unpriced == (
        "--quantization fp8 is not priced: quantization is taken as none",
        "--kv_cache_dtype fp8 is not priced: kv-cache-dtype is taken as auto",
    )


@pytest.mark.parametrize("model", ["mixtral-8x7b", "llama3-8b"])
def test_what_vllm_is_told_is_read_back(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [model, "--cluster", "8xh100"]
    assert main(["plan", *words, "--task", "serve", "--for", "vllm", "--sequence", "1024", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert main(["fit", *words, "--from", made["text"], "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert read["not_priced"] == []
    for name in ("plan", "sequences", "tokens_per_second", "kv_blocks"):
        assert read[name] == made[name]


@pytest.mark.parametrize(
    "name", [pytest.param("megatron", marks=pytest.mark.whole), "torchtitan",
             pytest.param("accelerate", marks=pytest.mark.whole)],
)  # fmt: skip
def test_plans_in_fp8_are_written_and_read_back_with_their_seconds(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["llama3-8b", "--cluster", "8xh100", "--sequence", "4096", "--batch", "64", "--json"]
    fixed = "precision=fp8,dp=8,pp=1,tp=1,cp=1,microbatches=8"
    assert main(["plan", *words, "--for", name, "--fix", fixed]) == 0
    made = json.loads(capsys.readouterr().out)
    assert "precision=fp8" in made["plan"]
    assert main(["fit", *words, "--from", made["text"]]) == 0
    read = json.loads(capsys.readouterr().out)
    assert read["plan"] == made["plan"]
    assert read["seconds"] == pytest.approx(made["seconds"])


def test_arguments_need_no_word_before_them(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["fit", "llama3-8b", "--cluster", "8xh100", "--from"]
    # It is read, and does not fit.
    assert main([*words, "--tensor-model-parallel-size 2 --global-batch-size 32 --bf16", "--json"]) == 1
    read = json.loads(capsys.readouterr().out)
    assert read["plan"] == "dp=4,tp=2,microbatches=8,precision=bf16"


@pytest.mark.parametrize("said", ["--bf16", "--use-distributed-optimizer", "pretrain_gpt.py"])
def test_one_argument_is_enough(said: str) -> None:
    assert recognise(said).name == "megatron"
    parser = make_parser("fit", cast(CommandModule, fit_command))
    words = ["llama3-8b", "--cluster", "8xh100", "--from", said, "--batch", "32"]
    read = parse(parser, words, cast(CommandModule, fit_command))
    assert (read.source, read.batch) == (said, 32)


def test_an_example_has_the_options_that_were_typed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "llama3-8b", "--lora", "16"]) == 2
    assert "--lora 16" in capsys.readouterr().err


@pytest.mark.parametrize("cluster", ["8xh100", "4xa100-40g"])
def test_plan_for_and_fit_from_agree(cluster: str, capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    path = tmp_path / "ds_config.json"
    # Its best plan for four A100 with 40 GB is on the host: without the host none fits, and one of those was printed.
    words = ["llama3-8b", "--cluster", cluster, "--sequence", "2048"]
    assert main(["plan", *words, "--batch", "32", "--for", "deepspeed", "--save", str(path), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert main(["fit", *words, "--from", str(path), "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert read["plan"] == made["plan"]
    assert read["seconds"] == pytest.approx(made["seconds"])
    assert read["better"] is None


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["fit", "llama3-8b", "--cluster", "8xh100"], "neither --plan nor --from is given"),
        (
            ["fit", "llama3-8b", "--cluster", "8xh100", "--from", "hello there"],
            "no program is recognised in 'hello there'",
        ),
        (["fit", "llama3-8b", "--cluster", "8xh100", "--from", "none.json"], "none.json cannot be read"),
        (
            ["plan", "llama3-8b", "--cluster", "8xh100", "--batch", "8", "--sequence", "64", "--for", "megatorn"],
            "megatorn",
        ),
        (
            ["plan", "llama3-8b", "--cluster", "8xh100", "--batch", "8", "--for", "vllm"],
            "vLLM serves and does not train",
        ),
        (
            ["fit", "llama3-8b", "--cluster", "8xh100", "--from", "vllm serve x --tensor-parallel-size 3"],
            # No number of replicas of three devices makes eight.
            "parallel ranks are 3, and 8xh100-80g has 8 devices\n  try: a cluster of 3 devices\n",
        ),
    ],
)
def test_mistakes_are_said_in_a_sentence(words: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 1
    assert problem in capsys.readouterr().err
