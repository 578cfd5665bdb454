"""The config: what it refuses and in which words, what YAML and overrides mean, that it never changes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from megatron_tree.config import Config, ConfigError, load
from megatron_tree.layout import ParallelLayout

MINIMAL = """\
run: {dir: runs/x}
model: {path: model}
environment: {target: "pack.world:World"}
reward: {target: "pack.world:Reward", options: {scale: 2}}
"""


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "config.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_defaults_fit_together(write):
    config = load(write(MINIMAL))
    assert config.reward.options == {"scale": 2}
    # the authors' settings (FACTS section 5): M, N, L = 2, 2, 1, so G = 2 * (1 + 1 * 2) = 6 leaves a prompt
    assert config.rollout.trees * config.rollout.leaves_per_tree == 6
    assert (config.train.optimizer.lr, config.algo.kl_coef, config.algo.clip_dual) == (1e-6, 0.001, 3.0)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-6", 1e-6), ("1E-6", 1e-6), ("2.5e-4", 2.5e-4), (".5e1", 5.0), ("1", 1.0), ("0.25", 0.25)],
)
def test_numbers_as_people_write_them(write, text: str, value: float):
    in_file = load(write(f"{MINIMAL}train: {{optimizer: {{lr: {text}}}}}\n"))
    as_override = load(write(MINIMAL), [f"train.optimizer.lr={text}"])
    assert in_file.train.optimizer.lr == as_override.train.optimizer.lr == value


def test_a_string_that_looks_like_no_number_stays_one(write):
    assert load(write(MINIMAL), ["run.dir=1e-6x"]).run.dir == "1e-6x"


def test_overrides_replace_and_add(write):
    overrides = [
        "run.seed=3",
        "train.parallel.tp=2",
        "train.parallel.pp=2",
        "data.train=[a.jsonl, b.parquet]",
    ]
    config = load(
        write(MINIMAL + "train: {iterations: 5}\n"), [*overrides, "algo.clip_dual=null", "run.seed=4"]
    )
    assert config.run.seed == 4
    assert config.train.iterations == 5
    assert config.train.parallel.layout == ParallelLayout(tp=2, pp=2)
    assert config.data.train == ("a.jsonl", "b.parquet")
    assert config.algo.clip_dual is None


def test_frozen(write):
    config: Config = load(write(MINIMAL))
    with pytest.raises(ValidationError, match="frozen"):
        config.train.iterations = 7  # type: ignore[misc]


ONE_FAULT = {
    "x=1": "x: unknown key, got 1",
    "algo.clip=1": "algo.clip: unknown key, got 1",
    "engine=3": "engine: must be a section of keys, got 3",
    "rollout.async_depth=2": "rollout.async_depth: Input should be less than or equal to 1, got 2",
    "train.iterations=0": "train.iterations: Input should be greater than or equal to 1, got 0",
    "train.iterations=1.5": "train.iterations: Input should be a valid integer, got 1.5",
    "train.iterations='3'": "train.iterations: Input should be a valid integer, got '3'",
    "train.iterations=true": "train.iterations: Input should be a valid integer, got True",
    "run.seed=": "run.seed: Input should be a valid integer, got None",
    "run.dir=5": "run.dir: Input should be a valid string, got 5",
    "model.dtype=fp16": "model.dtype: Input should be 'fp32' or 'bf16', got 'fp16'",
    "algo.clip_low=.nan": "algo.clip_low: Input should be a finite number, got nan",
    "algo.kl_coef=.inf": "algo.kl_coef: Input should be a finite number, got inf",
    "environment.target=nope": r"environment.target: String should match pattern '^[\w.]+:\w+$', got 'nope'",
    "data.train=a.jsonl": "data.train: must be a list, got 'a.jsonl'",
    "data.train=[1]": "data.train.0: Input should be a valid string, got 1",
    "sft={data: [a.jsonl]}": "sft.steps: Field required",
    "{algo.clip_low=2,algo.clip_dual=1}": "algo.clip_low: Input should be less than 1, got 2 (and 1 more)",
    f"run.dir=[{'long, ' * 30}]": "run.dir: Input should be a valid string, got "
    "['long', 'long', 'long', 'long', 'long', 'long', 'long', 'long', 'long', 'lon...",
}
LONGEST = "data.max_prompt_tokens + rollout.max_path_tokens = 6144"  # 2048 + 4096
NO_ROWS = "data.eval: eval.every, eval.at_start and eval.at_end need at least one file, got none"
CONTRADICTIONS = {
    "{algo.inter_weight=0,algo.intra_weight=0}": (
        "algo.inter_weight and intra_weight: at least one must be above 0, got 0 and 0"
    ),
    "train.optimizer.min_lr=1e-5": "train.optimizer.min_lr: must not be above lr 1e-06, got 1e-05",
    "engine.max_model_len=100": f"engine.max_model_len: must hold {LONGEST}, got 100",
    "train.micro_batch_tokens=6143": (
        f"train.micro_batch_tokens: must hold the longest path, {LONGEST}, got 6143"
    ),
    "train.mini_batches=5": "train.mini_batches: must divide rollout.prompts 64, got 5",
    "{run.deterministic=true,model.dtype=fp32}": (
        "run.deterministic: needs model.dtype and engine.dtype fp32, got fp32 and bf16"
    ),
    "rollout.async_depth=1": (
        "algo.importance_cap: must be set where rollout.async_depth is 1, since its trees are one version "
        "older than the weights that they train, got null"
    ),
    "{engine.quantization=fp8,engine.dtype=fp32}": (
        "engine.dtype: must be bf16 where quantization is set (vLLM's rule), got fp32"
    ),
    "{engine.quantization=fp8,algo.importance_cap=null,rollout.async_depth=1}": (
        "algo.importance_cap: must be set where rollout.async_depth is 1, since its trees are one version "
        "older than the weights that they train, got null"
    ),
    "{train.fp8.recipe=delayed,train.fp8.first_last_layers_bf16=1}": (
        "train.fp8.first_last_layers_bf16: must be 0 with delayed scaling (Megatron-Core's rule), got 1"
    ),
    "{train.fp8.recipe=blockwise,train.fp8.param_gather=true}": (
        "train.fp8.param_gather: needs parallel.distributed_optimizer, which gathers weights, got false"
    ),
    "{train.fp8.recipe=blockwise,train.fp8.param_gather=true,train.parallel.distributed_optimizer=true,"
    "model.dtype=fp32}": "train.fp8.param_gather: needs model.dtype bf16, got fp32",
    "engine.transport=ipc": (
        "engine.transport: ipc needs cluster.placement colocated, where ranks and engines share GPUs, got "
        "auto"
    ),
    "{engine.transport=stream,cluster.placement=colocated}": (
        "engine.transport: must be auto, shm or ipc with cluster.placement colocated, since NCCL does "
        "not join two processes on one GPU, got stream"
    ),
    "eval.every=1": NO_ROWS,
    "eval.at_start=true": NO_ROWS,
    "eval.at_end=true": NO_ROWS,
}


@pytest.mark.parametrize(
    ("overrides", "cap"),
    [
        ((), None),
        (("engine.quantization=fp8",), 2.0),
        (("engine.quantization=fp8", "algo.kl_coef=0"), 2.0),
        (("engine.quantization=fp8", "algo.importance_cap=5.0"), 5.0),
        (("engine.quantization=fp8", "algo.importance_cap=null"), None),  # off, deliberately
        (("engine.quantization=null", "algo.importance_cap=3.0"), 3.0),
    ],
)
def test_quantized_engines_are_corrected_for_unless_told_otherwise(write, overrides: tuple[str, ...], cap):
    config = load(write(MINIMAL), overrides)
    assert config.algo.importance_cap == cap
    again = Config.model_validate(config.model_dump())  # as a run folder's config.yaml is read
    assert again == config


@pytest.mark.parametrize(("overrides", "message"), (ONE_FAULT | CONTRADICTIONS).items())
def test_refused_values(write, overrides: str, message: str):
    path = write(MINIMAL)
    several = overrides.startswith("{") and overrides.endswith("}")
    with pytest.raises(ConfigError) as refusal:
        load(path, overrides[1:-1].split(",") if several else [overrides])
    assert str(refusal.value) == f"{path}: {message}"


@pytest.mark.parametrize(
    ("override", "message"),
    {
        "a": "override: must be key.sub=value, got 'a'",
        "=1": "override: must be key.sub=value, got '=1'",
        "run.dir.x=1": "override run.dir.x: dir is not a section, got 'runs/x'",
        "run.seed=[1": "override run.seed: the value is not YAML, got '[1'",
    }.items(),
)
def test_refused_overrides(write, override: str, message: str):
    with pytest.raises(ConfigError) as refusal:
        load(write(MINIMAL), [override])
    assert str(refusal.value) == message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "must be a mapping of sections, got NoneType"),
        (b"- a\n", "must be a mapping of sections, got list"),
        (MINIMAL.encode() + b"1: 2\n", "1: Keys should be strings, got 1"),
        (b"run: {seed: 1}\n", "run.dir: Field required (and 3 more)"),
        (b"algo: [", "not YAML: while parsing a flow node expected the node content"),
        (
            b"algo: {kl_coef: 0, kl_coef: 1}",
            'not YAML: key kl_coef is given twice in "<unicode string>", line 1',
        ),
        (b"a: 1\nb: 2\na: 3\n", "not YAML: key a is given twice"),
        (b"\xff\xfe", "cannot read the config: not UTF-8 text"),
    ],
)
def test_refused_files(tmp_path: Path, content: bytes, message: str):
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(f"{path}: {message}")) as refusal:
        load(path)
    assert "\n" not in str(refusal.value)


def test_no_file(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot read the config: No such file or directory$"):
        load(tmp_path / "none.yaml")
