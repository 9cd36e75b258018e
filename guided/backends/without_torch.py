"""Import of grammar libraries without torch and transformers, which are not needed to
compute masks.

xgrammar and lm-format-enforcer import torch, and xgrammar also transformers, for
features other than masks: two seconds and a quarter of a gigabyte in every process.
`leave_out_torch` makes torch unavailable. lm-format-enforcer and tvm-ffi work without
it. xgrammar gets placeholders while it is imported; if it needs more, it gets the real
packages.
"""

from __future__ import annotations

import importlib
import logging
import sys
from types import ModuleType
from typing import Any, cast

_HEAVY = ("torch", "transformers")
_modules = cast("dict[str, Any]", sys.modules)
_log = logging.getLogger(__name__)


def leave_out_torch() -> None:
    """Make torch unavailable in this process, unless it is already imported.
    Idempotent."""
    if not any(name in sys.modules for name in _HEAVY):
        _modules["torch"] = None


def import_xgrammar() -> Any:
    """Import xgrammar, without torch and transformers where `leave_out_torch` has left
    them out."""
    if (
        "xgrammar" not in sys.modules
        and "torch" in sys.modules
        and _modules["torch"] is None
    ):
        importlib.import_module("tvm_ffi")  # before the placeholders: it inspects torch
        _modules.update((name, _Placeholder(name)) for name in _HEAVY)
        try:
            importlib.import_module("xgrammar")
            _modules["torch"] = None
        except Exception as error:
            _log.warning("xgrammar is imported with torch and transformers: %r", error)
            for name in [
                name
                for name in sys.modules
                if name == "torch" or name.startswith("xgrammar")
            ]:
                del sys.modules[name]
        del sys.modules["transformers"]
    return importlib.import_module("xgrammar")


class _Placeholder(ModuleType):
    """A module in which every attribute is a class that takes any arguments."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(
            name,
            (),
            {"__init__": lambda self, *_, **__: None, "__module__": self.__name__},
        )
        setattr(self, name, made)
        return made
