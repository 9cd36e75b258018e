"""What the integration uses of vLLM's internals is there: in the installed version, and in the sources of a newer one.

The sources are read, not imported: `GUIDED_VLLM_SOURCES=DIR pytest tests/vllm/test_interface.py`, where DIR is the
unpacked source distribution of vLLM.
"""

from __future__ import annotations

import ast
import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

SCHEDULER = "v1/core/sched/scheduler.py"
MANAGER = "v1/structured_output/__init__.py"
MASKED = "v1/structured_output/utils.py"
DEFINED = [
    # manager.py: overridden, or called
    (MANAGER, "StructuredOutputManager", "__init__(self, vllm_config)"),
    (MANAGER, "StructuredOutputManager", "grammar_init(self, request)"),
    (
        MANAGER,
        "StructuredOutputManager",
        "grammar_bitmask(self, requests, structured_output_request_ids, scheduled_spec_decode_tokens)",
    ),
    (MANAGER, "StructuredOutputManager", "validate_tokens(self, request, spec_tokens)"),
    (MANAGER, "StructuredOutputManager", "accept_tokens(self, request, new_token_ids)"),
    (MANAGER, "StructuredOutputManager", "clear_backend(self)"),
    (MANAGER, "StructuredOutputManager", "_get_constraint_bounds(self, request, spec_tokens, spec_tokens_committed)"),
    (MANAGER, "StructuredOutputManager", "_get_reasoner(self, request)"),
    (MASKED, "", "strip_speculative_padding(token_ids)"),
    ("config/scheduler.py", "SchedulerConfig", "get_scheduler_cls(self)"),
    ("config/vllm.py", "VllmConfig", "num_speculative_tokens(self)"),
    (SCHEDULER, "Scheduler", "schedule(self, throttle_prefills)"),
    (SCHEDULER, "Scheduler", "_handle_blocked_waiting_request(self, request)"),
    (SCHEDULER, "Scheduler", "get_grammar_bitmask(self, scheduler_output)"),
    (SCHEDULER, "Scheduler", "update_from_output(self, scheduler_output, model_runner_output)"),
    (SCHEDULER, "Scheduler", "_preempt_request(self, request, timestamp, drop_stale_output)"),
    # activation.py
    (
        "sampling_params.py",
        "SamplingParams",
        "_validate_structured_outputs(self, model_config, structured_outputs_config, tokenizer)",
    ),
]
"""File, class and signature of what is overridden, replaced or called."""

WRITTEN = [
    (MANAGER, "self.reasoner_cls"),
    (MANAGER, "mask_stride = max_num_spec_tokens + (0 if is_diffusion else 1)"),
    (MASKED, "cumulative_index += mask_stride"),
    ("v1/structured_output/request.py", "reasoning_ended"),
    ("sampling_params.py", "_backend: str | None"),
    ("parser/engine/adapters.py", "def implicit_reasoning_end_token_ids(self)"),
    (SCHEDULER, "self.prev_step_scheduled_req_ids: set[str]"),
    (SCHEDULER, "self.current_step < request.next_decode_eligible_step"),
    (SCHEDULER, "self.grammar_compile_error_reqs: dict[str, RequestError]"),
    (SCHEDULER, "error=request_errors.get(request.request_id)"),
    (SCHEDULER, "len(strip_speculative_padding(spec_tokens.get(req_id, [])))"),
    ("v1/core/sched/output.py", "pending_structured_output_tokens: bool"),
    ("v1/engine/core.py", "self.structured_output_manager = StructuredOutputManager(vllm_config)"),
    ("v1/engine/core.py", "vllm_config.scheduler_config.get_scheduler_cls()"),
]
"""File and text: attributes that are read or written, the lines of a bitmask, how failed requests are handed over, and
the order in which vLLM makes the manager and the scheduler."""


def _root() -> Path:
    sources = os.environ.get("GUIDED_VLLM_SOURCES")
    if sources:
        return Path(sources) / "vllm"
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs vLLM: make test-vllm")
    return Path(spec.submodule_search_locations[0])


@cache
def _text(file: str) -> str:
    return (_root() / file).read_text()


@cache
def _signatures(file: str) -> dict[tuple[str, str], list[str]]:
    """Return the names of the parameters by class and function."""
    found: dict[tuple[str, str], list[str]] = {}
    tree = ast.parse(_text(file))
    for owner in [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]:
        for node in owner.body:
            if isinstance(node, ast.FunctionDef):
                names = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                found[getattr(owner, "name", ""), node.name] = names
    return found


@pytest.mark.parametrize(("file", "owner", "signature"), DEFINED)
def test_it_is_defined(file: str, owner: str, signature: str) -> None:
    name, _, parameters = signature.removesuffix(")").partition("(")
    assert ", ".join(_signatures(file)[owner, name]) == parameters


@pytest.mark.parametrize(("file", "text"), WRITTEN)
def test_it_is_written(file: str, text: str) -> None:
    assert text in _text(file)
