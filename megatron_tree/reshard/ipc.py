"""Memory that one process lends to others on the same device: CUDA IPC on a GPU; without one, anonymous
memory of the host, which stands in for it. Not here: who lends what to whom (`wire`).

Departure from vLLM: its `ipc` back end passes handles through the calls to the engine. Here the ends of a
wire pass them to one another, so that driver and engine say the same for every transport.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

HANDLE_BYTES = 4096  # of a handle with its padding; CUDA's with torch's description of the tensor is 600


def memory(device: torch.device | str) -> str:
    """Names the memory that processes on this device can lend to one another: the GPU's, or the host's of
    processes that see each other. Without spaces."""
    device = torch.device(device)
    if device.type == "cuda":
        return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"host-{boot}-{os.stat('/proc/self/ns/pid').st_ino}"


class Loan:
    """One contiguous tensor of bytes, until `close`; keep what it is made of as it is until then."""

    def __init__(self, tensor: Tensor) -> None:
        self._kept, self._file = tensor, -1
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)  # the borrower does not wait for this process's streams
            told: object = reduce_tensor(tensor)[1]
        else:
            self._file = os.memfd_create("megatron_tree_bucket")
            os.ftruncate(self._file, tensor.nbytes)
            _mapped(f"/proc/self/fd/{self._file}", tensor.nbytes).copy_(tensor)
            told = f"/proc/{os.getpid()}/fd/{self._file}"
        self.handle = pickle.dumps(told).ljust(HANDLE_BYTES, b"\0")
        assert len(self.handle) == HANDLE_BYTES, "a handle is longer than what is sent"

    def close(self) -> None:
        del self._kept
        if self._file >= 0:
            os.close(self._file)


def copy(handle: bytes, into: Tensor) -> None:
    """Copies what is lent into a tensor of as many bytes; when it returns the loan may end."""
    told = pickle.loads(handle)  # from the other end of a wire of this run
    if into.is_cuda:
        arguments = list(told)
        arguments[6] = into.device.index  # the lender may know the GPU by another number
        into.copy_(rebuild_cuda_tensor(*arguments))
        torch.cuda.current_stream(into.device).synchronize()
    else:
        into.copy_(_mapped(told, into.nbytes))


def _mapped(path: str, num_bytes: int) -> Tensor:
    return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
