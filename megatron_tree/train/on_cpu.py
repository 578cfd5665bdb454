"""What Megatron-Core needs to run on gloo without a GPU: every departure in one place.

Megatron asks for "cuda" by name in many places (factories, `Tensor.type()`, `Tensor.cuda`, current device).
Here these answer for the CPU. Nothing of this file is used where a GPU is present. Not here: numerics; layers
and attention are the same modules as on a GPU's local spec.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def use_cpu() -> bool:
    return not torch.cuda.is_available()


def install() -> None:
    """Process-wide stand-ins; call once before Megatron's parallel state is made."""
    from megatron.core.tensor_parallel import random

    cpu = torch.device("cpu")
    torch.cuda.current_device = lambda: cpu  # type: ignore[assignment,return-value]
    torch.cuda.current_stream = lambda device=None: None  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda device=None: None  # type: ignore[assignment]
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[assignment,method-assign]
    # recomputation forks the CUDA generator; without dropout it draws nothing from it
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda *args, **kwargs: None
    random.initialize_rng_tracker(inference_rng_tracker=True)


def device_scope() -> Any:
    """Inside, "cuda" means the CPU. A TorchFunctionMode holds for one thread, so each entry point enters it
    anew."""
    return _CpuForCuda() if use_cpu() else nullcontext()


class _CpuForCuda(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs = {**kwargs, "device": "cpu"}
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # optimizers sort parameters by this string
            return "torch.cuda." + result.removeprefix("torch.").removeprefix("cuda.")
        return result


def _is_cuda(device: object) -> bool:
    return device is not None and str(device).startswith("cuda")


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Limits torch's threads of this process: several ranks share the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
