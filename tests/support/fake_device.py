"""A CUDA device on a CPU: the mask kernel in Triton's interpreter, with events, pinned
memory and a driver that note what is called, and fail as told."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from guided.processors import kernel, pinned_masks

GPU = torch.device("cuda:0")


class DeviceTensor:
    """A tensor of the CPU that says it is on CUDA."""

    is_cuda = True
    device = GPU

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)

    def __len__(self) -> int:
        return len(self.tensor)

    def __getitem__(self, index: Any) -> Any:
        return self.tensor[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tensor[index] = value


class FakeDevice:
    """What was called, in order, and what fails."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.failure = "none"
        self.addresses: list[int] = []
        """Of the masks of the last launch."""
        self.launched: list[list[bool]] = []
        """For each launch that is no self-test: which masks were in pinned columns."""
        self.busy = 0
        """How often an event is asked before it is done."""
        self.on_event = lambda call: None

    def tensor(self, tensor: torch.Tensor) -> Any:
        return DeviceTensor(tensor)

    # what torch.cuda has

    def record_event(self) -> FakeDevice:
        self.on_event("record")
        return self

    def query(self) -> bool:
        self.on_event("query")
        self.busy -= 1
        return self.busy < 0

    def synchronize(self, *device: Any) -> None:
        self.on_event("synchronize")
        if device:
            self.calls.append(("wait",))

    # what the CUDA runtime and the driver have

    def cudaHostRegister(self, start: int, size: int, flags: int) -> int:  # noqa: N802
        self.calls.append(("register", start, size, flags))
        if self.failure == "exception":
            raise RuntimeError("no context")
        return 2 if self.failure == "code" else 0

    def cudaHostUnregister(self, start: int) -> int:  # noqa: N802
        self.calls.append(("unregister", start))
        return 0

    def check_error(self, code: int) -> None:
        if code:
            raise RuntimeError("out of memory")

    def cuDeviceGetAttribute(self, value: Any, attribute: int, ordinal: int) -> int:  # noqa: N802
        assert (attribute, ordinal) == (91, 0)
        value._obj.value = self.failure != "driver"
        return 0


@contextmanager
def fake_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    """Put the device where `guided` looks for one."""
    device = FakeDevice()
    empty, zeros, tensor, to = torch.empty, torch.zeros, torch.tensor, torch.Tensor.to
    cuda = {
        "device": nullcontext,
        "stream": nullcontext,
        "Stream": lambda device: None,
        "current_stream": lambda given: device,
        "synchronize": device.synchronize,
        "cudart": lambda: device,
        "check_error": device.check_error,
    }
    with monkeypatch.context() as patch:
        for name, value in cuda.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(
            torch,
            "empty",
            lambda *shape, pin_memory=False, **named: empty(*shape, **named),
        )
        patch.setattr(
            torch, "zeros", lambda *shape, device=None, **named: zeros(*shape, **named)
        )
        patch.setattr(
            torch,
            "tensor",
            lambda values, device=None, **named: tensor(values, **named),
        )
        patch.setattr(
            torch.Tensor,
            "to",
            lambda it, where=None, *a, **n: (
                it if where == GPU else to(it, where, *a, **n)
            ),
        )
        patch.setattr(torch.Tensor, "pin_memory", lambda it: it)
        patch.setattr(ctypes, "CDLL", lambda name: device)
        patch.setattr(kernel, "_cuda_failed", False)
        patch.setenv("TRITON_INTERPRET", "1")
        before = sys.modules.pop("guided.processors.mask_kernel", None)
        try:
            import guided.processors.mask_kernel as interpreted

            launch = interpreted.launch

            def noting(logits: Any, plan: torch.Tensor, words: int) -> None:
                if device.failure == "memory":
                    raise torch.OutOfMemoryError("out of memory")
                if device.failure == "launch":
                    raise RuntimeError("no compiler")
                if isinstance(logits, DeviceTensor):
                    device.addresses = plan[:, 0].tolist()
                    columns = pinned_masks._columns.items()
                    device.launched.append(
                        [
                            any(first <= it < end for first, (end, _) in columns)
                            for it in device.addresses
                        ]
                    )
                    logits = logits.tensor
                launch(logits, plan, words)
                if device.failure == "wrong":
                    logits.zero_()

            patch.setattr(interpreted, "launch", noting)
            yield device
        finally:
            pinned_masks._columns.clear()
            sys.modules.pop("guided.processors.mask_kernel", None)
            if before is not None:
                sys.modules["guided.processors.mask_kernel"] = before
