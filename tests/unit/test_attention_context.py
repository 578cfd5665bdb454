"""Keys gathered over real gloo ranks, and their gradients scattered back."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_tree.layout import ParallelLayout
from megatron_tree.train.context import gather_tokens
from megatron_tree.train.tree_mask import TreeMask

CP, TOKENS = 2, 8


def _rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=CP)
    here = torch.cat([torch.arange(a, b) for a, b in ParallelLayout(cp=CP).context_ranges(TOKENS, rank)])
    shares = TreeMask.of(torch.arange(1, TOKENS + 1).numpy(), "cpu", cp=CP, cp_rank=rank).shares
    local = (10.0 * here).unsqueeze(1).requires_grad_()
    whole = gather_tokens(local, shares, dist.group.WORLD)
    (whole.squeeze(1) * torch.arange(TOKENS) * (rank + 1)).sum().backward()
    torch.save((here, whole.detach(), local.grad), folder / f"{rank}.pt")
    dist.destroy_process_group()


def test_every_rank_gets_all_tokens_and_the_sum_of_their_gradients(tmp_path: Path):
    """Rank r weighs token i with (r + 1) i, so token i's gradient is 3 i on the rank that holds it."""
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_rank, args=(rank, tmp_path)) for rank in range(CP)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
        assert process.exitcode == 0
    for rank in range(CP):
        here, whole, grad = torch.load(tmp_path / f"{rank}.pt")
        assert whole.squeeze(1).tolist() == [0, 10, 20, 30, 40, 50, 60, 70]
        assert grad.squeeze(1).tolist() == (3 * here).tolist()
