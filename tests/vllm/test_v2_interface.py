"""The plugin behind vLLM's V2 interface: the loader, the request state and the context are vLLM's.

vLLM's V2 runner needs a GPU. Here a stand-in handles slots, tokens and rows like that runner, on the CPU.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mistral_common
import numpy as np
import pytest
import torch
from scripted_grammar import STOP, ScriptedBackends
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.tokenizers.mistral import MistralTokenizer
from vllm.v1.worker.gpu.sample.logits_processor import (
    LogitsContext,
    build_custom_logits_processors,
    build_custom_logits_processors_params_validator,
)

from guided.constraint import Constraint
from guided.integrations.vllm import error_reports, run_directory
from guided.integrations.vllm.configuration import model_vocabulary
from guided.integrations.vllm.request_params import VALIDATED, GuidedParams
from guided.integrations.vllm.v2_batch import V2Batch
from guided.pools.inline import InlinePool
from guided.vocabulary import Vocabulary

NAME = "guided.integrations.vllm.processor:GuidedLogitsProcessor"
WIDTH, SLOTS, LENGTH, DRAFTS = 40, 6, 64, 3
VOCABULARY = Vocabulary(
    token_bytes=(b"</s>", *(bytes([97 + index]) for index in range(20))),
    stop_token_ids=(STOP,),
    special_token_ids=frozenset({STOP}),
    padded_vocab_size=WIDTH,
)
SENTENCES = ["123", "129", "1456789", "22222222222", "3", "314159265", "9876543219"]


class Tensor:
    """Stand-in for `UvaBackedTensor` and `StagedWriteTensor`: host and device share one memory."""

    def __init__(self, *size: int) -> None:
        self.gpu = torch.zeros(size, dtype=torch.int32)
        self.np = self.gpu.numpy()


@dataclass
class Request:
    params: SamplingParams
    prompt: list[int]
    output: list[int] = field(default_factory=list)
    slot: int = -1


class Runner:
    """The steps of the V2 runner, with the processors that its loader makes."""

    def __init__(
        self, drafts: int = 0, seed: int = 0, diffusion: bool = False, others: Sequence[str] = (), **options: Any
    ) -> None:
        self.random = random.Random(seed)
        self.drafts = drafts
        self.device, self.max_num_reqs, self.vocab_size = torch.device("cpu"), SLOTS, WIDTH
        self.all_token_ids, self.total_len = Tensor(SLOTS, LENGTH), Tensor(SLOTS)
        self.prompt_len, self.prefill_len = Tensor(SLOTS), Tensor(SLOTS)
        self.free = list(range(SLOTS))
        self.running: list[Request] = []
        self.forbidden: list[int] = []
        """Tokens that other logits processors forbid before ours."""
        self.config = SimpleNamespace(
            instance_id="one",
            parallel_config=SimpleNamespace(
                pipeline_parallel_size=1,
                tensor_parallel_size=1,
                distributed_executor_backend="uni",
                enable_batch_sharded_sampling=False,
            ),
            scheduler_config=SimpleNamespace(async_scheduling=True),
            speculative_config=SimpleNamespace(num_speculative_tokens=drafts) if drafts else None,
            additional_config={"guided": {"step_wait": 60, **options}},
            model_config=SimpleNamespace(
                logits_processors=[NAME, *others], get_vocab_size=lambda: WIDTH, is_diffusion=diffusion
            ),
        )
        self.processors = build_custom_logits_processors(self.config, self, False, [NAME])

    def add(self, request: Request) -> bool:
        request.slot = slot = self.free.pop()
        tokens = request.prompt + request.output
        self.prompt_len.np[slot], self.prefill_len.np[slot] = len(request.prompt), len(tokens)
        self.total_len.np[slot] = len(tokens)
        self.all_token_ids.np[slot] = -7  # left by another request
        self.all_token_ids.np[slot, : len(tokens)] = tokens
        self.running.append(request)
        taken = [each.add_request(slot, request.params) for each in self.processors]  # calls every processor
        return any(taken)

    def remove(self, request: Request) -> None:
        """Remove a request that has ended, or is preempted, without notice."""
        self.running.remove(request)
        self.free.append(request.slot)

    def step(self, batch: list[Request] | None = None) -> dict[int, list[list[int]]]:
        """Run one step of `batch`. Returns each request's allowed tokens by row, and samples from them."""
        batch = self.random.sample(self.running, len(self.running)) if batch is None else batch
        for each in self.processors:
            each.apply_staged_writes()
        guesses = [[self.random.randrange(10) for _ in range(self.random.randint(0, self.drafts))] for _ in batch]
        fed = [
            [request.output[-1] if request.output else 5, *more] for request, more in zip(batch, guesses, strict=True)
        ]
        slots = [request.slot for request in batch]
        context = LogitsContext(
            expanded_idx_mapping=torch.tensor([s for s, row in zip(slots, fed, strict=True) for _ in row]),
            idx_mapping=torch.tensor(slots),
            idx_mapping_np=np.array(slots),
            expanded_local_pos=torch.tensor([place for row in fed for place in range(len(row))]),
            input_ids=torch.tensor([token for row in fed for token in row]),
            pos=torch.zeros(1),
            seq_lens_upper_bound_np=np.zeros(1),
        )
        logits = torch.zeros(sum(map(len, fed)), WIDTH)
        logits[:, self.forbidden] = -torch.inf
        for each in self.processors:
            logits = each.apply(logits, context)
        allowed = [torch.isfinite(row).nonzero().flatten().tolist() for row in logits]
        seen: dict[int, list[list[int]]] = {}
        for request, row in zip(batch, fed, strict=True):
            seen[id(request)] = mine = [allowed.pop(0) for _ in row]
            self._sample(request, row[1:], mine)
        return seen

    def _sample(self, request: Request, guesses: list[int], allowed: list[list[int]]) -> None:
        """Rejection sampling: drafts are accepted while the masks allow them, then one token is sampled."""
        for guess, here in zip([*guesses, -1], allowed, strict=True):
            token = guess if guess in here else self.random.choice(here)
            self.all_token_ids.np[request.slot, self.total_len.np[request.slot]] = token
            self.total_len.np[request.slot] += 1
            request.output.append(token)
            if token != guess or token == STOP:
                return


@pytest.fixture(autouse=True)
def _run(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(run_directory.VARIABLE, str(tmp_path_factory.mktemp("run")))
    monkeypatch.setattr(
        "guided.integrations.vllm.worker_registry.active_children", list
    )  # without the engines of other tests
    use_pool(monkeypatch)


def use_pool(monkeypatch: pytest.MonkeyPatch, fail_at: int | None = None) -> tuple[InlinePool, dict[str, Any]]:
    """Have the plugin open a scripted pool. Returns it, and the options that it will be opened with."""
    pool = InlinePool(VOCABULARY, ScriptedBackends(VOCABULARY, fail_at))  # type: ignore[arg-type]
    options: dict[str, Any] = {}

    def open_pool(config: object, given: dict[str, Any]) -> InlinePool:
        options.update(given)
        return pool

    monkeypatch.setattr("guided.integrations.vllm.configuration.open_pool", open_pool)
    return pool, options


def guided(*choices: str, name: str | None = None) -> Request:
    """A request that was admitted."""
    extra: dict[str, Any] = {"choice": list(choices), **({"guided_request_id": name} if name else {})}
    extra[VALIDATED] = GuidedParams(Constraint.choice(choices)).to_text()
    params = SamplingParams(max_tokens=50, extra_args=extra)
    params.update_from_generation_config({}, STOP)
    return Request(params, [5, 6, 7])


def plain() -> Request:
    return Request(SamplingParams(max_tokens=50), [5, 6])


def text(request: Request) -> str:
    assert request.output[-1] == STOP
    return "".join(map(str, request.output[: request.output.index(STOP)]))


def test_a_second_instance_of_the_same_engine_is_idle() -> None:
    """vLLM makes two if the class is both given by name and an entry point."""
    runner = Runner()
    processors = build_custom_logits_processors(runner.config, runner, False, [NAME, NAME])
    assert all(each.idle for each in processors), "the engine has an instance already"
    assert sum(not each.idle for each in runner.processors) == 1
    assert not runner.add(plain())
    assert runner.add(guided("12"))


def test_a_guided_request_beside_others() -> None:
    runner = Runner()
    mine, other = guided("123", "129"), plain()
    runner.add(other)
    runner.add(mine)
    seen = [runner.step() for _ in range(4)]
    assert [each[id(mine)] for each in seen] == [[[1]], [[2]], [[3, 9]], [[STOP]]]
    assert all(each[id(other)] == [list(range(WIDTH))] for each in seen)


def test_a_slot_is_reused_without_notice() -> None:
    runner = Runner()
    for request, allowed in (
        (guided("12"), [1]),
        (guided("34"), [3]),
        (plain(), list(range(WIDTH))),
        (guided("5"), [5]),
    ):
        runner.add(request)
        assert runner.step()[id(request)] == [allowed]
        slot = request.slot
        runner.remove(request)
        assert runner.free[-1] == slot


def test_a_preempted_request_continues() -> None:
    runner = Runner()
    request, other = guided("123456"), guided("99999999")
    runner.add(request)
    for _ in range(3):
        runner.step()
    runner.remove(request)
    runner.add(other)  # in its slot
    runner.step()
    runner.add(request)
    assert runner.step([request, other])[id(request)] == [[4]]
    assert runner.step([other])[id(other)] == [[9]]
    assert runner.step([request, other])[id(request)] == [[5]]


def test_each_draft_token_has_its_row() -> None:
    runner = Runner(drafts=DRAFTS, seed=3)
    requests = [guided(*SENTENCES) for _ in range(4)]
    for request in requests:
        runner.add(request)
    while not all(STOP in request.output for request in requests):
        runner.step([request for request in requests if STOP not in request.output])
    assert all(text(request) in SENTENCES for request in requests)


@pytest.mark.parametrize("drafts", [0, DRAFTS])
@pytest.mark.parametrize("seed", range(8))
def test_random_batches_give_valid_outputs(drafts: int, seed: int) -> None:
    runner = Runner(drafts, seed)
    choose = runner.random
    waiting, ended = [], []
    for number in range(40):
        waiting.append(plain() if number % 4 == 0 else guided(*choose.sample(SENTENCES, 3)))
    while waiting or runner.running:
        while waiting and runner.free and choose.random() < 0.7:
            runner.add(waiting.pop())
        if runner.running and choose.random() < 0.1:  # preempted, or aborted
            out = choose.choice(runner.running)
            runner.remove(out)
            if choose.random() < 0.5:
                waiting.append(out)
        batch = [request for request in runner.running if choose.random() < 0.8]
        if not batch:
            continue
        runner.step(choose.sample(batch, len(batch)))
        for request in batch:
            if STOP in request.output or len(request.output) > 20:
                runner.remove(request)
                ended.append(request)
    mine = [request for request in ended if request.params.extra_args]
    assert len(mine) > 15
    for request in mine:
        assert text(request) in request.params.extra_args["choice"]


def test_a_failed_request_gets_its_stop_token_and_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    use_pool(monkeypatch, fail_at=2)
    runner = Runner()
    request = guided("1234", name="bad")
    runner.add(request)
    assert [runner.step()[id(request)] for _ in range(3)] == [[[1]], [[2]], [[STOP]]]
    error = error_reports.take("bad")
    assert error is not None
    assert error.code == "backend_error"


def test_other_end_tokens_of_the_model_are_not_rejected_as_stop_tokens() -> None:
    request = guided("12")
    request.params.update_from_generation_config({"eos_token_id": [STOP, 30]}, STOP)
    assert request.params.stop_token_ids == [30]
    runner = Runner()
    runner.add(request)
    assert [runner.step()[id(request)] for _ in range(3)] == [[[1]], [[2]], [[STOP]]]


@pytest.mark.parametrize("drafts", [0, DRAFTS])
def test_tokens_that_cannot_be_copied_fail_the_requests_of_the_step(
    drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Runner(drafts)
    bad, other, late = guided("123456", name="bad"), plain(), guided("98")
    runner.add(bad)
    runner.add(other)
    runner.step()
    runner.add(late)

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(V2Batch, "read", fail)
        seen = runner.step([bad, other])
    assert {tuple(row) for row in seen[id(bad)]} == {(STOP,)}
    assert {tuple(row) for row in seen[id(other)]} == {tuple(range(WIDTH))}
    error = error_reports.take("bad")
    assert error is not None
    assert error.code == "internal_error"
    assert runner.step([late])[id(late)][0] == [9]


def test_tokens_that_other_processors_forbade_are_allowed_if_none_is_left() -> None:
    runner = Runner(others=["somebody:Else"])
    request = guided("12", "19")
    runner.add(request)
    runner.forbidden = [0, 1, 2, 9]
    assert [runner.step()[id(request)] for _ in range(2)] == [[[1]], [[2, 9]]]


def test_the_matcher_of_an_absent_request_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, _ = use_pool(monkeypatch)
    monkeypatch.setattr("guided.integrations.vllm.processor.MAX_ABSENT_STEPS", 5)
    runner = Runner()
    request, other = guided("1234567"), plain()
    runner.add(request)
    runner.add(other)
    runner.step()
    runner.remove(request)
    for _ in range(4):
        runner.step()
    assert pool.status().workers[0].open_sequences == 1
    runner.step()
    assert pool.status().workers[0].open_sequences == 0


def test_the_pool_is_opened_with_the_options_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    _, options = use_pool(monkeypatch)
    runner = Runner(pool="ray", mask_limit=20)
    runner.add(guided("12"))
    runner.step()
    assert options == {"pool": "ray", "mask_limit": 20, "max_replays": 2}


def test_diffusion_models_are_rejected() -> None:
    """vLLM makes logits processors for them, and does not call them."""
    Runner(diffusion=True)
    validate = build_custom_logits_processors_params_validator([NAME])
    with pytest.raises(VLLMValidationError, match="diffusion"):
        validate(guided("12").params)


def test_tokenizers_of_mistral_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM has its own tokenizer class for models with a tekken.json."""
    data = Path(mistral_common.__file__).parent / "data" / "tekken_240911.json"
    shutil.copy(data, tmp_path / "tekken.json")
    tokenizer = MistralTokenizer.from_pretrained(str(tmp_path))
    monkeypatch.setattr("vllm.tokenizers.cached_tokenizer_from_config", lambda config: tokenizer)
    model = SimpleNamespace(get_vocab_size=lambda: 131072, try_get_generation_config=dict)
    found = model_vocabulary(SimpleNamespace(model_config=model))  # type: ignore[arg-type]
    assert found.stop_token_ids == (tokenizer.eos_token_id,)
    (token,) = tokenizer.encode("Hello", add_special_tokens=False)
    assert found.token_bytes[token] == b"Hello"


def test_what_the_front_end_refuses() -> None:
    validate = build_custom_logits_processors_params_validator([NAME])
    with pytest.raises(VLLMValidationError, match="no worker of this engine"):
        validate(guided("12").params)
    validate(plain().params)
    Runner()
    validate(guided("12").params)
    with pytest.raises(VLLMValidationError, match="choice is empty"):
        validate(SamplingParams(extra_args={"choice": []}))
    with pytest.raises(VLLMValidationError, match="stop could cut"):
        validate(SamplingParams(extra_args={"choice": ["1"]}, stop=["1"]))
