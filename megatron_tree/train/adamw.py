"""AdamW for Megatron's optimizers where no fused one of Transformer Engine or Apex is used (`kernels`).

torch's own AdamW counts steps in the state of each parameter, which Megatron's distributed optimizer cannot
save. This one keeps them in the parameter groups, as Apex's FusedAdam does, and calls torch's kernel. Not
here: mixed precision, sharding and clipping (Megatron's).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from megatron.core import optimizer as megatron
from megatron.core.optimizer import distrib_optimizer
from torch.optim.adamw import adamw


def install() -> None:
    """Process-wide: Megatron takes it for Apex's."""
    megatron.Adam = distrib_optimizer.Adam = AdamW
    megatron.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True
    distrib_optimizer.USING_TE_OPTIMIZER = False


class AdamW(torch.optim.Optimizer):
    """The signature is FusedAdam's. `step` of a group counts the steps taken."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
        eps: float,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        assert adam_w_mode, "decay is decoupled from the gradient"
        assert not capturable, "steps are counted on the host"
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            group["step"] = group.get("step", 0) + 1
            states = [self._state_of(param) for param in params]
            adamw(
                params,
                [param.grad for param in params],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                # torch counts on, from the steps taken before
                [torch.tensor(group["step"] - 1.0, device="cpu") for _ in params],
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )

    def _state_of(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        state = self.state[param]
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
        return state
