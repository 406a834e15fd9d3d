"""The processes of a data-parallel run, as `torchrun` or `accelerate launch` start them.

Each has the whole model and samples of its own. What they exchange is the gradient of the scaling factors,
some hundred KB a step. The first of them owns the output folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed
from torch import Tensor

from leank_convert.device import choose_device
from leank_convert.errors import LeanKError, cut

_T = TypeVar("_T")


@dataclass(frozen=True)
class Ranks:
    """One process's view of all of them."""

    device: torch.device  # where this one computes
    rank: int = 0  # which it is, from 0
    num_ranks: int = 1  # how many there are

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and talks to the user."""
        return self.rank == 0

    def combine(self, tensor: Tensor, *, largest: bool = False) -> Tensor:
        """The sum of a tensor over all ranks, or each number's largest on any of them."""
        if self.num_ranks == 1:
            return tensor
        shared = tensor.to(self.device, copy=True)
        operation = torch.distributed.ReduceOp.MAX if largest else torch.distributed.ReduceOp.SUM
        torch.distributed.all_reduce(shared, operation)
        return shared.to(tensor.device)

    def in_turn(self, own: Tensor) -> Tensor:
        """What all ranks have [N, ...], the first of each before the second of any: [N * num_ranks, ...]."""
        if self.num_ranks == 1:
            return own
        gathered = [torch.empty_like(own) for _ in range(self.num_ranks)]
        torch.distributed.all_gather(gathered, own)
        return torch.stack(gathered, dim=1).flatten(0, 1)

    def totals(self, values: Sequence[float]) -> list[float]:
        """Sums over all ranks of a few numbers."""
        found: list[float] = self.combine(torch.tensor(values, dtype=torch.float64)).tolist()
        return found

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank."""
        return self.totals([float(flag)])[0] > 0

    def on_first(self, function: Callable[[], _T]) -> _T:
        """What a function returns on the first rank, on all of them.

        Raises:
            LeanKError: On the first rank, what the function raised there. The others just exit: one message
                is enough.
        """
        if self.num_ranks == 1:
            return function()
        shared: list[Any] = [None, None]
        error = None
        if self.is_first:
            try:
                shared[0] = function()
            except LeanKError as found:
                error, shared[1] = found, found.exit_code
        torch.distributed.broadcast_object_list(shared, src=0, device=self.device)
        result, exit_code = shared
        if exit_code is not None:
            raise error or SystemExit(exit_code)
        return result  # type: ignore[no-any-return]

    def on_all(self, function: Callable[[], _T]) -> _T:
        """What a function returns on this rank, once it has on all of them; raises as `check`."""
        returned: list[_T] = []
        error = None
        try:
            returned.append(function())
        except LeanKError as found:
            error = found
        self.check(error)
        return returned[0]

    def share(self, count: int, work: Callable[[int], None], advance: Callable[[int], None]) -> None:
        """Do pieces of work by their numbers, each on one rank, and `advance` by as many as all have done.

        Raises:
            LeanKError: As `check`, what stopped the work of a rank, before more of it is begun.
        """
        for start in range(0, count, self.num_ranks):
            own = start + self.rank
            self.on_all(partial(work, own) if own < count else lambda: None)
            advance(min(self.num_ranks, count - start))

    def check(self, error: LeanKError | None) -> None:
        """Go on only if no rank has met an error.

        Raises:
            LeanKError: On the first rank, the error of the lowest rank that has one, and which rank that is
                unless all have the same. The others exit.
        """
        if not self.any(error is not None):
            return
        if self.num_ranks == 1:
            assert error is not None
            raise error
        facts = None if error is None else (error.message, error.hint, error.exit_code)
        gathered: list[Any] = [None] * self.num_ranks
        torch.distributed.all_gather_object(gathered, facts)
        rank, (message, hint, exit_code) = next(
            (rank, facts) for rank, facts in enumerate(gathered) if facts is not None
        )
        if self.is_first:
            shared = all(facts == gathered[0] for facts in gathered)
            raise LeanKError(message if shared else f"rank {rank}: {message}", hint, exit_code)
        raise SystemExit(exit_code)


def count_ranks() -> int:
    """Count the processes of this run; LeanKError if it is no launcher's `WORLD_SIZE` that says so."""
    said = os.environ.get("WORLD_SIZE", "1")
    if said == "1" or ("RANK" in os.environ and re.fullmatch("[1-9][0-9]*", said)):
        return int(said)
    raise LeanKError(
        f"`WORLD_SIZE` is {cut(said)} in the environment, and no launcher of several processes set it",
        hint="unset it, or start the processes by `torchrun` or `accelerate launch`",
    )


@contextmanager
def join_ranks(device: str | torch.device | None) -> Iterator[Ranks]:
    """Find the other processes of this run, if a launcher started several; leave them when done.

    Raises:
        LeanKError: If the device cannot be used, or one of several processes is given one by its index, which
            is the launcher's to choose; as `count_ranks`.
    """
    num_ranks = count_ranks()
    if num_ranks == 1:
        yield Ranks(choose_device(device))
        return
    if ":" in str(device):
        raise LeanKError(
            f"device `{device}` is one device, and {num_ranks} processes were started",
            hint="leave `--device` out, or name a type such as `cuda`: each process takes its own",
        )
    # accelerate knows what each launcher sets, and which backend goes with which device.
    from accelerate import PartialState

    on_device = torch.cuda.is_available() and (device is None or str(device) == "cuda")
    if not on_device:
        # Not for CUDA: every process would leave something on the first GPU.
        on_device = choose_device(device).type != "cpu"
    was_there = torch.distributed.is_initialized()
    state = PartialState(cpu=not on_device)
    try:
        yield Ranks(state.device, state.process_index, state.num_processes)
    finally:
        if not was_there:
            state.destroy_process_group()
            PartialState._reset_state()
