"""Torch tensors as numpy arrays and back, without copies where the memory allows it; bfloat16 as its raw bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from opengyre.transfer.arrays import BFLOAT16


def to_numpy(tensor: Tensor) -> np.ndarray:
    """A view of a CPU tensor's memory (a copy of another device's)."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16).view(BFLOAT16)
    return tensor.numpy()


def to_tensor(array: np.ndarray[Any, Any]) -> Tensor:
    """A CPU tensor over the array's memory; read-only arrays are copied."""
    if not array.flags.writeable or not array.flags.c_contiguous:
        array = array.copy()
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.uint16).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
