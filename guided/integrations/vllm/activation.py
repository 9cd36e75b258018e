"""The switch: with the environment variable `GUIDED_VLLM=1`, vLLM's structured outputs
are enforced by our pool.

vLLM calls `activate`, a general plugin, in every process before anything else. Two
parts of vLLM are replaced: the manager of structured outputs, in the engine's process,
and the validation of `structured_outputs`, in the process that admits requests. Both
are internal to vLLM, so an untested version is refused.

The rest is imported inside `activate`, because vLLM goes on after an exception while it
imports a plugin.
"""

from __future__ import annotations

import logging
import os

SWITCH = "GUIDED_VLLM"
"""The environment variable: 1 (on), "force" (on, also with an untested version), or
0."""
TESTED_VERSIONS = ("0.33.0",)
"""Versions of vLLM with which `tests/vllm` passes."""
_log = logging.getLogger("guided.integrations")


def activate() -> None:
    """Replace vLLM's structured outputs if the switch is on. Idempotent.

    Raises:
        RuntimeError: this version of vLLM is untested.
        ValueError: the switch has another value.
    """
    switch = os.environ.get(SWITCH, "").lower()
    if switch in ("", "0", "false", "off"):
        return
    if switch not in ("1", "true", "on", "force"):
        raise ValueError(f"{SWITCH} is {switch!r}; it must be 1, 0 or force")
    import vllm

    check_version(vllm.__version__, forced=switch == "force")
    for name in ("guided", "actors"):
        ours = logging.getLogger(name)
        # the application has not configured it: write where vLLM writes
        if not ours.hasHandlers():
            ours.handlers = list(logging.getLogger("vllm").handlers)
            ours.setLevel(logging.getLogger("vllm").level)
    import vllm.v1.engine.core
    from vllm.sampling_params import SamplingParams

    from guided.integrations.vllm import metrics
    from guided.integrations.vllm.manager import GuidedManager
    from guided.integrations.vllm.request_params import validate_structured_outputs

    vllm.v1.engine.core.StructuredOutputManager = GuidedManager
    SamplingParams._validate_structured_outputs = validate_structured_outputs
    metrics.expose()


def check_version(version: str, forced: bool) -> None:
    """Raise a `RuntimeError` if this version of vLLM is untested; if `forced`, log a
    warning instead."""
    if version.partition("+")[0] in TESTED_VERSIONS:
        return
    tested = ", ".join(TESTED_VERSIONS)
    if not forced:
        raise RuntimeError(
            f"{SWITCH}=1 works with vLLM {tested}, and this is vLLM {version}: install vLLM {tested}, set "
            f"{SWITCH}=force to try this version, or {SWITCH}=0 for vLLM's own structured outputs"
        )
    _log.warning(
        "%s=force: guided was not tested with vLLM %s, but with %s",
        SWITCH,
        version,
        tested,
    )
