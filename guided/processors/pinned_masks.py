"""Mask columns of slot tables that a GPU reads where the workers write them: in pinned
memory, without a copy.

Where memory cannot be pinned (limits of a container) or the GPU does not read it, the
masks are copied before each launch of the kernel, as those of columns that were never
pinned. Functions import torch themselves.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Pin: TypeAlias = Callable[[NDArray[np.int32]], None]
"""`pin_masks`, with its other arguments."""
_CAN_USE_HOST_POINTER = 91
"""The driver's attribute of a device: an address of registered memory is valid there
too (cuda.h)."""
_PORTABLE_AND_MAPPED = 3
"""Flags of cudaHostRegister: the memory is pinned for all devices of the process, and
has an address on the device."""
_logger = logging.getLogger(__name__)
_lock = threading.Lock()
"""A lock that is held while memory is pinned. Supervisors do so on their threads, and
the first compiles the kernel."""
_columns: dict[int, tuple[int, torch.device]] = {}
"""The address behind a column's pinned masks, and the device that reads them, by the
address of the first mask."""


def pinned_end(address: int) -> int:
    """Return the address behind the pinned masks of the column at `address`. 0: none is
    pinned."""
    if address in _columns:
        return _columns[address][0]
    return 0


def pin_masks(masks: NDArray[np.int32], lines: int, device: torch.device) -> None:
    """Pin the first masks of a column, before a worker writes to it. This allocates
    their memory.

    Args:
        masks: int32 `[slots, words]`, shared memory. Its first mask is overwritten.
        lines: number of masks.
        device: the device that reads them. If it is not a GPU of CUDA, nothing is
            pinned.
    """
    if device.type != "cuda":
        return
    import torch

    cuda: Any = torch.cuda
    address = masks.ctypes.data
    nbytes = masks[:lines].nbytes
    try:
        with _lock, cuda.device(device):
            _check_addresses(device)
            cuda.check_error(
                cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE_AND_MAPPED)
            )
            _columns[address] = (address + nbytes, device)
            _check_reading(masks[0], device)
    except Exception as error:
        _logger.warning(
            "%s does not read masks from shared memory, they are copied: %s",
            device,
            error,
        )
        unpin_masks(masks)


def unpin_masks(masks: NDArray[np.int32]) -> None:
    """Undo `pin_masks`, before the memory is unmapped. Waits for kernels that read
    it."""
    address = masks.ctypes.data
    if address in _columns:
        import torch

        cuda: Any = torch.cuda
        cuda.synchronize(_columns.pop(address)[1])
        cuda.cudart().cudaHostUnregister(address)


def _check_addresses(device: torch.device) -> None:
    """Ask the driver whether addresses of registered memory are valid on the device. A
    kernel that reads an invalid one would end all CUDA work of this process."""
    valid = ctypes.c_int()
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuDeviceGetAttribute(
        ctypes.byref(valid), _CAN_USE_HOST_POINTER, device.index or 0
    )
    if not valid.value:
        raise RuntimeError("registered memory has other addresses there")


def _check_reading(mask: NDArray[np.int32], device: torch.device) -> None:
    """Write a mask that allows the first token of each word, and have the kernel apply
    it."""
    import torch

    from guided.processors.mask_kernel import launch

    cuda: Any = torch.cuda
    mask[:] = 1
    with cuda.stream(cuda.Stream(device)):
        logits = torch.zeros(1, 32 * len(mask), device=device)
        launch(logits, torch.tensor([[mask.ctypes.data, 0]], device=device), len(mask))
        allowed = logits[0].isfinite().nonzero()[:, 0].tolist()
    if allowed != list(range(0, 32 * len(mask), 32)):
        raise RuntimeError("the kernel did not read what was written")
