"""Every knob, once: its type, unit, default and check. `load(yaml, overrides)` is the only way in.

Models are frozen and strict; an unknown key is an error. Units are in the names. What needs the model's shape
(heads that divide by tp, layers by pp) is checked by `reshard.names.check_model`, what needs the machine by
`cluster`.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from megatron_tree.layout import ParallelLayout

QUANTIZED_IMPORTANCE_CAP = 2.0  # of truncated importance sampling, where engines round what trainers do not


class ConfigError(ValueError):
    """A wrong config: one line naming the field, the rule and the value got."""


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


Texts = Annotated[tuple[str, ...], Field(strict=False)]
Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]


class RunConfig(Section):
    dir: str  # run folder; metrics, trees, TensorBoard and checkpoints go there
    seed: NonNegative = 0
    deterministic: bool = False  # fp32, seeds per path: two runs give the same metrics bit for bit
    resume: bool = False  # go on from the latest checkpoint of the run folder
    wandb_project: str | None = None  # metrics go there too; needs the package wandb and a log-in


class ModelConfig(Section):
    path: str  # Hugging Face folder: config.json, safetensors, tokenizer
    dtype: Literal["fp32", "bf16"] = "bf16"  # of the trainer's weights; gradients and optimizer are fp32


class DataConfig(Section):
    train: Texts = ()  # .parquet or .jsonl files
    eval: Texts = ()
    max_prompt_tokens: Positive = 2048
    overlong: Literal["skip", "refuse"] = "skip"
    shuffle: bool = True


class PluginConfig(Section):
    """A class of the user's (or ours): `module:Class`, called with `options` as keyword arguments."""

    target: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]
    options: dict[str, Any] = {}


class RolloutConfig(Section):
    prompts: Positive = 64  # per iteration
    trees: Positive = 2  # M, per prompt
    expand_nodes: Positive = 2  # N, per tree and round
    expand_rounds: NonNegative = 1  # L; 0 is chain GRPO
    root: Literal["fallback", "always", "never"] = "fallback"  # when the prompt itself may be expanded
    max_turns: Positive = 4  # per path
    max_tool_calls: NonNegative = 3  # per path
    max_path_tokens: Positive = 4096  # sampled and observed tokens of a path, without the prompt
    max_turn_tokens: Positive = 500
    max_observation_tokens: Positive = 500
    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    async_depth: Annotated[int, Field(ge=0, le=1)] = 0
    """1: the next iteration's trees grow while this one trains, hence under weights one version old."""

    @property
    def leaves_per_tree(self) -> int:
        return 1 + self.expand_rounds * self.expand_nodes


class AlgoConfig(Section):
    inter_weight: Annotated[float, Field(ge=0)] = 1.0  # of the advantage across the leaves of a prompt
    intra_weight: Annotated[float, Field(ge=0)] = 1.0  # of the advantage inside a tree
    credit: Literal["zscore", "mean", "leave_one_out", "sibling"] = "zscore"
    normaliser: Literal["sequence_mean", "token_mean"] = "sequence_mean"
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    clip_dual: Annotated[float, Field(gt=1)] | None = 3.0
    kl_coef: Annotated[float, Field(ge=0)] = 0.001  # beta of the K3 estimator; 0 needs no reference model
    importance_cap: Annotated[float, Field(gt=0)] | None = None
    """Of the trainer/engine ratio; null: none. Left out, it is 2 where engine.quantization is set."""

    @model_validator(mode="after")
    def _some_advantage(self) -> Self:
        if self.inter_weight == 0 and self.intra_weight == 0:
            raise ValueError("inter_weight and intra_weight: at least one must be above 0, got 0 and 0")
        return self


class OptimizerConfig(Section):
    lr: Annotated[float, Field(gt=0)] = 1e-6
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NonNegative = 0
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    clip_grad: Annotated[float, Field(gt=0)] = 1.0  # global norm

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr: must not be above lr {self.lr}, got {self.min_lr}")
        return self


class ParallelConfig(Section):
    tp: Positive = 1
    pp: Positive = 1
    vpp: Positive = 1  # model chunks per stage (interleaved 1F1B)
    cp: Positive = 1  # context parallelism: ranks that share the tokens of a micro-batch
    dp: Positive = 1
    stage_split: Annotated[tuple[NonNegative, ...], Field(strict=False)] | None = None
    """Layers of every model chunk in pipeline order, pp * vpp numbers; null: equal."""
    sequence_parallel: bool = False  # norms and residuals are split over the tp ranks
    distributed_optimizer: bool = False  # optimizer states are split over the dp and cp ranks

    @model_validator(mode="after")
    def _possible(self) -> Self:
        _ = self.layout  # raises where it is none
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("sequence_parallel: needs tp above 1, got 1")
        return self

    @property
    def layout(self) -> ParallelLayout:
        return ParallelLayout(
            tp=self.tp, pp=self.pp, vpp=self.vpp, cp=self.cp, dp=self.dp, stage_split=self.stage_split
        )

    @property
    def token_multiple(self) -> int:
        """Lengths of micro-batches are multiples of it: each cp rank takes two equal parts, each tp rank one
        of those under sequence parallelism."""
        return (self.tp if self.sequence_parallel else 1) * (2 * self.cp if self.cp > 1 else 1)


class Fp8Config(Section):
    """FP8 products in the linear layers; gradients and optimizer keep their types. Without a GPU the rounding
    is emulated. What a device and a model must have: `train.precision`."""

    recipe: Literal["tensorwise", "delayed", "blockwise", "mxfp8"]
    format: Literal["hybrid", "e4m3"] = "hybrid"  # hybrid: output gradients in E5M2
    first_last_layers_bf16: NonNegative = 0  # so many layers at either end stay in model.dtype
    param_gather: bool = False  # weights are kept, and gathered over dp, in FP8; GPU only

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.recipe == "delayed" and self.first_last_layers_bf16:
            raise ValueError(
                f"first_last_layers_bf16: must be 0 with delayed scaling (Megatron-Core's rule), "
                f"got {self.first_last_layers_bf16}"
            )
        if self.recipe == "mxfp8" and self.param_gather:
            raise ValueError(
                "param_gather: must be false with mxfp8, whose weights Megatron-Core gathers through the "
                "gradient buffer while it overlaps both, got true"
            )
        return self

    @property
    def multiple(self) -> int:
        """Of the rows and columns of every operand: what the products of the recipe take."""
        return {"tensorwise": 16, "delayed": 16, "mxfp8": 32, "blockwise": 128}[self.recipe]


class KernelsConfig(Section):
    """Which implementations a rank trains with; `doctor` says what `auto` is here, and why."""

    layers: Literal["auto", "local", "te"] = "auto"  # linear layers and norms: ours, Transformer Engine's
    optimizer: Literal["auto", "torch", "fused"] = "auto"  # fused: Transformer Engine's or Apex's AdamW
    weight_gradients: Literal["auto", "separate", "fused"] = "auto"  # fused: added up by the product itself


class RecomputeConfig(Section):
    """Activations that the backward pass computes again instead of keeping them."""

    granularity: Literal["none", "selective", "full"] = "none"
    modules: Annotated[tuple[Literal["core_attn", "mlp"], ...], Field(strict=False)] = ("core_attn",)
    """What `selective` recomputes."""
    layers: Positive = 1  # consecutive layers of which `full` keeps the first one's input only

    @model_validator(mode="after")
    def _used(self) -> Self:
        if self.granularity == "selective" and not self.modules:
            raise ValueError("modules: selective recomputation needs at least one, got none")
        return self


class TrainConfig(Section):
    iterations: Positive = 100
    mini_batches: Positive = 1  # optimizer steps per iteration; prompts are dealt to them
    micro_batch_tokens: Positive = 8192  # packed tokens of a micro-batch
    parallel: ParallelConfig = ParallelConfig()
    recompute: RecomputeConfig = RecomputeConfig()
    fp8: Fp8Config | None = None
    kernels: KernelsConfig = KernelsConfig()
    attention: Literal["auto", "node", "flex", "varlen"] = "auto"  # doctor says what auto is here
    optimizer: OptimizerConfig = OptimizerConfig()
    max_skipped_steps: Positive = 3  # non-finite steps in a row before the run stops
    checkpoint_every: NonNegative = 0  # iterations; 0 saves at the end only
    keep_checkpoints: Positive = 2
    export_checkpoints: bool = False  # a Hugging Face folder, hf/, beside each checkpoint
    max_restarts: NonNegative = 2  # of the trainer group after a rank died
    start_timeout_s: Seconds = 600.0
    step_timeout_s: Seconds = 1800.0  # of any one call of the trainer group
    collective_timeout_s: Seconds = 600.0

    @model_validator(mode="after")
    def _gathers(self) -> Self:
        if self.fp8 is not None and self.fp8.param_gather and not self.parallel.distributed_optimizer:
            raise ValueError(
                "fp8.param_gather: needs parallel.distributed_optimizer, which gathers weights, got false"
            )
        return self

    @property
    def token_multiple(self) -> int:
        """Lengths of micro-batches are multiples of it."""
        return self.parallel.token_multiple * (self.fp8.multiple if self.fp8 is not None else 1)


class SftConfig(Section):
    """Warm-up on demonstrations, before the first iteration and before the reference model is taken."""

    data: Texts  # .jsonl files of demonstrations: {prompt, turns: [{action, observation}]}
    steps: Positive
    batch_size: Positive = 64  # demonstrations per step
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)


class EvalConfig(Section):
    every: NonNegative = 0  # iterations; 0 is never during training
    at_start: bool = False
    at_end: bool = False
    samples: Positive = 1  # chains per row at `temperature`
    temperature: Annotated[float, Field(ge=0)] = 1.0
    greedy: bool = True  # report greedy chains beside the sampled ones
    max_rows: Positive | None = None  # the first rows of the files in their order
    seed: NonNegative = 1000  # the same before and after training


class EngineConfig(Section):
    count: Positive = 1
    tp: Positive = 1
    dtype: Literal["fp32", "bf16"] = "bf16"
    quantization: Literal["fp8"] | None = None
    """Of the linear layers' weights and inputs, by the engine itself from weights published in `dtype`: FP8
    (E4M3) with a scale per output channel and per token."""
    max_model_len: Positive = 6144  # tokens of prompt and path
    max_num_seqs: Positive = 64  # sequences that decode together
    block_size: Positive = 32  # tokens; granularity of the prefix cache (a multiple of 32 on a CPU)
    kv_cache_gib: Annotated[float, Field(gt=0)] = 1.0  # per rank; CPU only
    cpu_threads: Positive = 1  # OpenMP threads per rank; CPU only
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.85  # GPU only
    start_timeout_s: Seconds = 600.0
    request_timeout_s: Seconds = 600.0
    update_timeout_s: Seconds = 300.0
    max_restarts: NonNegative = 3  # of one engine, in a run
    transport: Literal["auto", "shm", "stream", "ipc"] = "auto"
    """How a version comes to the engines. shm: through an image in `image_dir`, on one host. stream: trainers
    send it to engines anywhere, by NCCL or on a CPU by gloo. ipc: each rank lends it to the engine workers on
    its own GPU, by CUDA IPC. auto: shm where all share `image_dir`, else stream, or ipc where colocated."""
    image_dir: str = "/dev/shm"  # where the publish image lies; trainers and engines must share it

    @model_validator(mode="after")
    def _served(self) -> Self:
        if self.quantization is not None and self.dtype != "bf16":
            raise ValueError(f"dtype: must be bf16 where quantization is set (vLLM's rule), got {self.dtype}")
        return self

    @property
    def is_sent(self) -> bool:
        """A version comes from the trainers themselves, not from an image."""
        return self.transport in ("stream", "ipc")


class ClusterConfig(Section):
    placement: Literal["auto", "disaggregated", "colocated", "cpu"] = "auto"
    """disaggregated: trainer ranks and engine workers have GPUs of their own. colocated: they take turns on
    the same ones. cpu: no GPU is used. auto: disaggregated where the cluster has GPUs, else cpu."""


class PlanConfig(Section):
    """The hardware that `megatron-tree plan` estimates for, and whose memory colocated runs are checked
    against before they start. Defaults: an H100-class GPU in nodes of eight."""

    device: Literal["gpu", "cpu"] = "gpu"  # cpu: memory is not checked, the KV cache is engine.kv_cache_gib
    devices: Positive | None = None  # GPUs of the cluster; null: as many as ranks and engine workers need
    compute_capability: Annotated[float, Field(gt=0)] = 9.0  # CUDA's, of a GPU: which FP8 recipes it runs
    peak_tflops: Annotated[float, Field(gt=0)] = 989.0  # of one rank, dense, in the dtype trained in
    efficiency: Annotated[float, Field(gt=0, le=1)] = 0.4  # share of the peak that matrix products reach
    memory_gib: Annotated[float, Field(gt=0)] = 80.0  # of one rank
    reserve_gib: Annotated[float, Field(ge=0)] = 4.0  # of it, for the driver, NCCL, workspaces, fragments
    memory_gb_per_s: Annotated[float, Field(gt=0)] = 3350.0  # what decoding is bound by
    node_gb_per_s: Annotated[float, Field(gt=0)] = 450.0  # per rank, inside a node: tensor parallelism
    network_gb_per_s: Annotated[float, Field(gt=0)] = 50.0  # per rank: gradients, publishing
    fill: Annotated[float, Field(gt=0, le=1)] = 1.0  # share of the caps on prompts and turns that paths use


class Config(Section):
    run: RunConfig
    model: ModelConfig
    data: DataConfig = DataConfig()
    environment: PluginConfig
    reward: PluginConfig
    rollout: RolloutConfig = RolloutConfig()
    algo: AlgoConfig = AlgoConfig()
    train: TrainConfig = TrainConfig()
    sft: SftConfig | None = None
    eval: EvalConfig = EvalConfig()
    engine: EngineConfig = EngineConfig()
    cluster: ClusterConfig = ClusterConfig()
    plan: PlanConfig = PlanConfig()

    @model_validator(mode="before")
    @classmethod
    def _correct_quantized_engines(cls, sections: dict[str, Any]) -> dict[str, Any]:
        """The one default that another section decides. An explicit null stays: no correction."""
        engine, algo = sections.get("engine"), sections.get("algo", {})
        quantized = isinstance(engine, dict) and engine.get("quantization") is not None
        if quantized and isinstance(algo, dict):
            return {**sections, "algo": {"importance_cap": QUANTIZED_IMPORTANCE_CAP, **algo}}
        return sections

    @model_validator(mode="after")
    def _together(self) -> Self:
        longest = self.data.max_prompt_tokens + self.rollout.max_path_tokens
        if longest > self.engine.max_model_len:
            raise ValueError(
                "engine.max_model_len: must hold data.max_prompt_tokens + rollout.max_path_tokens = "
                f"{longest}, got {self.engine.max_model_len}"
            )
        if longest > self.train.micro_batch_tokens:
            raise ValueError(
                "train.micro_batch_tokens: must hold the longest path, data.max_prompt_tokens + "
                f"rollout.max_path_tokens = {longest}, got {self.train.micro_batch_tokens}"
            )
        multiple = self.train.token_multiple
        if self.train.micro_batch_tokens % multiple:
            raise ValueError(
                f"train.micro_batch_tokens: must be a multiple of {multiple} (tp under sequence parallelism, "
                f"times 2 * cp, times what train.fp8.recipe asks for), got {self.train.micro_batch_tokens}"
            )
        if self.rollout.prompts % self.train.mini_batches:
            raise ValueError(
                f"train.mini_batches: must divide rollout.prompts {self.rollout.prompts}, "
                f"got {self.train.mini_batches}"
            )
        if self.rollout.async_depth and self.algo.importance_cap is None:
            raise ValueError(
                "algo.importance_cap: must be set where rollout.async_depth is 1, since its trees are one "
                "version older than the weights that they train, got null"
            )
        if self.rollout.async_depth and self.cluster.placement == "colocated":
            raise ValueError(
                "rollout.async_depth: must be 0 with cluster.placement colocated, where engines sleep while "
                f"the trainer works, got {self.rollout.async_depth}"
            )
        if self.train.fp8 is not None and self.train.fp8.param_gather and self.model.dtype != "bf16":
            raise ValueError(f"train.fp8.param_gather: needs model.dtype bf16, got {self.model.dtype}")
        if self.engine.transport == "stream" and self.cluster.placement == "colocated":
            raise ValueError(
                "engine.transport: must be auto, shm or ipc with cluster.placement colocated, since NCCL "
                "does not join two processes on one GPU, got stream"
            )
        if self.engine.transport == "ipc" and self.cluster.placement != "colocated":
            raise ValueError(
                "engine.transport: ipc needs cluster.placement colocated, where ranks and engines share "
                f"GPUs, got {self.cluster.placement}"
            )
        if self.run.deterministic and (self.model.dtype, self.engine.dtype) != ("fp32", "fp32"):
            raise ValueError(
                "run.deterministic: needs model.dtype and engine.dtype fp32, got "
                f"{self.model.dtype} and {self.engine.dtype}"
            )
        if (self.eval.every or self.eval.at_start or self.eval.at_end) and not self.data.eval:
            raise ValueError(
                "data.eval: eval.every, eval.at_start and eval.at_end need at least one file, got none"
            )
        return self


def load(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """Reads a YAML file and applies `key.sub=value` overrides (values are YAML).

    Paths inside stay as they are written: relative to the working folder. Raises ConfigError.
    """
    try:
        tree = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{path}: cannot read the config: {reason}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: must be a mapping of sections, got {type(tree).__name__}")
    for override in overrides:
        _apply(tree, override)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{path}: {_first(error)}") from error


class _Loader(yaml.SafeLoader):
    """Where YAML 1.1 takes `1e-6` for a string and the last of two equal keys, this takes a number and
    refuses."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.MarkedYAMLError(problem=f"key {key} is given twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def _apply(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override: must be key.sub=value, got {override!r}")
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {key}: the value is not YAML, got {text!r}") from error
    *sections, last = key.split(".")
    here = tree
    for section in sections:
        if here.get(section) is None:
            here[section] = {}
        if not isinstance(here[section], dict):
            raise ConfigError(f"override {key}: {section} is not a section, got {here[section]!r}")
        here = here[section]
    here[last] = value


_RULES = {
    "extra_forbidden": "unknown key",
    "model_type": "must be a section of keys",
    "tuple_type": "must be a list",
}


def _first(error: ValidationError) -> str:
    """The first fault in one line, and how many more there are."""
    faults = error.errors()
    fault = faults[0]
    field = ".".join(str(part) for part in fault["loc"])
    rule = fault["msg"].removeprefix("Value error, ")
    rule = _RULES.get(fault["type"], rule)
    got = "" if fault["type"] in ("value_error", "missing") else f", got {_short(fault['input'])}"
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    # our own checks of a section begin with the key inside it
    joint = "." if fault["type"] == "value_error" else ": "
    return f"{field}{joint if field else ''}{rule}{got}{more}"


def _short(value: object) -> str:
    text = "nan" if isinstance(value, float) and math.isnan(value) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
