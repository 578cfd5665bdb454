"""What a rank has on its device only while it trains: released while engines use the device, and taken back.

Gradients are dropped and come back as zeros: every step begins with such. Optimizer states, the optimizer's
own copies of the weights and the reference model go to the host, where those of a CPU are already. Storages
are emptied and filled in place, so that every view of them stays one: Megatron's buffers are cut into many.
Not here: the actor's weights, which are published meanwhile; when this happens (`turns`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

HOST = "cpu"  # the device of tensors that are on the host already


class Released:
    """Emptied storages. `take_back` fills them again."""

    def __init__(self, dropped: Iterable[torch.UntypedStorage], kept: Iterable[torch.UntypedStorage]) -> None:
        self._dropped = [(storage, storage.nbytes()) for storage in dropped]
        self._kept = [(storage, _on_host(storage)) for storage in kept]
        for storage, _ in (*self._dropped, *self._kept):
            storage.resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # engines are other processes

    def take_back(self) -> None:
        for storage, num_bytes in self._dropped:
            storage.resize_(num_bytes)
            _bytes_of(storage).zero_()
        for storage, host in self._kept:
            storage.resize_(host.numel())
            _bytes_of(storage).copy_(host)


def release(
    chunks: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer | None,
    reference: Iterable[Tensor],
) -> Released:
    gradients = _storages(buffer.grad_data for chunk in chunks for buffer in chunk.buffers)
    actor = {s.data_ptr() for s in _storages(param for chunk in chunks for param in chunk.parameters())}
    others = (*(() if optimizer is None else _held_by(optimizer)), *reference)
    kept = _storages(tensor for tensor in others if tensor.device.type != HOST)
    return Released(gradients, [storage for storage in kept if storage.data_ptr() not in actor])


def _held_by(optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    """States, and the parameters it steps: main copies, or the model's own weights in fp32."""
    for part in optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            yield from group["params"]
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Each once, the empty ones left out."""
    storages = (part.untyped_storage() for tensor in tensors for part in _parts(tensor))
    found = {storage.data_ptr(): storage for storage in storages}
    return [storage for storage in found.values() if storage.nbytes()]


def _parts(tensor: Tensor) -> list[Tensor]:
    """Those that hold the bytes. Transformer Engine's weights in FP8 have none of their own."""
    if not is_float8tensor(tensor):
        return [tensor]
    return [part for part in tensor.get_data_tensors() if part is not None]


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]


def _on_host(storage: torch.UntypedStorage) -> Tensor:
    host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
    return host.copy_(_bytes_of(storage))
