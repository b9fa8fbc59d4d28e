"""The engine's contract: ids, outputs, ends, failures, and tokens that follow from the request."""

from __future__ import annotations

import gc
import random
import re
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import psutil
import pytest
import torch

import cbfn
from cbfn import (
    Engine,
    EngineConfig,
    RequestOutput,
    RequestRejected,
    RequestStatus,
    SamplingParams,
    scheduler,
)
from cbfn.runner import Runner
from cbfn.scheduler import check_invariants
from cbfn.step import StepOutputs, compose
from cbfn.streams import SlotInUse
from cbfn.turns import Turns
from cbfn.types import Request, SchedulerStalled
from tests.conftest import greedy_alone, small_model, word_tokenizer

PROMPT = [5, 17, 99, 3, 42, 42, 8]
both_depths = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, **more)


def make_engine(
    model: Any, asynchronous: bool = False, tokenizer: Any = None, **more: Any
) -> Engine:
    settings = {"page_size": 4, "num_blocks": 64, "max_batch_tokens": 16} | more
    return Engine(model, tokenizer, EngineConfig(use_async_batching=asynchronous, **settings))


def run(engine: Engine) -> dict[str, RequestOutput]:
    """Steps until all is over; returns the terminal output of each request, which comes once."""
    over: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        collect(engine.step(), over)
    return over


def collect(outputs: list[RequestOutput], over: dict[str, RequestOutput]) -> None:
    assert len({output.request_id for output in outputs}) == len(outputs)
    for output in outputs:
        assert output.request_id not in over
        if output.status.ended:
            over[output.request_id] = output


def assert_at_rest(engine: Engine) -> None:
    """All blocks are free or cached, and no request is left."""
    stats = engine.stats()
    assert stats.free_blocks + stats.cached_blocks == stats.total_blocks
    assert (stats.owned_blocks, stats.num_waiting, stats.num_running) == (0, 0, 0)
    check_invariants(engine.state)


def alone(model: Any, prompt: Any, params: SamplingParams) -> list[int]:
    """Returns the tokens of a request that has an engine to itself."""
    with make_engine(model) as engine:
        engine.add_request(prompt, params)
        (output,) = run(engine).values()
        return output.token_ids[:]


# Ids


def test_ids_are_given_in_turn_and_never_twice(llama: Any) -> None:
    with make_engine(llama) as engine:
        given = [engine.add_request(PROMPT, greedy(1)) for _ in range(3)]
        given.append(engine.add_request(PROMPT, greedy(1), request_id="mine"))
        given.append(engine.add_request(PROMPT, greedy(1), request_id="5"))
        given += [engine.add_request(PROMPT, greedy(1)) for _ in range(4)]
        assert len(set(given)) == len(given)
        assert all(isinstance(request_id, str) for request_id in given)
        assert run(engine).keys() == set(given)
        assert engine.add_request(PROMPT, greedy(1)) not in given


def test_id_is_free_once_its_terminal_output_was_returned(llama: Any) -> None:
    with make_engine(llama) as engine:
        engine.add_request(PROMPT, greedy(1), request_id="a")
        other = engine.add_request(PROMPT, greedy(4))
        with pytest.raises(RequestRejected, match="'a': the id is in use"):
            engine.add_request(PROMPT, greedy(2), request_id="a")
        for _ in engine.stream(other):  # "a" ends meanwhile, and its output waits
            pass
        with pytest.raises(RequestRejected, match="'a': the id is in use"):
            engine.add_request(PROMPT, greedy(2), request_id="a")
        assert len(run(engine)["a"].token_ids) == 1
        engine.add_request(PROMPT, greedy(2), request_id="a")
        assert len(run(engine)["a"].token_ids) == 2


# Refusals

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no tokens": ({"prompt": []}, "at least one token id, got none"),
    "negative token": ({"prompt": [4, -1]}, r"prompt\[1\].*got -1"),
    "token beyond the vocabulary": ({"prompt": [128]}, r"\[0, 128\), got 128"),
    "no integers": ({"prompt": [1.5]}, r"prompt\[0\]: expected a token id, an integer, got 1.5"),
    "nested": ({"prompt": [[1, 2]]}, r"did you mean prompt\[0\]\?"),
    "nothing": ({"prompt": None}, "prompt: expected text or token ids.*got None"),
    "text without tokenizer": ({"prompt": "w4 w5"}, "expected token ids without a tokenizer"),
    "longer than the model": ({"prompt": [1] * 256}, "256 tokens leaves no room"),
    "empty id": ({"request_id": ""}, "non-empty string"),
    "number as id": ({"request_id": 7}, "non-empty string"),
    "list as id": ({"request_id": ["a"]}, "non-empty string"),
    "no parameters": ({"params": {"max_tokens": 3}}, "expected SamplingParams"),
    "priority under fifo": ({"priority": 1}, "'fifo' does not look at it"),
    "deadline": ({"deadline": 5.0}, "deadline: not served yet"),
    "deadline in the past": ({"deadline": -1.0}, "deadline"),
    "min_tokens": ({"params": SamplingParams(min_tokens=2)}, "min_tokens: not served yet"),
    "n": ({"params": SamplingParams(n=2)}, "n: not served yet"),
    "stop": ({"params": SamplingParams(stop="x")}, "stop: not served yet"),
    "logprobs": ({"params": SamplingParams(logprobs=0)}, "logprobs: not served yet"),
    "prompt_logprobs": ({"params": SamplingParams(prompt_logprobs=1)}, "not served yet"),
    "presence_penalty": ({"params": SamplingParams(presence_penalty=1)}, "not served yet"),
    "frequency_penalty": ({"params": SamplingParams(frequency_penalty=1)}, "not served yet"),
    "repetition_penalty": ({"params": SamplingParams(repetition_penalty=2)}, "not served yet"),
    "logit_bias": ({"params": SamplingParams(logit_bias={1: 2.0})}, "logit_bias: not served yet"),
    "allowed tokens": ({"params": SamplingParams(allowed_token_ids=[1])}, "not served yet"),
    "bad words": ({"params": SamplingParams(bad_words=["x"])}, "bad_words: not served yet"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_request_touches_nothing_else(llama: Any, name: str) -> None:
    arguments, reason = REFUSED[name]
    arguments = {"prompt": PROMPT, "params": greedy(3), **arguments}
    prompt, params = arguments.pop("prompt"), arguments.pop("params")
    with make_engine(llama) as engine:
        neighbour = engine.add_request(PROMPT, greedy(6))
        engine.step()
        before = engine.state
        with pytest.raises(RequestRejected, match=reason):
            engine.add_request(prompt, params, **arguments)
        assert engine.state is before
        over = run(engine)
    assert over.keys() == {neighbour}
    assert over[neighbour].token_ids == greedy_alone(llama, PROMPT, 6)


def test_prompt_larger_than_the_cache_is_refused_with_the_sizes(llama: Any) -> None:
    with make_engine(llama, num_blocks=3) as engine:
        with pytest.raises(RequestRejected, match=r"prompt of 13 tokens can never fit.*holds 12"):
            engine.add_request([1] * 13)
        engine.add_request([1] * 12, greedy(5))
        (output,) = run(engine).values()
    assert (len(output.token_ids), output.finish_reason) == (1, "length")


def test_full_queue_refuses(llama: Any) -> None:
    with make_engine(llama, max_queue_size=2) as engine:
        engine.add_request(PROMPT, greedy(2))
        engine.add_request(PROMPT, greedy(2))
        with pytest.raises(RequestRejected, match="max_queue_size=2"):
            engine.add_request(PROMPT, greedy(2))
        engine.step()
        engine.add_request(PROMPT, greedy(2))
        assert len(run(engine)) == 3


def test_text_that_the_tokenizer_cannot_take_is_refused(llama: Any) -> None:
    with make_engine(llama, tokenizer=word_tokenizer()) as engine:
        for text in ("", "\ud800"):
            with pytest.raises(RequestRejected):
                engine.add_request(text)
        assert not engine.has_unfinished()


# Outputs


@both_depths
def test_each_step_returns_one_cumulative_output_for_each_request_with_news(
    llama: Any, asynchronous: bool
) -> None:
    prompts = {f"r{n}": [n + 1] * (3 + 9 * n) for n in range(4)}
    lengths = dict.fromkeys(prompts, 0)
    kept: list[tuple[RequestOutput, list[int]]] = []
    with make_engine(llama, asynchronous) as engine:
        for request_id, prompt in prompts.items():
            engine.add_request(prompt, greedy(5), request_id=request_id)
        over: dict[str, RequestOutput] = {}
        while engine.has_unfinished():
            assert len(over) < 4
            outputs = engine.step()
            collect(outputs, over)
            for output in outputs:
                lengths[output.request_id] += 1
                assert len(output.token_ids) == lengths[output.request_id]
                assert output.prompt_token_ids == prompts[output.request_id]
                kept.append((output, output.token_ids[:]))
        assert_at_rest(engine)
    assert over.keys() == prompts.keys()
    for output, tokens in kept:  # what was handed out has not changed since
        assert output.token_ids == tokens == over[output.request_id].token_ids[: len(tokens)]
        assert output.status.ended == (len(tokens) == 5)
        assert output.finish_reason == ("length" if len(tokens) == 5 else None)
    for request_id, prompt in prompts.items():
        assert over[request_id].token_ids == greedy_alone(llama, prompt, 5)


@both_depths
@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_exactly_max_tokens_are_generated(llama: Any, asynchronous: bool, max_tokens: int) -> None:
    with make_engine(llama, asynchronous, max_requests_per_batch=3) as engine:
        for length in range(1, 9):
            engine.add_request([9] * length, greedy(max_tokens))
        over = run(engine)
    assert {len(output.token_ids) for output in over.values()} == {max_tokens}
    assert {output.finish_reason for output in over.values()} == {"length"}


@both_depths
def test_no_token_limit_means_the_models_or_the_caches(llama: Any, asynchronous: bool) -> None:
    with make_engine(llama, asynchronous) as engine:
        engine.add_request([7] * 250, SamplingParams(max_tokens=None, temperature=0))
        (output,) = run(engine).values()
        assert (len(output.token_ids), output.finish_reason) == (6, "length")
    with make_engine(llama, asynchronous, num_blocks=5) as engine:
        engine.add_request([7] * 11, SamplingParams(max_tokens=None, temperature=0))
        engine.add_request([8] * 2, greedy(3))
        over = run(engine)
        assert len(over["0"].token_ids) == 10  # the last of 21 tokens needs no place in the cache
        assert over["0"].token_ids == greedy_alone(llama, [7] * 11, 10)
        assert over["1"].token_ids == greedy_alone(llama, [8] * 2, 3)
        assert_at_rest(engine)


@both_depths
def test_generation_ends_at_the_models_eos_and_at_stop_tokens(asynchronous: bool) -> None:
    model = small_model("llama")
    tokens = greedy_alone(model, PROMPT, 12)
    first, later = tokens[3], tokens[5]
    assert first not in tokens[:3]
    assert later not in tokens[:5]
    model.generation_config.eos_token_id = [first, 127]
    requests = {
        "eos": (greedy(12), 4, "stop", None),
        "ignored": (greedy(12, ignore_eos=True), 12, "length", None),
        "stop token": (greedy(12, ignore_eos=True, stop_token_ids=[later]), 6, "stop", later),
        "both": (greedy(12, stop_token_ids=[later, first]), 4, "stop", None),
        "limit at the eos": (greedy(4), 4, "stop", None),
        "limit before the eos": (greedy(3), 3, "length", None),
    }
    with make_engine(model, asynchronous) as engine:
        for name, (params, *_) in requests.items():
            engine.add_request(PROMPT, params, request_id=name)
        over = run(engine)
        assert_at_rest(engine)
    for name, (_, count, reason, stop_reason) in requests.items():
        output = over[name]
        assert output.token_ids == tokens[:count], name
        assert (output.finish_reason, output.stop_reason) == (reason, stop_reason), name
        assert output.status is RequestStatus.FINISHED


def test_text_has_no_ending_token_and_needs_a_tokenizer() -> None:
    model = small_model("llama")
    tokens = greedy_alone(model, [4, 5, 6], 6)
    with make_engine(model, tokenizer=word_tokenizer()) as engine:
        engine.add_request("w4 w5 w6", greedy(6), request_id="limit")
        engine.add_request([4, 5, 6], greedy(6, stop_token_ids=[tokens[3]]), request_id="stop")
        over = run(engine)
    decode = partial(word_tokenizer().decode, skip_special_tokens=True)
    assert over["limit"].prompt_token_ids == [4, 5, 6]
    assert over["limit"].text == decode(tokens)
    end = tokens.index(tokens[3])
    assert over["stop"].token_ids == tokens[: end + 1]
    assert over["stop"].text == decode(tokens[:end])
    with make_engine(model) as engine:
        engine.add_request([4], greedy(1))
        (output,) = run(engine).values()
    with pytest.raises(ValueError, match="'0' has no tokenizer"):
        _ = output.text


def test_times_are_in_order(llama: Any) -> None:
    with make_engine(llama, max_requests_per_batch=1) as engine:
        for _ in range(2):
            engine.add_request([3] * 20, greedy(3))
        for output in run(engine).values():
            times = output.times
            assert times.arrival <= times.scheduled <= times.first_token <= times.last_token


def test_stats_count(llama: Any) -> None:
    with make_engine(llama, max_requests_per_batch=2) as engine:
        assert_at_rest(engine)
        for _ in range(5):
            engine.add_request(PROMPT, greedy(2))
        assert engine.stats().num_waiting == 5
        engine.step()
        stats = engine.stats()
        assert (stats.num_waiting, stats.num_running) == (3, 2)
        assert stats.free_blocks + stats.cached_blocks + stats.owned_blocks == stats.total_blocks
        assert stats.owned_blocks == 4
        assert stats.total_blocks == 64
        run(engine)
        stats = engine.stats()
        assert stats.num_generated_tokens == 10
        assert_at_rest(engine)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cache_takes_memory_as_it_is_used(dtype: torch.dtype) -> None:
    model = small_model("llama").to(dtype)
    process = psutil.Process()
    before = process.memory_info().rss
    with make_engine(model, num_blocks=2**19) as engine:  # 1 GiB in fp32
        cache = engine.runner.kv
        assert cache.nbytes > 2**28
        assert cache.data_ptr() % 64 == 0
        assert cache.dtype == dtype
        engine.add_request(PROMPT, greedy(4))
        (output,) = run(engine).values()
        assert output.error is None
        assert process.memory_info().rss - before < 2**27
        assert cache[: 2**10].isfinite().all()


# Cancel


@both_depths
@pytest.mark.parametrize("steps", range(9))
def test_cancel_at_any_moment_gives_one_terminal_output(
    llama: Any, asynchronous: bool, steps: int
) -> None:
    """A prompt of three chunks and four tokens: queued, prefilling, decoding, in flight, over."""
    with make_engine(llama, asynchronous) as engine:
        victim = engine.add_request([11] * 40, greedy(4))
        neighbour = engine.add_request(PROMPT, greedy(12))
        over: dict[str, RequestOutput] = {}
        for _ in range(steps):
            collect(engine.step(), over)
        was_over = victim in over
        assert engine.cancel(victim) is not was_over
        assert engine.cancel(victim) is False
        collect([], over)
        over |= run(engine)
        assert engine.cancel(victim) is False
        assert engine.cancel("unknown") is False
        assert not engine.has_unfinished()
        assert engine.step() == []
        assert_at_rest(engine)
    expected = greedy_alone(llama, [11] * 40, 4)
    output = over[victim]
    if was_over:
        assert output.status is RequestStatus.FINISHED
    else:
        assert (output.status, output.finish_reason) == (RequestStatus.CANCELLED, "cancelled")
    assert output.token_ids == expected[: len(output.token_ids)]
    assert over[neighbour].token_ids == greedy_alone(llama, PROMPT, 12)


@both_depths
def test_cancelled_id_can_be_used_again_after_its_terminal_output(
    llama: Any, asynchronous: bool
) -> None:
    with make_engine(llama, asynchronous) as engine:
        engine.add_request(PROMPT, greedy(20), request_id="a")
        for _ in range(4):
            engine.step()
        assert engine.cancel("a")
        with pytest.raises(RequestRejected, match="in use"):
            engine.add_request(PROMPT, greedy(20), request_id="a")
        (output,) = engine.step()
        assert output.status is RequestStatus.CANCELLED
        engine.add_request([4, 5], greedy(8), request_id="a")
        assert run(engine)["a"].token_ids == greedy_alone(llama, [4, 5], 8)


# Stream


@both_depths
def test_stream_of_one_request_has_every_length_and_ends(llama: Any, asynchronous: bool) -> None:
    with make_engine(llama, asynchronous) as engine:
        name = engine.add_request(PROMPT, greedy(6))
        other = engine.add_request(PROMPT, greedy(9))
        outputs = list(engine.stream(name))
        assert [len(output.token_ids) for output in outputs] == [1, 2, 3, 4, 5, 6]
        assert [output.status.ended for output in outputs] == [False] * 5 + [True]
        assert {output.request_id for output in outputs} == {name}
        assert run(engine).keys() == {other}


@both_depths
def test_interleaved_consumers_lose_nothing(llama: Any, asynchronous: bool) -> None:
    """Streams of one, of all, abandoned ones, and plain steps, in any order."""
    rng = random.Random(0)
    for _ in range(15):
        with make_engine(llama, asynchronous) as engine:
            ids = [
                engine.add_request([n + 1] * rng.randint(1, 30), greedy(rng.randint(1, 8)))
                for n in range(5)
            ]
            streams: list[Iterator[RequestOutput]] = []
            lengths, over = dict.fromkeys(ids, 0), {}
            while engine.has_unfinished():
                if rng.random() < 0.3 or not streams:
                    streams.append(engine.stream(rng.choice([*ids, None])))
                if rng.random() < 0.2:
                    outputs = engine.step()
                else:
                    stream = rng.choice(streams)
                    outputs = [output for output in [next(stream, None)] if output]
                for output in outputs:
                    assert output.request_id not in over
                    assert len(output.token_ids) > lengths[output.request_id]
                    lengths[output.request_id] = len(output.token_ids)
                    if output.status.ended:
                        over[output.request_id] = output
                if rng.random() < 0.2 and streams:
                    streams.pop(rng.randrange(len(streams))).close()
            assert over.keys() == set(ids)
            assert all(next(stream, None) is None for stream in streams)


def test_abandoned_stream_leaves_the_other_outputs_of_its_step(llama: Any) -> None:
    with make_engine(llama) as engine:
        ids = {engine.add_request(PROMPT, greedy(1)) for _ in range(2)}
        first = next(engine.stream())  # both ended in the same step
        assert first.status.ended
        assert engine.has_unfinished()
        (second,) = engine.step()
        assert {first.request_id, second.request_id} == ids


def test_stream_ends_with_the_terminal_output_though_the_id_is_used_again(llama: Any) -> None:
    with make_engine(llama) as engine:
        engine.add_request(PROMPT, greedy(2), request_id="a")
        seen = 0
        for output in engine.stream("a"):
            seen += 1
            if output.status.ended:
                engine.add_request(PROMPT, greedy(5), request_id="a")
        assert seen == 2
        assert len(list(engine.stream("a"))) == 5


def test_stream_of_no_known_request_ends_at_once(llama: Any) -> None:
    with make_engine(llama) as engine:
        assert list(engine.stream()) == []
        assert list(engine.stream("unknown")) == []
        name = engine.add_request(PROMPT, greedy(2))
        list(engine.stream(name))
        engine.add_request(PROMPT, greedy(2))
        before = engine.state
        assert list(engine.stream(name)) == []
        assert list(engine.stream("unknown")) == []
        assert engine.state is before


def test_stream_times_out_when_nothing_comes_and_can_be_taken_up_again(llama: Any) -> None:
    with make_engine(llama) as engine:
        name = engine.add_request([3] * 60, greedy(3))  # four chunks before the first token
        timeouts, outputs = 0, []
        while engine.has_unfinished():
            stream = engine.stream(name, timeout=0)
            if timeouts < 3:
                with pytest.raises(TimeoutError, match="nothing came for 0 seconds"):
                    next(stream)
                timeouts += 1
            outputs += stream
        assert [len(output.token_ids) for output in outputs] == [1, 2, 3]


def test_stream_with_a_long_timeout_is_not_cut(llama: Any) -> None:
    with make_engine(llama) as engine:
        engine.add_request([3] * 60, greedy(3))
        assert len(list(engine.stream(timeout=1000))) == 3


def test_requests_may_be_added_while_streaming(llama: Any) -> None:
    with make_engine(llama) as engine:
        first = engine.add_request(PROMPT, greedy(3))
        seen = {first: 0}
        for output in engine.stream():
            seen[output.request_id] = seen.get(output.request_id, 0) + 1
            if len(seen) < 4:
                seen[engine.add_request(PROMPT, greedy(3))] = 0
        assert list(seen.values()) == [3, 3, 3, 3]


# Close


@both_depths
def test_use_after_close_raises(llama: Any, asynchronous: bool) -> None:
    engine = make_engine(llama, asynchronous)
    name = engine.add_request(PROMPT, greedy(9))
    running = engine.stream(name)
    next(running)
    engine.close()
    engine.close()
    uses: list[Callable[[], Any]] = [
        lambda: engine.add_request(PROMPT),
        lambda: engine.cancel(name),
        engine.step,
        lambda: next(engine.stream()),
        lambda: next(running),
        lambda: engine.pause().__enter__(),
        engine.weights_updated,
    ]
    for use in uses:
        with pytest.raises(RuntimeError, match="the engine is closed"):
            use()
    assert engine.stats().total_blocks == 64


def test_leaving_the_context_closes_also_after_an_error(llama: Any) -> None:
    def fail_inside(engine: Engine) -> None:
        with engine:
            engine.add_request(PROMPT, greedy(9))
            engine.step()
            raise KeyError

    engine = make_engine(llama)
    with pytest.raises(KeyError):
        fail_inside(engine)
    with pytest.raises(RuntimeError, match="closed"):
        engine.step()


# Policies


def leaving_out(name: str) -> Any:
    def policy(state: Any) -> Any:
        return [i for i in (*state.decoding, *state.prefilling, *state.waiting) if i != name]

    return policy


@both_depths
def test_policy_that_leaves_a_request_out_stalls_once_the_others_are_over(
    llama: Any, asynchronous: bool
) -> None:
    with make_engine(llama, asynchronous, scheduler=leaving_out("left")) as engine:
        engine.add_request(PROMPT, greedy(4), request_id="left")
        engine.add_request(PROMPT, greedy(4), request_id="served")
        over: dict[str, RequestOutput] = {}
        while "served" not in over:
            collect(engine.step(), over)
        for _ in range(2):
            with pytest.raises(SchedulerStalled, match=r"1 requests are unfinished.*leaving_out"):
                engine.step()
            with pytest.raises(SchedulerStalled):
                next(engine.stream("left"))
        engine.add_request(PROMPT, greedy(2), request_id="late")
        while "late" not in over:
            collect(engine.step(), over)
        assert engine.cancel("left")
        (output,) = engine.step()
        assert (output.request_id, output.finish_reason) == ("left", "cancelled")
        assert not engine.has_unfinished()
        assert_at_rest(engine)


def test_outputs_that_a_stream_left_come_before_the_stall(llama: Any) -> None:
    with make_engine(llama, scheduler=leaving_out("left")) as engine:
        engine.add_request(PROMPT, greedy(4), request_id="left")
        for name in ("a", "b"):
            engine.add_request(PROMPT, greedy(3), request_id=name)
        list(engine.stream("a"))
        with pytest.raises(SchedulerStalled):
            next(engine.stream("left"))
        (output,) = engine.step()
        assert (output.request_id, output.status.ended) == ("b", True)
        with pytest.raises(SchedulerStalled):
            engine.step()


def test_policy_of_the_caller_sees_priorities(llama: Any) -> None:
    def by_priority(state: Any) -> Any:
        waiting = sorted(state.waiting, key=lambda i: -state.request(i).priority)
        return [*state.decoding, *state.prefilling, *waiting]

    with make_engine(llama, scheduler=by_priority, max_requests_per_batch=1) as engine:
        for priority in (0, 2, 1):
            engine.add_request(PROMPT, greedy(2), request_id=f"p{priority}", priority=priority)
        order = [output.request_id for output in engine.stream() if output.status.ended]
    assert order == ["p2", "p1", "p0"]


# Failing steps


def engine_with_step(monkeypatch: Any, step: Any, model: Any, **more: Any) -> Engine:
    """Returns an engine whose runner has a step function of the test's."""
    monkeypatch.setattr("cbfn.engine.Runner", partial(Runner, step=step))
    return make_engine(model, **more)


class Failing:
    """The usual step, but the launches numbered in `on` raise or return what `act` does."""

    def __init__(self, on: set[int], act: Callable[[StepOutputs], Any]) -> None:
        self.on, self.act = on, act
        self.step = compose()
        self.calls = 0
        self.rows: list[int] = []

    def __call__(self, inputs: Any, kv: Any, previous_token_ids: Any) -> Any:
        self.calls += 1
        outputs = self.step(inputs, kv, previous_token_ids)
        return self.act(outputs) if self.calls - 1 in self.on else outputs


def raising(error: BaseException) -> Callable[[StepOutputs], Any]:
    def act(outputs: StepOutputs) -> Any:
        raise error

    return act


@both_depths
@pytest.mark.parametrize("error", [RuntimeError("bad weather"), MemoryError("full"), ValueError()])
@pytest.mark.parametrize("at", range(6))
def test_failing_step_fails_its_requests_with_the_cause_and_nobody_else(
    monkeypatch: Any, llama: Any, asynchronous: bool, error: Exception, at: int
) -> None:
    step = Failing({at}, raising(error))
    config = {"max_requests_per_batch": 2, "allow_block_sharing": False}
    with engine_with_step(monkeypatch, step, llama, asynchronous=asynchronous, **config) as engine:
        prompts = {engine.add_request([n + 1] * 5, greedy(3)): [n + 1] * 5 for n in range(6)}
        over = run(engine)
        assert over.keys() == prompts.keys()
        failed = {name for name, output in over.items() if output.error is not None}
        assert 1 <= len(failed) <= 2
        for name, output in over.items():
            expected = greedy_alone(llama, prompts[name], 3)
            if name in failed:
                assert output.error is error
                assert (output.status, output.finish_reason) == (RequestStatus.FAILED, "error")
                assert output.token_ids == expected[: len(output.token_ids)]
                assert len(output.token_ids) < 3
            else:
                assert output.token_ids == expected
        assert_at_rest(engine)
        engine.add_request(PROMPT, greedy(4))
        (output,) = run(engine).values()
        assert output.token_ids == greedy_alone(llama, PROMPT, 4)


GARBAGE: dict[str, Callable[[StepOutputs], Any]] = {
    "nothing": lambda outputs: None,
    "too few tokens": lambda outputs: StepOutputs(outputs.token_ids[:-1]),
    "too many tokens": lambda outputs: StepOutputs(torch.cat([outputs.token_ids] * 2)),
    "two tokens a row": lambda outputs: StepOutputs(outputs.token_ids[:, None].expand(-1, 2)),
    "beyond the vocabulary": lambda outputs: StepOutputs(outputs.token_ids + 128),
    "negative": lambda outputs: StepOutputs(outputs.token_ids - 200),
}


@both_depths
@pytest.mark.parametrize("name", GARBAGE)
def test_step_that_returns_what_no_step_can_fails_its_requests(
    monkeypatch: Any, llama: Any, asynchronous: bool, name: str
) -> None:
    step = Failing({1}, GARBAGE[name])
    with engine_with_step(monkeypatch, step, llama, asynchronous=asynchronous) as engine:
        for _ in range(2):
            engine.add_request(PROMPT, greedy(4))
        over = run(engine)
        assert [output.status for output in over.values()] == [RequestStatus.FAILED] * 2
        assert all(isinstance(output.error, Exception) for output in over.values())
        assert_at_rest(engine)
        engine.add_request(PROMPT, greedy(4))
        (output,) = run(engine).values()
        assert output.token_ids == greedy_alone(llama, PROMPT, 4)


@both_depths
def test_every_step_failing_ends_everything(
    monkeypatch: Any, llama: Any, asynchronous: bool
) -> None:
    step = Failing(set(range(100)), raising(RuntimeError("always")))
    with engine_with_step(monkeypatch, step, llama, asynchronous=asynchronous) as engine:
        for _ in range(20):
            engine.add_request(PROMPT, greedy(4))
        assert {output.finish_reason for output in run(engine).values()} == {"error"}
        assert_at_rest(engine)


@both_depths
@pytest.mark.parametrize("at", range(4))
def test_interrupted_step_is_repeated(
    monkeypatch: Any, llama: Any, asynchronous: bool, at: int
) -> None:
    step = Failing({at}, raising(KeyboardInterrupt()))
    with engine_with_step(monkeypatch, step, llama, asynchronous=asynchronous) as engine:
        engine.add_request(PROMPT, greedy(5))
        engine.add_request([2] * 20, greedy(5))
        over: dict[str, RequestOutput] = {}
        interrupts = 0
        while engine.has_unfinished():
            try:
                collect(engine.step(), over)
            except KeyboardInterrupt:
                interrupts += 1
        assert interrupts == 1
    assert over["0"].token_ids == greedy_alone(llama, PROMPT, 5)
    assert over["1"].token_ids == greedy_alone(llama, [2] * 20, 5)


# The same tokens whatever surrounds a request


SAMPLERS = [
    SamplingParams(max_tokens=10, temperature=0),
    SamplingParams(max_tokens=10, temperature=1, seed=1),
    SamplingParams(max_tokens=10, temperature=0.7, top_k=5, seed=2),
    SamplingParams(max_tokens=10, temperature=1.5, top_p=0.8, seed=-3),
    SamplingParams(max_tokens=10, temperature=1e-4, seed=4),
    SamplingParams(max_tokens=10, temperature=1.1, min_p=0.1, seed=2**64 - 5),
]


@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"asynchronous": True},
        {"page_size": 16, "num_blocks": 16, "max_batch_tokens": 512},
        {"num_blocks": 20, "asynchronous": True},
        {"num_blocks": 20, "scheduler": "prefill_first", "allow_block_sharing": False},
        {"num_blocks": 20, "cpu_offload_space": 1e-3},
        {"num_blocks": 20, "cpu_offload_space": 1e-3, "asynchronous": True},
        {"max_batch_tokens": 5, "max_requests_per_batch": 3},
    ],
    ids=str,
)
def test_seeded_tokens_do_not_depend_on_batch_mates_or_settings(
    llama: Any, setting: dict[str, Any]
) -> None:
    rng = random.Random(1)
    prompts = [[rng.randrange(128) for _ in range(rng.randint(1, 30))] for _ in SAMPLERS]
    expected = [alone(llama, p, s) for p, s in zip(prompts, SAMPLERS, strict=True)]
    assert expected[0] == greedy_alone(llama, prompts[0], 10)
    order = [*range(len(SAMPLERS))] * 2
    rng.shuffle(order)
    with make_engine(llama, **setting) as engine:
        index_of = {engine.add_request(prompts[i], SAMPLERS[i]): i for i in order}
        over = run(engine)
        preemptions, offloads = engine.stats().num_preemptions, engine.stats().num_offloads
    assert offloads == (preemptions if "cpu_offload_space" in setting else 0)
    assert (preemptions > 0) == (setting.get("num_blocks") == 20)
    for name, index in index_of.items():
        assert over[name].token_ids == expected[index]


def test_requests_without_a_seed_differ_and_repeat_with_the_engines_seed(llama: Any) -> None:
    def sample(seed: int) -> list[list[int]]:
        with make_engine(llama, seed=seed) as engine:
            for _ in range(4):
                engine.add_request(PROMPT, SamplingParams(max_tokens=12))
            return [output.token_ids[:] for _, output in sorted(run(engine).items())]

    first = sample(0)
    assert len(set(map(tuple, first))) == 4
    assert sample(0) == first
    assert all(tokens not in first for tokens in sample(1))


# Memory under pressure


@both_depths
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("space", [0.0, 2e-6, 1e-3])
def test_little_memory_changes_no_token(family: str, space: float, asynchronous: bool) -> None:
    """The host takes nothing, a little, or all of what is preempted."""
    model = small_model(family)
    rng = random.Random(3)
    prompts = [[rng.randrange(128) for _ in range(rng.randint(1, 30))] for _ in range(12)]
    blocks = {"llama": 20, "mistral": 20, "gemma3": 24}[family]
    settings = {"num_blocks": blocks, "safety_margin": 0.0, "cpu_offload_space": space}
    with make_engine(model, asynchronous, **settings) as engine:
        names = [engine.add_request(prompt, greedy(20)) for prompt in prompts]
        over = run(engine)
        stats = engine.stats()
        check_invariants(engine.state)
    for name, prompt in zip(names, prompts, strict=True):
        assert over[name].token_ids == greedy_alone(model, prompt, 20)
    assert stats.num_preemptions
    assert stats.free_host_blocks == stats.host_blocks
    if space != 2e-6:
        assert stats.num_offloads == (stats.num_preemptions if space else 0)


def test_host_memory_that_is_not_there_is_refused(llama: Any) -> None:
    with pytest.raises(ValueError, match=r"EngineConfig.cpu_offload_space: .* GiB that are free"):
        make_engine(llama, cpu_offload_space=1e6)


@both_depths
def test_copy_that_fails_fails_its_step(
    llama: Any, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("planted")

    settings = {"num_blocks": 20, "safety_margin": 0.0, "cpu_offload_space": 1e-3}
    monkeypatch.setattr("cbfn.kv.move", fail)
    with make_engine(llama, asynchronous, **settings) as engine:
        names = [engine.add_request([n, *PROMPT * 2], greedy(20)) for n in range(12)]
        over = run(engine)
        assert engine.stats().num_offloads
        assert engine.stats().free_host_blocks == engine.stats().host_blocks
    failed = [name for name in names if over[name].status is RequestStatus.FAILED]
    assert failed
    for number, name in enumerate(names):
        if name not in failed:
            assert over[name].token_ids == greedy_alone(llama, [number, *PROMPT * 2], 20)


@both_depths
def test_case_11_cancel_while_offloaded(llama: Any, asynchronous: bool) -> None:
    settings = {"num_blocks": 20, "safety_margin": 0.0, "cpu_offload_space": 1e-3}
    with make_engine(llama, asynchronous, **settings) as engine:
        names = [engine.add_request([n, *PROMPT * 2], greedy(20)) for n in range(12)]
        over: dict[str, RequestOutput] = {}
        cancelled = None
        while engine.has_unfinished():
            collect(engine.step(), over)
            saved = [e for e in engine.state.entries.values() if e.saved is not None]
            if saved and cancelled is None:
                cancelled = saved[0].request.request_id
                assert engine.cancel(cancelled)
        assert cancelled is not None
        assert over[cancelled].status is RequestStatus.CANCELLED
        assert engine.stats().free_host_blocks == engine.stats().host_blocks
    for number, name in enumerate(names):
        if name != cancelled:
            assert over[name].token_ids == greedy_alone(llama, [number, *PROMPT * 2], 20)


# Sharing and weights


def test_shared_prompt_tokens_are_counted_exactly(llama: Any) -> None:
    def cached(engine: Engine, prompt: list[int]) -> int:
        engine.add_request(prompt, greedy(3))
        (output,) = run(engine).values()
        assert output.token_ids == greedy_alone(llama, prompt, 3)
        return output.num_cached_tokens

    base = [n + 1 for n in range(12)]
    with make_engine(llama, num_blocks=40) as engine:
        assert cached(engine, base) == 0
        assert cached(engine, base) == 8  # three full pages, one token at least is computed
        assert cached(engine, base[:11]) == 8
        assert cached(engine, [*base, 99, 98]) == 12
        assert cached(engine, [*base[:5], 99, *base[6:]]) == 4
        assert cached(engine, [99, *base[1:]]) == 0
        assert cached(engine, base[:4]) == 0
        assert engine.stats().num_cached_tokens == 32
    with make_engine(llama, allow_block_sharing=False) as engine:
        assert cached(engine, base) == cached(engine, base) == 0


def test_generated_tokens_are_shared_with_the_next_turn(llama: Any) -> None:
    with make_engine(llama) as engine:
        engine.add_request(PROMPT, greedy(10))
        (first,) = run(engine).values()
        conversation = [*PROMPT, *first.token_ids, 50, 51]
        engine.add_request(conversation, greedy(4))
        (second,) = run(engine).values()
    assert second.num_cached_tokens == 16  # of 17 tokens the last has no KV yet
    assert second.token_ids == greedy_alone(llama, conversation, 4)


@both_depths
def test_case_19_weights_changed_in_a_pause_act_as_in_a_fresh_engine(asynchronous: bool) -> None:
    model, prompt = small_model("llama"), [n + 1 for n in range(12)]
    with make_engine(model, asynchronous) as engine:
        engine.add_request(prompt, greedy(6))
        engine.add_request(prompt[:8], greedy(30), request_id="across")
        for _ in range(5):
            engine.step()
        with engine.pause():
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += 0.02 * torch.arange(parameter.numel()).sin().view_as(parameter)
            engine.weights_updated()
        over = run(engine)
        assert len(over["across"].token_ids) == 30
        fresh = greedy_alone(model, prompt, 6)
        for expected in (0, 8):  # nothing of the old weights, then all of the new ones
            engine.add_request(prompt, greedy(6))
            (output,) = run(engine).values()
            assert output.token_ids == fresh
            assert output.num_cached_tokens == expected
        # what was computed across the change is never shared
        engine.add_request([*prompt[:8], *over["across"].token_ids[:12]], greedy(2))
        (output,) = run(engine).values()
        assert output.num_cached_tokens == 8
        assert_at_rest(engine)
    assert fresh != greedy_alone(small_model("llama"), prompt, 6)


@both_depths
def test_running_requests_are_computed_again_with_new_weights(asynchronous: bool) -> None:
    model = small_model("llama", seed=4)
    settings = {"after_weights_update": "recompute", "cpu_offload_space": 1e-3}
    with make_engine(model, asynchronous, **settings) as engine:
        names = [engine.add_request([n, *PROMPT], greedy(12)) for n in range(3)]
        for _ in range(6):
            engine.step()
        with engine.pause(), torch.no_grad():
            s = engine.state.sequences
            old = {s.request_id[seat]: list(s.log[seat].generated) for seat in s.order.tolist()}
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape))
        engine.weights_updated()
        over = run(engine)
        assert engine.stats().num_preemptions == 3
    for number, name in enumerate(names):
        assert old[name]
        known = [number, *PROMPT, *old[name]]
        new = greedy_alone(model, known, 12 - len(old[name]))
        assert over[name].token_ids == old[name] + new


def test_parameters_that_were_replaced_are_seen_after_weights_updated() -> None:
    model, other = small_model("llama"), small_model("llama", seed=1)
    with Engine(model, config=EngineConfig(page_size=4)) as engine:
        model.load_state_dict(other.state_dict(), assign=True)
        engine.weights_updated()
        engine.add_request(PROMPT, greedy(6))
        (*_, output) = engine.stream()
        assert output.token_ids == greedy_alone(other, PROMPT, 6)


def test_interrupted_commit_is_repeated(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    commit, calls = scheduler.commit, []

    def interrupted(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return commit(*arguments)

    with Engine(llama, config=EngineConfig(page_size=4)) as engine:
        engine.add_request(PROMPT, greedy(6))
        monkeypatch.setattr(scheduler, "commit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(engine.stream())
        (*_, output) = engine.stream()
        assert output.token_ids == greedy_alone(llama, PROMPT, 6)


def test_generate_waits_where_the_queue_is_full(llama: Any) -> None:
    config = EngineConfig(page_size=4, max_queue_size=2, max_requests_per_batch=2)
    outputs = cbfn.generate(llama, [PROMPT, []] * 6, greedy(3), config=config)
    assert [output.finish_reason for output in outputs] == ["length", "error"] * 6
    assert all(output.text == "" for output in outputs[1::2])


@both_depths
def test_nothing_is_in_flight_in_a_pause(llama: Any, asynchronous: bool) -> None:
    with make_engine(llama, asynchronous) as engine:
        name = engine.add_request(PROMPT, greedy(6))
        for _ in range(3):
            engine.step()
        with engine.pause():
            assert not engine.state.uncommitted
        assert run(engine)[name].token_ids == greedy_alone(llama, PROMPT, 6)


# generate


def test_generate_keeps_the_order_and_takes_texts_and_ids(llama: Any) -> None:
    prompts: list[Any] = ["w4 w5 w6", [7] * 20, "w9", np.array([4, 5, 6]), range(30, 40)]
    ids = [[4, 5, 6], [7] * 20, [9], [4, 5, 6], list(range(30, 40))]
    outputs = cbfn.generate(llama, iter(prompts), greedy(5), tokenizer=word_tokenizer())
    assert [output.prompt_token_ids[:] for output in outputs] == ids
    assert [output.token_ids[:] for output in outputs] == [greedy_alone(llama, p, 5) for p in ids]


@both_depths
def test_step_in_a_pause_is_over_when_it_returns(llama: Any, asynchronous: bool) -> None:
    with make_engine(llama, asynchronous) as engine:
        name = engine.add_request(PROMPT, greedy(8))
        with engine.pause():
            with engine.pause():  # what a caller paused already stays so
                pass
            for _ in range(3):
                engine.step()
                assert not engine.state.uncommitted
        engine.step()
        assert bool(engine.state.uncommitted) is asynchronous
        assert run(engine)[name].token_ids == greedy_alone(llama, PROMPT, 8)


@pytest.mark.usefixtures("without_annotation_checks")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((EngineConfig(),), "tokenizer: expected a tokenizer, a path or an id, got EngineConfig"),
        (
            (None, {"page_size": 3}),
            "config: expected an EngineConfig or None, got {'page_size': 3}",
        ),
    ],
)
def test_arguments_in_the_wrong_place_are_named(
    llama: Any, arguments: tuple[Any, ...], expected: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(expected)):
        Engine(llama, *arguments)


def test_a_wrong_config_is_refused_before_a_model_is_looked_for() -> None:
    with pytest.raises(ValueError, match="config: expected an EngineConfig or None, got 'fifo'"):
        Engine("/no/such/model", config="fifo")  # type: ignore[arg-type]


@pytest.mark.usefixtures("without_annotation_checks")
def test_parts_of_a_step_that_are_no_functions_are_named(llama: Any) -> None:
    with pytest.raises(ValueError, match="compose: sample: expected a function, got 3"):
        compose(sample=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="step: expected a step function or None, got 3"):
        Runner(llama, step=3)  # type: ignore[arg-type]


@pytest.mark.usefixtures("without_annotation_checks")
@pytest.mark.parametrize(
    ("prompts", "params", "expected"),
    [
        ([1, 2, 3], None, "prompts: expected a list of prompts, got one prompt: [1, 2, 3]"),
        (None, None, "prompts: expected a list of prompts, got None"),
        ([[1], [2]], {"max_tokens": 2}, "one for each prompt, or None, got {'max_tokens': 2}"),
    ],
)
def test_generate_names_what_is_no_list(
    llama: Any, prompts: Any, params: Any, expected: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(expected)):
        cbfn.generate(llama, prompts, params)


@pytest.mark.usefixtures("without_annotation_checks")
def test_policy_that_offers_nothing_is_named(llama: Any) -> None:
    with make_engine(llama, scheduler=lambda state: None) as engine:
        engine.add_request([1, 2, 3])
        with pytest.raises(
            ValueError, match="policy: expected ids of unfinished requests, got None"
        ):
            engine.step()


def test_host_memory_for_less_than_a_chunk_is_noted(llama: Any) -> None:
    with make_engine(llama, cpu_offload_space=1e-9) as engine:
        assert any("cpu_offload_space holds no chunk" in note for note in engine.stats().notes)


def test_generate_returns_refused_prompts_at_their_index(llama: Any) -> None:
    prompts: list[Any] = [PROMPT, [], [4, 999], "text", None, PROMPT, 17, ["a"], [1] * 300]
    outputs = cbfn.generate(llama, prompts, greedy(4))
    expected = greedy_alone(llama, PROMPT, 4)
    for index, output in enumerate(outputs):
        if index in (0, 5):
            assert output.token_ids == expected
            continue
        assert isinstance(output.error, RequestRejected)
        assert (output.status, output.finish_reason) == (RequestStatus.FAILED, "error")
        assert len(output.token_ids) == 0
    assert len(outputs) == len(prompts)
    assert outputs[2].prompt_token_ids == (4, 999)
    assert "got 999" in str(outputs[2].error)


def test_generate_takes_parameters_for_all_or_for_each(llama: Any) -> None:
    each = [greedy(2), None, greedy(5)]
    outputs = cbfn.generate(llama, [PROMPT] * 3, each)
    assert [len(output.token_ids) for output in outputs] == [2, 16, 5]
    assert [len(output.token_ids) for output in cbfn.generate(llama, [PROMPT] * 2)] == [16, 16]
    with pytest.raises(ValueError, match="one for each of 3 prompts, got 2"):
        cbfn.generate(llama, [PROMPT] * 3, each[:2])
    assert cbfn.generate(llama, []) == []
    assert cbfn.generate(llama, [], []) == []


def test_generate_does_not_take_a_text_for_a_list(llama: Any) -> None:
    with pytest.raises(ValueError, match="expected a list of prompts, got the string 'w4 w5'"):
        cbfn.generate(llama, "w4 w5", tokenizer=word_tokenizer())


def test_generate_shows_progress_on_stderr_only_when_asked(llama: Any, capsys: Any) -> None:
    cbfn.generate(llama, [PROMPT] * 3, greedy(2))
    assert capsys.readouterr() == ("", "")
    cbfn.generate(llama, [PROMPT, PROMPT, []], greedy(2), progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "3/3" in err


@pytest.mark.compiled
def test_compiled_engine_samples_as_the_eager_one(llama: Any) -> None:
    params = SamplingParams(max_tokens=6, temperature=1.2, top_p=0.95, seed=3)
    config = EngineConfig(page_size=4, num_blocks=64, max_batch_tokens=16, compile=True)
    (output,) = cbfn.generate(llama, [PROMPT], params, config=config)
    assert output.error is None
    assert output.token_ids == alone(llama, PROMPT, params)


# The loop of one's own


@both_depths
def test_scheduler_and_runner_make_a_loop_of_ones_own(llama: Any, asynchronous: bool) -> None:
    prompts = {f"r{n}": [n + 1] * (3 + 7 * n) for n in range(4)}
    runner = Runner(llama, EngineConfig(page_size=4, num_blocks=40, max_batch_tokens=16))
    state = scheduler.init(runner.cache_spec, runner.config)
    for name, prompt in prompts.items():
        state = scheduler.submit(state, Request(name, prompt, greedy(6)))
    over: dict[str, RequestOutput] = {}
    previous = None
    while state.ids:
        state, plan = scheduler.schedule(state)
        ticket = runner.launch(plan) if plan is not None else None
        due = previous if asynchronous else ticket
        previous = ticket
        if due is not None:
            result = runner.collect(due)
            state, outputs = scheduler.commit(state, due.plan, result)
            over |= {output.request_id: output for output in outputs if output.status.ended}
    runner.close()
    for name, prompt in prompts.items():
        assert over[name].token_ids == greedy_alone(llama, prompt, 6)


def test_tickets_are_collected_once_in_order_and_two_at_most_are_out(llama: Any) -> None:
    runner = Runner(llama, EngineConfig(page_size=4, num_blocks=40))
    state = scheduler.init(runner.cache_spec, runner.config)
    state = scheduler.submit(state, Request("a", PROMPT, greedy(6)))
    state, plan = scheduler.schedule(state)
    first = runner.launch(plan)
    state, plan = scheduler.schedule(state)
    second = runner.launch(plan)
    with pytest.raises(SlotInUse, match="collect it first"):
        runner.launch(plan)
    with pytest.raises(SlotInUse, match="in order"):
        runner.collect(second)
    state, _ = scheduler.commit(state, first.plan, runner.collect(first))
    with pytest.raises(SlotInUse):
        runner.collect(first)
    tokens = greedy_alone(llama, PROMPT, 3)
    state, plan = scheduler.schedule(state)
    third = runner.launch(plan)  # the refused launch has left no trace
    for number, ticket in enumerate((second, third), 2):
        state, outputs = scheduler.commit(state, ticket.plan, runner.collect(ticket))
        assert outputs[0].token_ids == tokens[:number]
    runner.close()


# What callers and models may do


@both_depths
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_request_whose_kv_is_nan_harms_no_other(family: str, asynchronous: bool) -> None:
    model = small_model(family)
    head = model.get_output_embeddings()  # NaN in a tied one would be in the logits of all
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = float("nan")
    prompts = [[n, n + 1, n + 2, n + 3, n + 4] for n in range(10, 22)]
    expected = [greedy_alone(model, prompt, 8) for prompt in prompts]
    with make_engine(model, asynchronous, num_blocks=40, page_size=4) as engine:
        for number in range(12):
            engine.add_request([7, number, number], greedy(3))
        run(engine)
        for _ in range(2):  # the second time with what is cached of the first
            names = [engine.add_request(prompt, greedy(8)) for prompt in prompts]
            ended = run(engine)
            assert [ended[name].token_ids[:] for name in names] == expected


@both_depths
def test_autocast_of_the_caller_changes_nothing(
    asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for user in ("linear", "fusing"):  # torch's own linear layers, as on a GPU
        monkeypatch.setattr(f"cbfn.{user}.is_faster", lambda _: False)
    model = small_model("llama")
    expected = greedy_alone(model, PROMPT, 6)
    with (
        torch.autocast("cpu", torch.bfloat16),
        make_engine(model, asynchronous) as engine,
    ):
        name = engine.add_request(PROMPT, greedy(6))
        assert run(engine)[name].token_ids == expected


def test_a_default_device_of_the_caller_changes_nothing(llama: Any) -> None:
    expected = greedy_alone(llama, PROMPT, 12)
    pressed = {"num_blocks": 8, "safety_margin": 0.0, "cpu_offload_space": 1e-3}
    with torch.device("meta"), make_engine(llama, allow_block_sharing=False, **pressed) as engine:
        for _ in range(3):
            engine.add_request(PROMPT, greedy(12))
        assert all(output.token_ids == expected for output in run(engine).values())
        assert engine.stats().num_offloads


def test_weights_that_are_not_finite_are_taken_as_they_are() -> None:
    model = small_model("llama")
    with torch.no_grad():
        model.lm_head.weight[7, 0] = float("inf")
    with make_engine(model) as engine:
        name = engine.add_request(PROMPT, greedy(6))
        assert run(engine)[name].token_ids == greedy_alone(model, PROMPT, 6)


def test_an_error_that_is_kept_keeps_no_tensor_of_the_step(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[weakref.ref[Any]] = []

    def fail(logits: Any, _: Any) -> Any:
        seen.append(weakref.ref(logits))
        raise KeyError("planted")

    step = compose(sample=fail)
    monkeypatch.setattr("cbfn.engine.Runner", partial(Runner, step=step))
    with make_engine(llama) as engine:
        engine.add_request(PROMPT, greedy(4))
        (kept,) = run(engine).values()
    gc.collect()
    assert seen[0]() is None
    assert kept.error is not None
    assert "in fail" in "".join(traceback.format_exception(kept.error))


@pytest.mark.parametrize("change", [lambda m: m.double(), lambda m: m.resize_token_embeddings(140)])
def test_weights_of_another_shape_or_dtype_are_refused(change: Any) -> None:
    model = small_model("llama")
    with make_engine(model) as engine:
        change(model)
        with pytest.raises(ValueError, match=r"weights_updated: .*: expected \(torch.float32, 128"):
            engine.weights_updated()


@pytest.mark.usefixtures("without_annotation_checks")
def test_tokens_that_are_no_integers_fail_their_step(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = compose(sample=lambda logits, _: logits.amax(-1))
    monkeypatch.setattr("cbfn.engine.Runner", partial(Runner, step=step))
    with make_engine(llama) as engine:
        engine.add_request(PROMPT, greedy(4))
        (output,) = run(engine).values()
    assert "token_ids: expected torch.int64 or torch.int32, got torch.float32" in str(output.error)


def test_calls_from_several_threads_take_turns(llama: Any) -> None:
    prompts = [[n + 1, n + 2, n + 3] for n in range(80)]
    expected = [greedy_alone(llama, prompt, 5) for prompt in prompts]
    with make_engine(llama, asynchronous=True, num_blocks=200) as engine:

        def serve(mine: list[int]) -> dict[int, list[int]]:
            found = {}
            for number in mine:
                name = engine.add_request(prompts[number], greedy(5))
                *_, output = engine.stream(name)
                found[number] = output.token_ids[:]
            return found

        with ThreadPoolExecutor(8) as pool:
            shares = [list(range(at, 80, 8)) for at in range(8)]
            answers = {n: tokens for part in pool.map(serve, shares) for n, tokens in part.items()}
        assert [answers[number] for number in range(80)] == expected
        assert_at_rest(engine)


def test_who_waits_is_next_though_another_comes_back_at_once() -> None:
    turns, order = Turns(), []

    def come() -> None:
        with turns:
            order.append("other")

    with ThreadPoolExecutor(1) as pool:
        with turns, turns:  # a second time while inside
            order.append("first")
            other = pool.submit(come)
            for _ in range(10_000):
                if not turns._gate.acquire(blocking=False):  # the other one holds it
                    break
                turns._gate.release()
                time.sleep(0.001)
        with turns:
            order.append("again")
        other.result()
    assert order == ["first", "other", "again"]


def test_a_pause_holds_other_threads_up(llama: Any) -> None:
    with make_engine(llama, asynchronous=True) as engine, ThreadPoolExecutor(1) as pool:
        engine.add_request(PROMPT, greedy(4))
        with engine.pause():
            stepping = pool.submit(engine.step)
            with pytest.raises(TimeoutError):
                stepping.result(timeout=0.2)
        stepping.result(timeout=60)
        assert len(run(engine)) == 1


def test_a_closed_runner_says_so(llama: Any) -> None:
    runner = Runner(llama, EngineConfig(page_size=4, num_blocks=8))
    runner.close()
    for call in (lambda: runner.launch(None), runner.weights_updated):  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="the runner is closed"):
            call()
