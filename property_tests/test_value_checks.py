"""Values are checked where they are made, with the field, the value and the range in the error."""

import math
from dataclasses import FrozenInstanceError, fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbfn import checks, scheduler
from cbfn.config import EngineConfig, SamplingParams
from cbfn.testing import strategies
from cbfn.testing.workloads import Workload
from cbfn.types import CacheSpec, Plan, Request, Tokens

_NO_NUMBER = st.sampled_from(["1", b"1", (), [1], object(), None, 1 + 0j, math.nan])
_NOT_FINITE = st.sampled_from([math.nan, math.inf, -math.inf])


def refusal(function, *arguments):
    """Returns the text of the ValueError that a call raises."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        function(*arguments)
    return str(caught.value)


@given(params=strategies.sampling_params(served=False))
def test_valid_parameters_are_taken_and_frozen(params):
    assert replace(params) == params
    assert hash(params) == hash(replace(params))
    for field in fields(params):
        with pytest.raises(FrozenInstanceError):
            setattr(params, field.name, None)


@given(
    value=st.one_of(st.integers(), st.floats(), _NO_NUMBER),
    low=st.integers(-5, 5),
    span=st.integers(0, 9),
    low_open=st.booleans(),
)
def test_checked_numbers_are_in_range_or_the_error_names_the_field(value, low, span, low_open):
    high = low + span
    for check, bounds in ((checks.integer, ()), (checks.real, (low_open,))):
        is_number = isinstance(value, int) or (isinstance(value, float) and check is checks.real)
        inside = is_number and (low < value <= high or (value == low and not any(bounds)))
        if inside:
            assert check("Some.field", value, low, high, *bounds) == value
        else:
            error = refusal(check, "Some.field", value, low, high, *bounds)
            assert "Some.field: expected" in error
            assert f"{high}], got {value!r}" in error


@given(value=st.booleans())
def test_booleans_are_no_numbers(value):
    for check in (checks.integer, checks.real):
        with pytest.raises(ValueError, match="F: expected"):
            check("F", value)


_OUTSIDE = {
    "max_tokens": st.one_of(st.integers(max_value=0), st.floats(), _NO_NUMBER.filter(bool)),
    "min_tokens": st.one_of(st.integers(max_value=-1), st.integers(17, 99), _NO_NUMBER),
    "temperature": st.one_of(st.floats(max_value=0, exclude_max=True), _NOT_FINITE, _NO_NUMBER),
    "top_k": st.one_of(st.integers(max_value=-2), st.floats(), _NO_NUMBER),
    "top_p": st.one_of(
        st.floats(max_value=0), st.floats(min_value=1, exclude_min=True), _NOT_FINITE, _NO_NUMBER
    ),
    "min_p": st.one_of(
        st.floats(max_value=0, exclude_max=True), st.floats(min_value=1, exclude_min=True)
    ),
    "seed": st.one_of(st.integers(min_value=2**64), st.integers(max_value=-(2**63) - 1)),
    "n": st.one_of(st.integers(max_value=0), _NO_NUMBER),
    "stop": st.sampled_from(["", ["a", ""], 3, None, [b"x"]]),
    "stop_token_ids": st.sampled_from([[-1], "12", 5, None, [1.0], [2**31]]),
    "ignore_eos": st.sampled_from([0, 1, "yes", None]),
    "logprobs": st.one_of(st.integers(max_value=-1), st.just("1")),
    "prompt_logprobs": st.one_of(st.integers(max_value=-1), st.just("1")),
    "presence_penalty": st.one_of(st.floats(min_value=2, exclude_min=True), _NOT_FINITE),
    "frequency_penalty": st.one_of(st.floats(max_value=-2, exclude_max=True), _NOT_FINITE),
    "repetition_penalty": st.one_of(st.floats(max_value=0), _NOT_FINITE),
    "logit_bias": st.sampled_from([{-1: 1}, {1: 101}, {1: math.nan}, [1], {"a": 1}]),
    "allowed_token_ids": st.sampled_from([[], [-1], "1", 3]),
    "bad_words": st.sampled_from(["", [""], 3, None]),
}


@given(data=st.data())
def test_parameter_out_of_range_is_refused_with_its_name(data):
    assert set(_OUTSIDE) == {field.name for field in fields(SamplingParams)}
    name = data.draw(st.sampled_from(sorted(_OUTSIDE)))
    value = data.draw(_OUTSIDE[name])
    with pytest.raises(ValueError, match=rf"^SamplingParams\.{name}\b"):
        SamplingParams(**{name: value})


_BAD_CONFIG = {
    "page_size": [0, -1, 1.5, None, 2**16 + 1],
    "num_blocks": [0, "8"],
    "max_batch_tokens": [0, 2**20 + 1, 1.0],
    "max_requests_per_batch": [0, 2**16 + 1, True],
    "max_memory_percent": [0.0, 1.01, math.nan, "1"],
    "allow_block_sharing": [None, 1],
    "use_async_batching": [0, "no"],
    "use_cuda_graph": [1],
    "compile": ["yes"],
    "fuse_projections": [1, "no"],
    "scheduler": ["lifo", None, 3],
    "safety_margin": [-0.1, 1.0, 2, math.inf],
    "cpu_offload_space": [-1, None, math.nan],
    "max_queue_size": [-1, None, 1.5],
    "after_weights_update": ["", "drop", None, 1],
    "seed": [-1, 2**64, None],
}


@given(data=st.data())
def test_setting_out_of_range_is_refused_with_its_name(data):
    assert set(_BAD_CONFIG) == {field.name for field in fields(EngineConfig)}
    name = data.draw(st.sampled_from(sorted(_BAD_CONFIG)))
    value = data.draw(st.sampled_from(_BAD_CONFIG[name]))
    with pytest.raises(ValueError, match=rf"^EngineConfig\.{name}: expected"):
        EngineConfig(**{name: value})


@given(config=strategies.engine_configs())
def test_budgets_and_margin_have_the_settings_or_their_defaults(config):
    assert config.token_budget == config.max_batch_tokens
    assert config.row_budget == min(config.max_requests_per_batch, config.max_batch_tokens)
    expected = {"fifo": 0.15, "prefill_first": 0.0}[config.scheduler]
    assert config.margin == (expected if config.safety_margin is None else config.safety_margin)
    assert replace(config, safety_margin=None, scheduler=lambda state: ()).margin == 0.0
    open_config = replace(config, max_batch_tokens=None, max_requests_per_batch=None)
    assert (open_config.token_budget, open_config.row_budget) == (512, 64)


@given(
    prompt=st.one_of(
        st.lists(st.one_of(st.integers(-2, 2), st.integers(2**31 - 2, 2**31 + 1)), max_size=4),
        st.lists(st.floats(), min_size=1, max_size=3),
        st.sampled_from(["text", b"text", None, 7, {1}, [[1]], [True], [[1], [1, 2]], [2**70]]),
    )
)
def test_prompt_is_token_ids_or_is_rejected(prompt):
    valid = (
        isinstance(prompt, list)
        and len(prompt) > 0
        and all(type(token) is int and 0 <= token < 2**31 for token in prompt)
    )
    if valid:
        request = Request("a", prompt)
        assert request.prompt_token_ids == prompt
        assert np.asarray(request.prompt_token_ids).tolist() == prompt
    else:
        assert refusal(Request, "a", prompt).startswith("Request.prompt_token_ids")


@given(values=st.lists(st.integers(0, 99), max_size=9), more=st.integers(0, 3), data=st.data())
def test_tokens_are_a_sequence_that_never_changes(values, more, data):
    log = [*values, *range(more)]
    tokens = Tokens(log, len(values))
    index = st.integers(-len(values) - 2, len(values) + 1)
    at = data.draw(index)
    piece = slice(*(data.draw(st.one_of(st.none(), index)) for _ in range(2)))
    assert len(tokens) == len(values)
    assert list(tokens) == values
    assert tokens == values
    assert tokens == tuple(values)
    assert tokens == Tokens(values)
    assert hash(tokens) == hash(Tokens(values))
    assert tokens != [*values, 1]
    assert tokens[piece] == values[piece]
    assert np.asarray(tokens).tolist() == values
    if -len(values) <= at < len(values):
        assert tokens[at] == values[at]
    else:
        with pytest.raises(IndexError):
            tokens[at]
    log.append(5)
    log[len(values) :] = [7] * 3
    assert list(tokens) == values


_BAD_SPEC = {
    "layer_types": [(), ("linear_attention",), "full", ("",), None],
    "page_size": [0, None, 1.5],
    "page_bytes": [0],
    "num_chunks": [2, 0, None],
    "sliding_window": [0, None, 2.5],
    "vocab_size": [0, "10"],
    "max_model_len": [0, -1],
}


@given(
    spec=strategies.cache_specs(kinds=("sliding", "hybrid")),
    name=st.sampled_from(sorted(_BAD_SPEC)),
    data=st.data(),
)
def test_impossible_cache_is_refused_with_the_fields_name(spec, name, data):
    values = {f.name: getattr(spec, f.name) for f in fields(CacheSpec) if f.init}
    value = data.draw(st.sampled_from(_BAD_SPEC[name]))
    with pytest.raises(ValueError, match=rf"^CacheSpec\.{name}: expected"):
        CacheSpec(**{**values, name: value})


@given(data=st.data())
def test_our_types_can_be_drawn_by_their_type(data):
    for kind in (SamplingParams, Request, CacheSpec, EngineConfig, Plan, Workload):
        assert isinstance(data.draw(st.from_type(kind)), kind)


@given(params=strategies.sampling_params(served=False), request=strategies.requests())
def test_submit_takes_exactly_the_parameters_that_are_served(params, request):
    spec = CacheSpec(("full_attention",), 4, 16, 40)
    state = scheduler.init(spec, EngineConfig())
    unserved = [
        field.name
        for field in fields(params)
        if field.name in scheduler._UNSERVED and getattr(params, field.name) != field.default
    ]
    request = replace(request, sampling_params=params)
    if unserved:
        error = refusal(scheduler.submit, state, request)
        assert error.startswith(f"SamplingParams.{unserved[0]}: not served yet")
    else:
        assert list(scheduler.submit(state, request).waiting) == [request.request_id]
