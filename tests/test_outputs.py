"""Outputs and the other values travel: to other processes, into caches, files and libraries."""

# ruff: noqa: RUF005 (lists are added to on purpose)

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import random
import subprocess
import sys
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import cbfn
from cbfn import Engine, EngineConfig, RequestOutput, RequestStatus, SamplingParams, scheduler
from cbfn.breakdown import MemoryBreakdown
from cbfn.plan import Bucket, pack
from cbfn.policies import fifo
from cbfn.types import (
    CacheSpec,
    Decoded,
    EngineStats,
    Request,
    RequestRejected,
    RequestTimes,
    StepResult,
    Tokens,
    error_record,
)
from tests.conftest import small_model, word_tokenizer

PROTOCOLS = range(2, pickle.HIGHEST_PROTOCOL + 1)
WAYS = {
    **{f"pickle {n}": lambda value, n=n: pickle.loads(pickle.dumps(value, n)) for n in PROTOCOLS},
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "replace": dataclasses.replace,
}


class Strange(RuntimeError):
    """An exception that pickle writes and can not read."""

    def __init__(self, number: int, word: str) -> None:
        super().__init__(f"{word} number {number}")


@cache
def outputs(with_tokenizer: bool) -> dict[str, RequestOutput]:
    """Returns outputs that run, ended, were cancelled, and were refused."""
    tokenizer = word_tokenizer() if with_tokenizer else None
    config = EngineConfig(page_size=4, num_blocks=64, max_batch_tokens=64)
    model = small_model("llama")
    params = SamplingParams(max_tokens=6, temperature=0)
    found = {}
    with Engine(model, tokenizer, config) as engine:
        for name in ("ended", "cancelled"):
            engine.add_request([5, 17, 99], params, request_id=name)
        while engine.has_unfinished():
            for output in engine.step():
                if len(output.token_ids) == 3 and not output.status.ended:
                    found["running"] = output
                    engine.cancel("cancelled")
                if output.status.ended:
                    found[output.request_id] = output
    (found["refused"],) = cbfn.generate(model, [[5, 999]], tokenizer=tokenizer, config=config)
    assert {o.status for o in found.values()} == {
        RequestStatus.DECODING, RequestStatus.FINISHED, RequestStatus.CANCELLED,
        RequestStatus.FAILED,
    }  # fmt: skip
    return found


KINDS = ("running", "ended", "cancelled", "refused")
with_and_without_text = pytest.mark.parametrize("with_tokenizer", [True, False])


def same(copied: RequestOutput, output: RequestOutput) -> bool:
    one, other = ({**vars_of(o), "error": repr(o.error)} for o in (copied, output))
    return one == other


def vars_of(output: RequestOutput) -> dict[str, Any]:
    return {f.name: getattr(output, f.name) for f in dataclasses.fields(output)}


@with_and_without_text
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_output_travels_with_its_text_and_without_its_tokenizer(
    kind: str, way: str, with_tokenizer: bool
) -> None:
    output = outputs(with_tokenizer)[kind]
    for travelled in (WAYS[way](output), WAYS[way](WAYS[way](output))):
        assert same(travelled, output)
        assert "_source" not in vars(travelled)
        assert travelled.to_dict() == output.to_dict()
        if with_tokenizer or kind == "refused":
            assert (travelled.text, travelled.new_text) == (output.text, output.new_text)
        else:
            with pytest.raises(ValueError, match="no tokenizer"):
                _ = travelled.text


@with_and_without_text
@pytest.mark.parametrize("kind", KINDS)
def test_output_is_plain_data(kind: str, with_tokenizer: bool) -> None:
    output = outputs(with_tokenizer)[kind]
    record = output.to_dict()
    assert json.loads(json.dumps(record)) == json.loads(json.dumps(record, sort_keys=True))
    assert record["request_id"] == output.request_id
    assert record["token_ids"] == list(output.token_ids)
    assert type(record["token_ids"]) is type(record["prompt_token_ids"]) is list
    assert record["num_tokens"] == len(output.token_ids)
    assert record["num_prompt_tokens"] == len(output.prompt_token_ids)
    assert record["status"] == output.status.value
    assert record["finish_reason"] == output.finish_reason
    assert record["times"]["arrival"] == output.times.arrival
    assert record["text"] == (output.text if with_tokenizer or kind == "refused" else None)
    expected = {
        "field": "prompt_token_ids[1]",
        "message": "expected a token id in [0, 128), got 999",
    }
    assert record["error"] == (expected if kind == "refused" else None)
    fields = dataclasses.asdict(output)
    assert fields["token_ids"] == output.token_ids
    decoded = (
        {"text": output.text, "new_text": output.new_text} if record["text"] is not None else None
    )
    assert fields["decoded"] == decoded


def test_output_reads_the_same_in_another_process(tmp_path: Any) -> None:
    expected = {kind: output.to_dict() for kind, output in outputs(True).items()}
    path = tmp_path / "outputs"
    path.write_bytes(pickle.dumps(outputs(True)))
    program = (
        "import pickle, json, sys; outputs = pickle.load(open(sys.argv[1], 'rb'));"
        "print(json.dumps({kind: output.to_dict() for kind, output in outputs.items()}));"
        "assert not {'torch', 'transformers'} & {*sys.modules}"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True
    )
    assert json.loads(run.stdout) == json.loads(json.dumps(expected))


def test_children_and_numbers_of_other_libraries_become_plain_data() -> None:
    child = RequestOutput("a-0", [1], np.array([2, 3]), decoded=Decoded("x"))
    output = RequestOutput(
        "a", torch.tensor([1]), [np.int64(4)], RequestStatus.FINISHED, "stop", np.int64(4),
        num_cached_tokens=np.int32(3), logprobs=[{4: RequestTimes(np.float32(-1.5))}],
        prompt_logprobs=np.zeros((1, 2)), samples=(child,),
    )  # fmt: skip
    record = json.loads(json.dumps(output.to_dict()))
    assert record["samples"][0]["token_ids"] == [2, 3]
    assert record["samples"][0]["text"] == "x"
    assert (record["token_ids"], record["stop_reason"], record["num_cached_tokens"]) == ([4], 4, 3)
    assert record["logprobs"][0]["4"]["arrival"] == -1.5
    assert record["prompt_logprobs"] == [[0.0, 0.0]]
    assert pickle.loads(pickle.dumps(output)).samples[0].text == "x"


# Errors


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad"), RequestRejected("prompt: bad"), KeyError("x"), Strange(3, "word"),
        UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"), KeyboardInterrupt(), MemoryError("full"),
        type("Local", (KeyError,), {})("here"), ValueError(lambda: 0), OSError(2, "gone"),
    ],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
@pytest.mark.parametrize("way", ["pickle 2", "pickle 5", "copy", "deepcopy"])
def test_every_error_travels_with_its_message(error: BaseException, way: str) -> None:
    output = RequestOutput("a", [1], (), RequestStatus.FAILED, "error", error=error)
    for value in (output, StepResult(error=error)):
        travelled = WAYS[way](value).error
        assert str(travelled) == str(error)
        assert isinstance(error, type(travelled)) or type(travelled) is RuntimeError
    assert json.dumps(output.to_dict())
    assert output.error is error


@pytest.mark.parametrize(
    ("error", "field", "message"),
    [
        (
            ValueError("SamplingParams.top_p: expected x: y"),
            "SamplingParams.top_p",
            "expected x: y",
        ),
        (RequestRejected("prompt: refused"), "prompt", "refused"),
        (RequestRejected("Request.prompt_token_ids[3]: no"), "Request.prompt_token_ids[3]", "no"),
        (RequestRejected("request 'a: b': prompt_token_ids[3]: no"), "prompt_token_ids[3]", "no"),
        (RequestRejected("request 'a': the id is in use"), None, "request 'a': the id is in use"),
        (ValueError("not a field: bad"), None, "ValueError: not a field: bad"),
        (RuntimeError("CUDA: lost"), None, "RuntimeError: CUDA: lost"),
        (KeyError("x"), None, "KeyError: 'x'"),
        (MemoryError(), None, "MemoryError()"),
        ("logit_bias: expected ids", "logit_bias", "expected ids"),
        ("not JSON: bad", None, "not JSON: bad"),
        ("", None, ""),
    ],
)
def test_error_says_which_field_it_is_about(error: Any, field: str | None, message: str) -> None:
    assert error_record(error) == {"field": field, "message": message}


# Token ids


@pytest.fixture(params=["generated", "prompt", "given"])
def ids(request: Any) -> tuple[Any, list[int]]:
    output = outputs(True)["ended"]
    if request.param == "given":
        return RequestOutput("a", [1], (3, 4, 5)).token_ids, [3, 4, 5]
    if request.param == "prompt":
        return output.prompt_token_ids, [5, 17, 99]
    return output.token_ids, [int(token) for token in output.token_ids]


def test_token_ids_behave_as_a_list(ids: tuple[Any, list[int]]) -> None:
    token_ids, plain = ids
    assert isinstance(token_ids, list)
    assert token_ids == plain == token_ids
    assert token_ids == tuple(plain)
    assert token_ids == np.array(plain)
    assert token_ids == Tokens(plain) == token_ids
    assert not token_ids != plain  # noqa: SIM202
    assert token_ids != [*plain, 1]
    assert token_ids != (*plain[:-1], -1)
    assert token_ids != "".join(map(chr, plain))
    assert hash(token_ids) == hash(tuple(plain)) == hash(Tokens(plain))
    assert repr(token_ids) == repr(plain)
    assert token_ids + [1] == plain + [1]
    assert [1] + token_ids == [1] + plain
    assert token_ids + token_ids == plain + plain
    assert token_ids + Tokens([1]) == plain + [1]
    assert Tokens([1]) + token_ids == [1] + plain
    assert token_ids * 2 == plain * 2
    assert token_ids[1:] == plain[1:]
    assert type(token_ids + [1]) is type(token_ids[:1]) is type(token_ids.copy()) is list
    assert token_ids.index(plain[-1]) == plain.index(plain[-1])
    assert token_ids.count(plain[0]) == plain.count(plain[0])
    assert [*reversed(token_ids)] == plain[::-1]
    assert sorted(token_ids) == sorted(plain)
    assert json.loads(json.dumps(token_ids)) == plain
    assert np.asarray(token_ids).tolist() == plain
    assert torch.tensor(token_ids).tolist() == plain
    assert torch.tensor([token_ids, plain]).tolist() == [plain, plain]
    for way in ("pickle 2", "pickle 5", "copy", "deepcopy"):
        assert WAYS[way](token_ids) == plain
    tokenizer = word_tokenizer()
    assert tokenizer.decode(token_ids) == tokenizer.decode(plain)
    assert tokenizer.batch_decode([token_ids, plain]) == [tokenizer.decode(plain)] * 2
    assert tokenizer.convert_ids_to_tokens(token_ids) == tokenizer.convert_ids_to_tokens(plain)
    assert Request("a", token_ids).prompt_token_ids == plain


@pytest.mark.parametrize(
    "change",
    [
        lambda ids: ids.append(1), lambda ids: ids.extend([1]), lambda ids: ids.pop(),
        lambda ids: ids.insert(0, 1), lambda ids: ids.remove(ids[0]), lambda ids: ids.clear(),
        lambda ids: ids.sort(), lambda ids: ids.sort(key=str), lambda ids: ids.reverse(),
        lambda ids: ids.__setitem__(0, 1), lambda ids: ids.__setitem__(slice(2), []),
        lambda ids: ids.__delitem__(0), lambda ids: random.shuffle(ids),
    ],
)  # fmt: skip
def test_token_ids_are_read_only(ids: tuple[Any, list[int]], change: Any) -> None:
    with pytest.raises(TypeError, match="read-only"):
        change(ids[0])
    assert ids[0] == ids[1]


def test_adding_in_place_gives_a_list_of_the_users_own(ids: tuple[Any, list[int]]) -> None:
    mine = ids[0]
    mine += [1]
    assert (mine, type(mine)) == (ids[1] + [1], list)
    mine = ids[0]
    mine *= 2
    assert mine == ids[1] * 2
    assert ids[0] == ids[1]


def test_token_ids_of_a_request_can_be_added_to_and_copied() -> None:
    tokens = Request("a", [1, 2]).prompt_token_ids
    assert tokens + [3] == [1, 2, 3]
    assert [3] + tokens == [3, 1, 2]
    assert tokens + tokens == [1, 2, 1, 2]
    log = [1, 2, 3]
    view = Tokens(log, 2)
    for way in ("pickle 2", "pickle 5", "copy", "deepcopy"):
        copied = WAYS[way](view)
        assert (copied, len(copied), len(copied._log)) == ([1, 2], 2, 2)


def test_list_of_an_output_is_fixed_when_it_is_handed_out_and_read_later() -> None:
    spec = CacheSpec(("full_attention",), 4, 64, 20)
    state = scheduler.init(spec, EngineConfig(page_size=4))
    state = scheduler.submit(state, Request("a", [1, 2], SamplingParams(max_tokens=8)))
    kept = []
    for token in range(8):
        state, plan = scheduler.schedule(state)
        state, news = scheduler.commit(state, plan, StepResult(np.array([[token]])))
        kept += news
    order = [3, 0, 7, 5, 1, 2, 6, 4]
    for index in order:
        assert kept[index].token_ids == list(range(index + 1))
    for index in order:
        assert kept[index].token_ids == list(range(index + 1))
        assert type(kept[index].token_ids[0]) is int


def test_token_ids_are_listed_only_when_they_are_read() -> None:
    spec = CacheSpec(("full_attention",), 4, 64, 20)
    state = scheduler.init(spec, EngineConfig(page_size=4))
    state = scheduler.submit(state, Request("a", [1, 2], SamplingParams(max_tokens=8)))
    state, plan = scheduler.schedule(state)
    state, (output,) = scheduler.commit(state, plan, StepResult(np.array([[5]])))
    for name in ("token_ids", "prompt_token_ids"):
        assert name not in vars(output)
        assert getattr(output, name) is getattr(output, name)
    state = scheduler.cancel(state, "a")
    state, (output,) = scheduler.commit(state, None, None)
    assert {"token_ids", "prompt_token_ids"}.isdisjoint(vars(output))
    assert (output.token_ids, output.prompt_token_ids) == ([5], [1, 2])


# Other values


def planned() -> Any:
    spec = CacheSpec(("full_attention", "sliding_attention"), 4, 64, 40, 8, vocab_size=100)
    state = scheduler.init(spec, EngineConfig(page_size=4))
    for name, params in (("a", SamplingParams(seed=3)), ("b", SamplingParams())):
        state = scheduler.submit(state, Request(name, [1, 2, 3], params, eos_token_ids=(3,)))
    return scheduler.schedule(state)


VALUES = {
    "params": SamplingParams(stop=["x"], logit_bias={1: 2.0}, allowed_token_ids=[1]),
    "config": EngineConfig(scheduler="prefill_first"),
    "config with a policy": EngineConfig(scheduler=fifo),
    "spec": CacheSpec(("full_attention", "sliding_attention"), 4, 64, 40, 8),
    "request": Request("a", np.array([1, 2]), SamplingParams(top_p=0.5), eos_token_ids=(3,)),
    "times": RequestTimes(1.0, 2.0),
    "memory": MemoryBreakdown(5, 3),
    "tokens": Tokens([1, 2, 3], 2),
    "status": RequestStatus.CANCELLED,
    "stats": EngineStats(
        *range(10), notes=("x",), memory=MemoryBreakdown(5, 3), allocated={"kv": 3}
    ),
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("way", WAYS)
def test_value_travels(name: str, way: str) -> None:
    value = VALUES[name]
    if not dataclasses.is_dataclass(value):
        if way == "replace":
            pytest.skip("no dataclass")
    else:
        assert dataclasses.asdict(value).keys() == {f.name for f in dataclasses.fields(value)}
    assert WAYS[way](value) == value


def test_stats_of_an_engine_travel() -> None:
    config = EngineConfig(page_size=4, num_blocks=8)
    with Engine(small_model("llama"), config=config) as engine:
        stats = engine.stats()
    for way in WAYS.values():
        assert way(stats) == stats
        assert str(way(stats)) == str(stats)
    assert dataclasses.asdict(stats)["memory"]["weights"] == stats.memory.weights


@pytest.mark.parametrize("way", WAYS)
def test_plan_travels_and_packs_as_before(way: str) -> None:
    state, plan = planned()
    copied = WAYS[way](plan)
    assert copied.request_ids == plan.request_ids
    bucket = Bucket(16, 4)
    one, other = pack(plan, bucket), pack(copied, bucket)
    for name in ("input_ids", "positions", "carry_index", "cu_seqlens", "seq_lens", "seeds"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name
    assert dataclasses.asdict(plan)["step"] == plan.step
    result = StepResult(np.array([[7], [8]]))
    _, outputs = scheduler.commit(state, plan, WAYS[way](result))
    assert [o.token_ids for o in outputs] == [[7], [8]]
    again = WAYS[way](state)
    _, outputs = scheduler.commit(again, again.uncommitted[0], result)
    assert [o.token_ids for o in outputs] == [[7], [8]]


def test_config_with_a_function_of_no_module_says_what_to_do() -> None:
    config = EngineConfig(scheduler=lambda state: state.decoding)
    for protocol in PROTOCOLS:
        with pytest.raises(pickle.PicklingError, match=r"^EngineConfig\.scheduler: .* `def` in a"):
            pickle.dumps(config, protocol)
    assert copy.copy(config) == copy.deepcopy(config) == config
    assert dataclasses.asdict(config)["scheduler"] is config.scheduler
    assert dataclasses.replace(config, seed=3).scheduler is config.scheduler


def test_library_that_pickles_functions_by_value_is_let_do_it(monkeypatch: Any) -> None:
    config = EngineConfig(scheduler=lambda state: state.decoding)
    monkeypatch.setitem(sys.modules, "ray.cloudpickle", object())
    make, (values,) = config.__reduce__()
    assert make(values) == config


@pytest.mark.parametrize("error", [RequestRejected, cbfn.SchedulerStalled, cbfn.InvariantViolation])
def test_public_errors_travel(error: type[Exception]) -> None:
    copied = pickle.loads(pickle.dumps(error("because")))
    assert (type(copied), str(copied)) == (error, "because")
