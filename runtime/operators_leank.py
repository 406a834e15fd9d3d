"""The two torch operators that launch decode kernels: what compiled code and captured graphs see of them."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from .stored_leank import StoreTensors

# Operators are named after this module: two checkpoints in one process are two modules, kernels apart.
_LIBRARY = f"leank_{hashlib.sha256(__name__.encode()).hexdigest()[:12]}"

registered: list[Any] = []  # operators name kernels by their place here

# torch's operators take tensors one by one: this is the one place where the store's are written out.
NUM_TENSORS = StoreTensors._fields.index("coded")


@torch.library.custom_op(
    f"{_LIBRARY}::append",
    mutates_args=("kept_keys", "stored_values", "window_keys", "window_values"),
    schema="(int kernels, Tensor keys, Tensor values, Tensor(a!) kept_keys, Tensor(b!) stored_values, "
    "Tensor(c!) window_keys, Tensor(d!) window_values, Tensor chunk_index, Tensor head_table, "
    "Tensor page_table, Tensor window_table, Tensor? key_mean, Tensor? key_scale, Tensor? value_scale, "
    "Tensor seen, Tensor? valid) -> ()",
)
def append(kernels: int, keys: torch.Tensor, values: torch.Tensor, *store_and_rest: Any) -> None:
    """Append columns to a store, as `DecodeKernels.append`."""
    store, rest = StoreTensors(*store_and_rest[:NUM_TENSORS]), store_and_rest[NUM_TENSORS:]
    registered[kernels].launch_append(keys, values, store, *rest)


@torch.library.custom_op(
    f"{_LIBRARY}::attend",
    mutates_args=(),
    schema="(int kernels, Tensor query, Tensor kept_keys, Tensor stored_values, Tensor window_keys, "
    "Tensor window_values, Tensor chunk_index, Tensor head_table, Tensor page_table, Tensor window_table, "
    "Tensor? key_mean, Tensor? key_scale, Tensor? value_scale, Tensor seen, Tensor pruned, Tensor plan, "
    "int sink_size, float softmax_scale, Tensor? sinks=None) -> Tensor",
)
def attend(kernels: int, query: torch.Tensor, *store_and_rest: Any) -> torch.Tensor:
    """Attend to a store, as `DecodeKernels.attend`."""
    store, rest = StoreTensors(*store_and_rest[:NUM_TENSORS]), store_and_rest[NUM_TENSORS:]
    output: torch.Tensor = registered[kernels].launch_attend(query, store, *rest)
    return output


append.register_fake(lambda *arguments: None)
attend.register_fake(
    lambda kernels, query, *arguments: torch.empty_like(query, memory_format=torch.contiguous_format)
)
