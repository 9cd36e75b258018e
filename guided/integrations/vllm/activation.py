"""The switch: with the environment variable `GUIDED_VLLM=1`, vLLM's structured outputs use our pool.

vLLM calls `activate`, a general plugin, in every process before anything else. Two parts of vLLM are replaced:
the manager of structured outputs, in the engine's process, and the validation of `structured_outputs`, in the process
that admits requests. Both are internal to vLLM, so they are replaced only in versions with which this was tested.
"""

from __future__ import annotations

import logging
import os

from guided.integrations.vllm import pool_reports
from guided.integrations.vllm.run_directory import SWITCH, announce

TESTED_VERSIONS = ("0.32.0",)
"""Versions of vLLM with which `tests/vllm` passes."""
_log = logging.getLogger("guided.integrations")
_active = False


def activate() -> None:
    """Make this process a part of the run, and replace vLLM's structured outputs if the switch is on. Idempotent."""
    global _active
    announce()
    _show_log()
    pool_reports.expose()
    if _active or os.environ.get(SWITCH, "").lower() in ("", "0", "false", "off"):
        return
    import vllm

    version = vllm.__version__.partition("+")[0]
    if version not in TESTED_VERSIONS:
        _log.warning(
            "%s has no effect: it was not tested with vLLM %s, but with %s. vLLM's own backends enforce "
            "response_format and structured_outputs. For masks of guided, pass --logits-processors "
            "guided.integrations.vllm.processor:GuidedLogitsProcessor and put constraints into vllm_xargs",
            SWITCH,
            version,
            ", ".join(TESTED_VERSIONS),
        )
        return
    import vllm.v1.engine.core
    from vllm.sampling_params import SamplingParams

    from guided.integrations.vllm.admission import validate_structured_outputs
    from guided.integrations.vllm.manager import GuidedManager

    vllm.v1.engine.core.StructuredOutputManager = GuidedManager
    SamplingParams._validate_structured_outputs = validate_structured_outputs
    _active = True


def is_active() -> bool:
    """Whether vLLM's structured outputs use our pool, in this process."""
    return _active


def _show_log() -> None:
    """Write our log where vLLM writes its own, if the application has not configured it."""
    ours = logging.getLogger("guided")
    if not ours.hasHandlers():
        ours.handlers = list(logging.getLogger("vllm").handlers)
        ours.setLevel(logging.getLogger("vllm").level)
