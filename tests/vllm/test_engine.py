"""The plugin in vLLM's real engine: outputs, preemption, aborts, actors that die."""

from __future__ import annotations

import signal
import threading
import time
from itertools import count
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
from sample_constraints import BACKENDS, KINDS, LONG, PLAIN, Wanted, regex
from vllm_engine import WAIT, Answer, Engine, mask_actors

_ids = count(1)


def requests(*wanted: Wanted, **sampling: Any) -> tuple[dict[str, Any], dict[str, Wanted]]:
    """Parameters and wanted outputs by request id, which is also the id for error reports."""
    by_id = {f"{next(_ids)} {one.name}": one for one in wanted}
    return {name: one.params(name, **sampling) for name, one in by_id.items()}, by_id


def assert_valid(answers: dict[str, Answer], wanted: dict[str, Wanted]) -> None:
    for name, answer in answers.items():
        assert answer.error is None, name
        if wanted[name] is not PLAIN:
            assert answer.finish_reason == "stop", name
        assert wanted[name].is_valid(answer.text), (name, answer.text)


def preemptions() -> float:
    from vllm.v1.metrics.reader import get_metrics_snapshot

    return sum(metric.value for metric in get_metrics_snapshot() if metric.name == "vllm:num_preemptions")


class TestOutputs:
    def test_every_kind_beside_unguided_requests(self, engine: Engine) -> None:
        params, wanted = requests(*KINDS, PLAIN, *KINDS, PLAIN)
        answers = engine.ask(params)
        assert_valid(answers, wanted)
        assert [answers[name].tokens for name in wanted if wanted[name] is PLAIN] == [300, 300]

    def test_greedy(self, engine: Engine) -> None:
        params, wanted = requests(*KINDS, PLAIN, temperature=0.0)
        assert_valid(engine.ask(params), wanted)

    def test_several_backends_in_one_engine(self, engine: Engine) -> None:
        params, wanted = requests(*BACKENDS)
        assert_valid(engine.ask(params), wanted)

    @pytest.mark.parametrize("sampling", [{"min_tokens": 200}, {"logit_bias": {65: 50.0}}])
    def test_the_mask_wins(self, engine: Engine, sampling: dict[str, Any]) -> None:
        params, wanted = requests(regex("[0-9]{4}"), regex("yes|no"), **sampling)
        answers = engine.ask(params)
        for name, answer in answers.items():
            assert wanted[name].is_valid(answer.text.strip()), (name, answer)

    def test_several_choices_of_one_request(self, engine: Engine) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        kind = RequestOutputKind.FINAL_ONLY
        params = SamplingParams(n=3, max_tokens=50, output_kind=kind, extra_args={"regex": "[a-c]{3,9}x"})
        texts = [one.text for one in engine.ask_once(params)]
        assert len(texts) == 3
        assert all(map(regex("[a-c]{3,9}x").is_valid, texts))

    def test_every_end_token_of_the_model_ends_outputs(self, engine: Engine) -> None:
        """vLLM hands the second of them over in `stop_token_ids`, which are rejected if a user gives them."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        kind = RequestOutputKind.FINAL_ONLY
        params = SamplingParams(n=24, max_tokens=50, output_kind=kind, extra_args={"regex": "[ab]"})
        outputs = engine.ask_once(params)
        assert all(map(regex("[ab]").is_valid, (one.text for one in outputs)))
        reasons = {one.stop_reason for one in outputs}
        assert len(reasons) == 2, "both are equally probable"
        assert None in reasons, "the tokenizer's own"

    def test_an_output_that_is_cut_is_a_beginning(self, engine: Engine) -> None:
        params, _ = requests(regex("[a-z]{200}"), max_tokens=20)
        (answer,) = engine.ask(params).values()
        assert answer.finish_reason == "length"
        assert regex("[a-z]+").is_valid(answer.text)


class TestBatches:
    def test_preempted_requests_continue(self, engine: Engine) -> None:
        before = preemptions()
        params, wanted = requests(*[LONG] * 10, PLAIN, PLAIN, max_tokens=450)
        assert_valid(engine.ask(params), wanted)
        assert preemptions() > before, "no request was preempted: the test is void"

    def test_aborted_requests_leave_their_rows(self, engine: Engine) -> None:
        params, wanted = requests(*[LONG] * 4, *KINDS, *[LONG] * 4, max_tokens=450)
        gone = [name for index, name in enumerate(name for name in wanted if wanted[name] is LONG) if index % 2]
        lock, given_up = threading.Lock(), set()

        def seen(name: str, answer: Answer) -> None:
            if name in gone and answer.tokens >= 5:
                with lock:
                    new = name not in given_up
                    given_up.add(name)
                if new:
                    threading.Thread(target=engine.abort, args=(name,)).start()

        answers = engine.ask(params, seen)
        assert_valid({name: answer for name, answer in answers.items() if name not in gone}, wanted)
        assert [answers[name].finish_reason for name in gone] == ["abort"] * len(gone)
        params, wanted = requests(*KINDS)
        assert_valid(engine.ask(params), wanted)


class TestRejections:
    @pytest.mark.parametrize(
        ("extra", "sampling", "words"),
        [
            ({"json_schema": '{"type": 7}'}, {}, "at '/type'"),
            ({"json_schema": "{"}, {}, "JSON"),
            ({"regex": ""}, {}, "the regex is empty"),
            ({"choice": []}, {}, "choice is empty"),
            ({"choice": ["a", ""]}, {}, "every choice is a non-empty string"),
            ({"regex": "a", "choice": ["a"]}, {}, "regex and choice are given: a request takes one constraint"),
            ({"regex": "a", "backend": "guesswork"}, {}, "guesswork"),
            ({"grammar": "start: 'a'", "backend": "outlines"}, {}, "outlines"),
            ({"regex": "a"}, {"ignore_eos": True}, "ignore_eos can't be kept"),
            ({"regex": "a"}, {"stop": ["b"]}, "stop"),
        ],
    )
    def test_invalid_requests_are_rejected_with_the_messages_of_our_server(
        self, engine: Engine, extra: dict[str, Any], sampling: dict[str, Any], words: str
    ) -> None:
        from vllm import SamplingParams
        from vllm.exceptions import VLLMValidationError

        with pytest.raises(VLLMValidationError) as refusal:
            engine.ask({f"{next(_ids)}": SamplingParams(extra_args=extra, **sampling)})
        assert words in str(refusal.value)
        params, wanted = requests(KINDS[1])
        assert_valid(engine.ask(params), wanted)


class TestSeveralEnginesOfOneProcess:
    def test_guided_requests_are_rejected_if_one_engine_has_no_worker(self, engine: Engine, vllm_model: Path) -> None:
        """With speculative decoding, vLLM's V1 runner silently drops the installed entry point."""
        from vllm.exceptions import VLLMValidationError

        drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
        second = Engine(vllm_model, logits_processors=None, speculative_config=drafts)
        try:
            for one in (second, engine):
                params, _ = requests(KINDS[1])
                with pytest.raises(VLLMValidationError, match="one of them has no worker that masks guided requests"):
                    one.ask(params)
                params, wanted = requests(PLAIN)
                assert_valid(one.ask(params), wanted)
        finally:
            second.close()
        deadline = time.monotonic() + WAIT
        while len(active_children()) > 1 and time.monotonic() < deadline:  # the killed process is about to end
            time.sleep(0.05)
        params, wanted = requests(*KINDS)
        assert_valid(engine.ask(params), wanted)


class TestFaults:
    def test_an_invalid_constraint_ends_its_request_only(self, engine: Engine) -> None:
        """The compile process checks the syntax, after vLLM has accepted the request."""
        params, wanted = requests(regex("(a"), *KINDS, PLAIN)
        bad, *_ = wanted
        answers = engine.ask(params)
        answer = answers.pop(bad)
        assert answer.error == "invalid_constraint"
        assert answer.tokens <= 1
        assert_valid(answers, wanted)

    def test_an_actor_that_is_killed_during_generation(self, engine: Engine) -> None:
        params, wanted = requests(*[LONG] * 6, PLAIN, PLAIN, max_tokens=450)
        actors = mask_actors()
        assert len(actors) == 2
        victim, lock, begun, killed = actors[0], threading.Lock(), set(), threading.Event()

        def seen(name: str, answer: Answer) -> None:
            with lock:
                if answer.tokens >= 10:
                    begun.add(name)
                if len(begun) == len(wanted) and not killed.is_set():
                    killed.set()
                    victim.send_signal(signal.SIGKILL)

        answers = engine.ask(params, seen)
        assert killed.is_set()
        lost = {name for name, answer in answers.items() if answer.error is not None}
        assert {answers[name].error for name in lost} == {"worker_died"}
        assert 1 <= len(lost) < 6, "only requests with a matcher on that actor"
        assert not [name for name in lost if wanted[name] is PLAIN]
        for name in lost:
            assert answers[name].finish_reason == "stop"
            assert regex("[a-z ]*").is_valid(answers[name].text), "the text before its end was masked"
        assert_valid({name: answer for name, answer in answers.items() if name not in lost}, wanted)
        assert engine.is_alive()
        params, wanted = requests(*KINDS, LONG, PLAIN, max_tokens=450)
        assert_valid(engine.ask(params), wanted)
