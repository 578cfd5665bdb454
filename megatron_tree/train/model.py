"""The actor and reference model: Megatron-Core's GPTModel over packed trees.

`TreeGPTModel` overrides two methods: `_preprocess` (rotary embedding by depth in the tree, not by packed
index) and `_postprocess` (hidden states gathered at `predict_from` before the output layer, so the head runs
on trained tokens only; it returns their log-probs). A rank holds one model, or with virtual stages one per
chunk. Not here: optimizer and schedule (`step`), weights (`reshard`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from megatron_tree.config import Fp8Config, RecomputeConfig
from megatron_tree.reshard.names import ModelShape, RopeScaling
from megatron_tree.train import kernels, on_cpu, precision
from megatron_tree.train.attention import TreeAttention
from megatron_tree.train.fp8_layers import Fp8ColumnParallelLinear, Fp8RowParallelLinear
from megatron_tree.train.group import RankSetup
from megatron_tree.train.kernels import Kernels
from megatron_tree.train.tree_mask import TreeMask


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm in fp32, as transformers computes it. Megatron's torch wrapper refuses sequence
    parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(hidden.dtype)


class TreeGPTModel(GPTModel):
    """GPTModel on one packed micro-batch at a time.

    forward(input_ids [1, S / cp], position_ids [1, S / cp], attention_mask = None,
    labels = stack(predict_from, target_ids) [2, T], packed_seq_params = a TreeMask) returns log-probs [T] in
    fp32 on the last stage, the hidden states [S / cp, 1, hidden], under sequence parallelism
    [S / cp / tp, 1, hidden], on the others. T counts the tokens that this context-parallel rank predicts.
    """

    def __init__(self, shape: ModelShape, *, temperature: float, **kwargs: Any) -> None:
        super().__init__(position_embedding_type="none", **kwargs)
        self.rotary_frequencies = rotary_frequencies(shape)
        self.real_vocab = shape.vocab
        self.temperature = temperature
        if self.post_process:  # its input is gathered before the trained tokens are picked
            self.output_layer.sequence_parallel = False

    def _preprocess(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        *args: Any,
        packed_seq_params: TreeMask | None = None,  # Megatron's own would hold sequence lengths
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        decoder_input, _, *rest = super()._preprocess(input_ids, position_ids, *args, **kwargs)
        angles = position_ids[0].float().unsqueeze(1) * self.rotary_frequencies.to(position_ids.device)
        return (decoder_input, torch.cat([angles, angles], dim=1)[:, None, None], *rest)

    def _postprocess(self, hidden_states: Tensor, *, labels: Tensor, **_: Any) -> Tensor:
        if not self.post_process:
            return hidden_states
        predict_from, target_ids = labels
        if self.config.sequence_parallel:
            # the output layer sums the gradient of its input over tensor-parallel ranks: here it is only cut
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False
            )
        weight = (
            self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        )
        logits, _bias = self.output_layer(hidden_states[predict_from], weight=weight)
        logits = self._without_padding(logits.float() / self.temperature)
        return -vocab_parallel_cross_entropy(logits, target_ids.unsqueeze(1)).squeeze(1)

    def _without_padding(self, logits: Tensor) -> Tensor:
        """Padding rows of the vocabulary must not enter the log-sum-exp."""
        part = logits.shape[-1]
        first = part * parallel_state.get_tensor_model_parallel_rank()
        real = self.real_vocab - first
        if real >= part:
            return logits
        padding = torch.arange(part, device=logits.device) >= real
        return logits.masked_fill(padding, float("-inf"))


def transformer_config(shape: ModelShape, setup: RankSetup) -> TransformerConfig:
    """Megatron's config of one model. Without dropout, and without fusions but that of weight gradients."""
    cpu, layout, chosen = on_cpu.use_cpu(), setup.layout, kernels.of(setup)
    interleaved = layout.vpp > 1
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        layernorm_epsilon=shape.norm_eps,
        normalization="RMSNorm",
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,  # their gradients are then summed over tensor-parallel ranks
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if interleaved else None,
        pipeline_model_parallel_layout=(
            layout.pipeline_layout(shape.num_layers) if layout.stage_split is not None else None
        ),
        context_parallel_size=layout.cp,
        sequence_parallel=setup.parallel.sequence_parallel,
        **_recompute(setup.recompute),
        **precision.settings(setup.dtype, setup.fp8 if chosen.linear.name == "te" else None),
        perform_initialization=False,  # weights are loaded right after
        use_cpu_initialization=cpu,
        gradient_accumulation_fusion=chosen.weight_gradients.name == "fused",
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        calculate_per_token_loss=True,  # Megatron divides by nothing: the loss's weights normalise
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # variable_seq_lengths asks for it, for dense models too
        deallocate_pipeline_outputs=not cpu,  # gloo sends may still read the buffer
        # between two interleaved stages two messages are under way, which a batch would mix up, silently
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
    )


def _recompute(config: RecomputeConfig) -> dict[str, Any]:
    if config.granularity == "full":
        return {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": config.layers,
        }
    if config.granularity == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": list(config.modules)}
    return {}


def layer_spec(shape: ModelShape, chosen: Kernels, fp8: Fp8Config | None = None) -> ModuleSpec:
    """One layer. `fp8`: how its products are rounded, where that is emulated."""
    column, row = _linears(chosen, fp8)
    norm = norm_of(chosen)
    head_norm = norm if shape.qk_norm else IdentityOp
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=column,
                    core_attention=ModuleSpec(TreeAttention, params={"backend": chosen.attention.name}),
                    linear_proj=row,
                    q_layernorm=head_norm,
                    k_layernorm=head_norm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=ModuleSpec(
                module=MLP,
                submodules=MLPSubmodules(linear_fc1=column, linear_fc2=row),
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def norm_of(chosen: Kernels) -> Any:
    if chosen.norm.name == "te":
        from megatron.core.extensions.transformer_engine import TENorm

        return TENorm
    return RMSNorm


def _linears(chosen: Kernels, fp8: Fp8Config | None) -> tuple[Any, Any]:
    """The column- and the row-parallel layer."""
    if chosen.linear.name == "te":
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TERowParallelLinear

        return TEColumnParallelLinear, TERowParallelLinear
    if fp8 is None:
        return ColumnParallelLinear, RowParallelLinear
    how = {"fp8": fp8}
    return ModuleSpec(Fp8ColumnParallelLinear, params=how), ModuleSpec(Fp8RowParallelLinear, params=how)


def build(shape: ModelShape, setup: RankSetup, rank: int) -> list[TreeGPTModel]:
    """This rank's model chunks, their weights zero (norms one) until they are loaded."""
    layout = setup.layout
    config, stage = transformer_config(shape, setup), layout.coordinates(rank).pp
    return [_build_chunk(shape, setup, config, stage, chunk) for chunk in range(layout.vpp)]


def _build_chunk(
    shape: ModelShape, setup: RankSetup, config: TransformerConfig, stage: int, chunk: int
) -> TreeGPTModel:
    layout = setup.layout
    layers = layout.stage_layers(shape.num_layers, stage, chunk)
    chosen = kernels.of(setup)
    emulated = setup.fp8 if chosen.linear.name == "emulated" else None
    specs = [
        layer_spec(shape, chosen, precision.of_layer(emulated, shape.num_layers, layer)) for layer in layers
    ]
    model = TreeGPTModel(
        shape,
        temperature=setup.temperature,
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(specs, norm_of(chosen)),
        vocab_size=shape.padded_vocab(layout.tp),
        max_sequence_length=shape.max_positions,
        pre_process=layout.has_embedding(stage, chunk),
        post_process=layout.has_head(stage, chunk),
        share_embeddings_and_output_weights=shape.tied,
        vp_stage=chunk if layout.vpp > 1 else None,
    )
    _mark_split_weights(model)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if not name.endswith("layernorm.weight"):
                param.zero_()  # uninitialised memory may hold NaN, and vocabulary padding is never loaded
    return model if on_cpu.use_cpu() else model.cuda()


def rotary_frequencies(shape: ModelShape) -> Tensor:
    """[head_dim / 2] fp32, of one turn per 2 pi tokens and slower."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32, device="cpu") / shape.head_dim
    frequencies = 1.0 / shape.rope_theta**exponents
    return frequencies if shape.rope_scaling is None else scaled(frequencies, shape.rope_scaling)


def scaled(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Rotary frequencies [d / 2] under a model's rope scaling, as transformers computes them.

    llama3: wavelengths above original_max_positions / low_freq_factor are stretched by `factor`, those below
    original_max_positions / high_freq_factor stay, between them it is interpolated.
    """
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    turns = frequencies * scaling.original_max_positions / (2 * math.pi)  # in the original context
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = smooth.clamp(0, 1)
    return frequencies * (keep + (1 - keep) / scaling.factor)


def _mark_split_weights(model: TreeGPTModel) -> None:
    """Megatron before 0.19 marks a weight as split over tensor-parallel ranks only while it initialises it.
    Without the mark the gradient norm takes it for a duplicate and counts one rank's part. Transformer
    Engine's layers always mark theirs."""
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | VocabParallelEmbedding | RowParallelLinear):
            dim = 1 if isinstance(module, RowParallelLinear) else 0
            # the output layer has no weight where it is tied to an embedding of its own stage
            if module.weight is not None and not hasattr(module.weight, "tensor_model_parallel"):
                set_tensor_model_parallel_attributes(module.weight, is_parallel=True, dim=dim, stride=1)
