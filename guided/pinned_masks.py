"""Mask columns of slot tables that a GPU reads where the workers write them: in pinned memory, without a copy.

Where memory cannot be pinned (limits of a container) or the GPU does not read it, the masks are copied before each
launch of the kernel, as those of columns that were never pinned. Functions import torch themselves.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Pin: TypeAlias = Callable[[NDArray[np.int32]], None]
"""`pin_masks`, with its other arguments."""
_PORTABLE_AND_MAPPED = 3
"""Flags of cudaHostRegister: pinned for all devices, with an address on them."""
_CAN_USE_HOST_POINTER = 91
"""The driver's attribute of a device: an address of registered memory is valid there too (cuda.h)."""
_logger = logging.getLogger(__name__)
_lock = threading.Lock()
"""Held while memory is pinned. Supervisors do so on their threads, and the first one compiles the kernel."""


class _Column(NamedTuple):
    start: int
    """Address of its first page."""
    end: int
    device: torch.device


_columns: dict[int, _Column] = {}
"""The pinned columns by the address of their first mask."""


def address_of(masks: NDArray[np.int32]) -> int:
    """Return the address of the first mask of a column."""
    address: int = masks.__array_interface__["data"][0]
    return address


def pinned_end(address: int) -> int:
    """Return the address behind the pinned masks of the column at `address`. 0: none is pinned."""
    column = _columns.get(address)
    return 0 if column is None else column.end


def pin_masks(masks: NDArray[np.int32], lines: int, device: torch.device) -> None:
    """Pin the first masks of a column, before a worker writes to it. This allocates their memory.

    Args:
        masks: int32 `[slots, words]`, shared memory. Its first mask is overwritten.
        lines: number of masks.
        device: the device that reads them. If it is not a GPU of CUDA, nothing is pinned.
    """
    if device.type != "cuda":
        return
    import torch

    cuda: Any = torch.cuda
    address = address_of(masks)
    start = address - address % mmap.PAGESIZE
    end = address + min(lines, len(masks)) * masks.strides[0]
    try:
        with _lock, cuda.device(device):
            if not _is_valid_on(device):
                raise RuntimeError("its driver gives the memory another address")
            code = int(cuda.cudart().cudaHostRegister(start, end - start, _PORTABLE_AND_MAPPED))
            if code:
                raise RuntimeError(f"cudaHostRegister returned {code}")
            _columns[address] = _Column(start, end, device)
            if not _is_read(masks, device):
                raise RuntimeError("the kernel did not read what was written")
    except Exception as error:  # no Triton, no compiler: the kernel reports that at its first launch
        _logger.warning("%s does not read masks from shared memory, they are copied: %s", device, error)
        unpin_masks(masks)


def unpin_masks(masks: NDArray[np.int32]) -> None:
    """Undo `pin_masks`, before the memory is unmapped. Waits for kernels that read it."""
    column = _columns.pop(address_of(masks), None)
    if column is not None:
        import torch

        cuda: Any = torch.cuda
        cuda.synchronize(column.device)
        cuda.cudart().cudaHostUnregister(column.start)


def _is_valid_on(device: torch.device) -> bool:
    """Return whether the driver says that addresses of registered memory are valid on the device. A kernel that reads
    an invalid address would end all CUDA work of this process."""
    value = ctypes.c_int()
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuDeviceGetAttribute(ctypes.byref(value), _CAN_USE_HOST_POINTER, device.index or 0)
    return bool(value.value)


def _is_read(masks: NDArray[np.int32], device: torch.device) -> bool:
    """Write a known mask, and return whether the kernel applies it."""
    import torch

    from guided.mask_kernel import launch

    cuda: Any = torch.cuda
    mask = masks[0]
    mask[:] = np.random.default_rng(0).integers(-(1 << 31), 1 << 31, len(mask))
    with cuda.stream(cuda.Stream(device)):
        logits = torch.zeros(1, 32 * len(mask), device=device)
        launch(logits, torch.tensor([[address_of(masks), 0]], device=device), len(mask))
        allowed = logits[0].isfinite().cpu().numpy()
    return np.array_equal(allowed, np.unpackbits(mask.view(np.uint8), bitorder="little"))
