"""Forward and training passes of one rank over its pipeline: Megatron's own schedules, our loss.

A micro-batch goes to every stage (each needs positions and mask); activations travel between stages,
log-probs stay on the last. Non-finite losses and gradients are agreed over all ranks before the step: without
a gradient scaler Megatron would step on a NaN norm. Not here: where micro-batches come from (`algo.packing`),
processes (`rank`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_tree.config import OptimizerConfig
from megatron_tree.metrics import Metrics, merge
from megatron_tree.train import fp8_layers
from megatron_tree.train.group import StepResult
from megatron_tree.train.model import TreeGPTModel
from megatron_tree.train.tree_mask import TreeMask
from megatron_tree.types import MicroBatch

Loss = Callable[[Tensor, MicroBatch], tuple[Tensor, Metrics]]
"""log-probs [T] and their micro-batch -> (sum over the trained tokens, metrics)."""


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Rate of step 0, 1, ...: linear warm-up (its first step is not 0), then constant, or down to `min_lr`.

    Worked example: warmup_steps 2, lr 1: 0.5, 1, then the schedule.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    span = max(total_steps - config.warmup_steps, 1)
    done = min((step - config.warmup_steps) / span, 1.0)
    left = 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.min_lr + (config.lr - config.min_lr) * left


def wrap(chunks: Sequence[TreeGPTModel], *, distributed_optimizer: bool) -> list[DistributedDataParallel]:
    """Gradient buffers in fp32, summed (not averaged) over data- and context-parallel ranks."""
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,
        use_distributed_optimizer=distributed_optimizer,
        fp8_param_gather=chunks[0].config.fp8_param,
    )
    chunks[0].config.finalize_model_grads_func = finalize_model_grads  # one config for all chunks
    return [DistributedDataParallel(chunk.config, ddp, chunk) for chunk in chunks]


def make_optimizer(chunks: Sequence[DistributedDataParallel], config: OptimizerConfig) -> MegatronOptimizer:
    """Megatron's AdamW, distributed where the gradient buffers are. Norms and biases do not decay (Megatron's
    rule, which its own scheduler, not used here, applies)."""
    model = chunks[0].config
    for chunk in chunks:
        fp8_layers.forget_taken(chunk)
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.min_lr,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            adam_eps=config.eps,
            weight_decay=config.weight_decay,
            clip_grad=config.clip_grad,
            bf16=model.bf16,
            params_dtype=model.params_dtype,
            fp8_recipe=model.fp8_recipe if model.fp8 else None,
            use_distributed_optimizer=chunks[0].ddp_config.use_distributed_optimizer,
        ),
        list(chunks),
    )
    for group in optimizer.param_groups:
        group["weight_decay"] = config.weight_decay * group["wd_mult"]
    return optimizer


def forward_only(chunks: Sequence[torch.nn.Module], batches: Sequence[MicroBatch]) -> list[np.ndarray] | None:
    """Log-probs [T] of each micro-batch, on the last stage; None on the others."""
    for chunk in chunks:
        chunk.eval()
    with torch.no_grad():
        outputs = _pipeline(chunks, batches, _keep_logprobs, forward_only=True)
    fp8_layers.end_step(chunks)
    return outputs or None


def forward_backward(
    chunks: Sequence[DistributedDataParallel], batches: Sequence[MicroBatch], loss: Loss
) -> Metrics:
    """Accumulates this step's gradients in the buffers; returns the metrics of the last stage, merged."""
    for chunk in chunks:
        chunk.train()
        chunk.zero_grad_buffer()
    metrics = merge(_pipeline(chunks, batches, partial(_lossy, loss), forward_only=False))
    fp8_layers.end_step(chunks)
    return metrics


def apply_gradients(
    optimizer: MegatronOptimizer, metrics: Metrics, clip_grad: float, rate: float
) -> StepResult:
    """Clips and steps, or skips on every rank when any of them saw a non-finite loss or gradient."""
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    finite = math.isfinite(norm) and all(math.isfinite(m.value) for m in metrics.values())
    if _any_rank(not finite):
        optimizer.zero_grad()
        return StepResult(metrics, norm, rate, skipped=True)
    for part in optimizer.chained_optimizers:
        clip_grad_by_total_norm_fp32(part.get_parameters(), max_norm=clip_grad, total_norm=norm)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step_with_ready_grads()
    optimizer.zero_grad()
    return StepResult(metrics, norm, rate, skipped=False)


def _pipeline(
    chunks: Sequence[torch.nn.Module],
    batches: Sequence[MicroBatch],
    on_output: Callable[..., Any],
    *,
    forward_only: bool,
) -> list[Any]:
    """One pass of Megatron's schedule; what `on_output` kept of each micro-batch, on the last stage."""
    assert batches, "a step needs at least one micro-batch on every rank"
    device = torch.device(torch.cuda.current_device())
    cp = parallel_state.get_context_parallel_world_size()
    cp_rank = parallel_state.get_context_parallel_rank()
    # one mask serves all layers and chunks
    masked = [(batch, TreeMask.of(batch.subtree_end, device, cp=cp, cp_rank=cp_rank)) for batch in batches]

    def forward_step(
        inputs: Iterator[tuple[MicroBatch, TreeMask]], model: torch.nn.Module
    ) -> tuple[Tensor, Any]:
        batch, mask = next(inputs)
        ids, positions, sources, targets = (
            torch.tensor(array).to(device)
            for array in (batch.input_ids, batch.position_ids, batch.predict_from, batch.target_ids)
        )
        output = model(
            input_ids=ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            attention_mask=None,
            labels=torch.stack([sources, targets]),
            packed_seq_params=mask,
        )
        return output, partial(on_output, batch)

    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(masked) for _ in chunks],
        model=list(chunks),
        num_microbatches=len(batches),
        seq_length=batches[0].num_tokens,  # the real length travels with each tensor
        micro_batch_size=1,
        forward_only=forward_only,
    )


def _keep_logprobs(batch: MicroBatch, logprobs: Tensor) -> tuple[Tensor, Tensor, np.ndarray]:
    assert logprobs.shape == (batch.num_trained,)
    zero = logprobs.new_zeros(())
    return zero, _no_tokens(logprobs), logprobs.detach().float().cpu().numpy()


def _lossy(loss: Loss, batch: MicroBatch, logprobs: Tensor) -> tuple[Tensor, Tensor, Metrics]:
    # three values and zero tokens: Megatron then divides by nothing (DESIGN 5.4)
    total, metrics = loss(logprobs, batch)
    return total, _no_tokens(logprobs), metrics


def _no_tokens(like: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.int, device=like.device)


def _any_rank(here: bool) -> bool:
    flag = torch.tensor([float(here)], device=torch.cuda.current_device())
    torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
    return bool(flag.item())
