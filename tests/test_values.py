"""Parameters, settings, requests, outputs."""

from types import SimpleNamespace

import numpy as np
import pytest

from cbfn.config import EngineConfig, SamplingParams
from cbfn.policies import fifo
from cbfn.types import (
    CacheSpec,
    Request,
    RequestOutput,
    RequestRejected,
    RequestStatus,
    Tokens,
)


def test_defaults_are_the_contracts():
    params = SamplingParams()
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (16, 1.0, 0, 1.0)
    assert not params.greedy
    assert SamplingParams(temperature=0).greedy
    config = EngineConfig()
    assert (config.page_size, config.scheduler, config.allow_block_sharing) == (64, "fifo", True)
    assert (config.token_budget, config.row_budget, config.margin) == (512, 64, 0.15)
    assert EngineConfig(scheduler="prefill_first").margin == 0.0
    assert EngineConfig(scheduler=fifo).margin == 0.0
    assert EngineConfig(safety_margin=0.5).margin == 0.5
    assert EngineConfig(max_batch_tokens=5).row_budget == 5
    assert EngineConfig(max_requests_per_batch=3).row_budget == 3


def test_values_are_kept_in_one_form():
    params = SamplingParams(
        temperature=1,
        stop="END",
        stop_token_ids=[np.int64(3)],
        logit_bias={5: 1},
        top_k=np.int32(4),
    )
    assert type(params.temperature) is float
    assert type(params.top_k) is int
    assert (params.stop, params.stop_token_ids) == (("END",), (3,))
    assert dict(params.logit_bias) == {5: 1.0}
    assert hash(params) == hash(SamplingParams(temperature=1.0, stop=("END",),
                                               stop_token_ids=(3,), logit_bias={5: 1.0},
                                               top_k=4))  # fmt: skip


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"temperature": -1}, r"SamplingParams.temperature: expected a finite number >= 0, got -1"),
        ({"top_p": 7.5}, r"SamplingParams.top_p: expected a finite number in \(0, 1\], got 7.5"),
        ({"top_p": 0}, r"in \(0, 1\], got 0"),
        ({"min_p": float("nan")}, r"in \[0, 1\], got nan"),
        ({"max_tokens": 0}, r"max_tokens: expected an integer in \[1, .*\], got 0"),
        ({"max_tokens": True}, "max_tokens.*got True"),
        ({"min_tokens": 5, "max_tokens": 4}, r"min_tokens: .* max_tokens \(4\), got 5"),
        ({"repetition_penalty": 0}, "repetition_penalty: expected a finite number > 0, got 0"),
        ({"allowed_token_ids": []}, "allowed_token_ids: expected None or at least one id"),
        ({"logit_bias": {1: 101}}, r"logit_bias\[1\]: .*\[-100, 100\], got 101"),
        ({"stop": [""]}, "stop: expected a non-empty string"),
    ],
)
def test_error_of_a_parameter_names_field_value_and_range(values, error):
    with pytest.raises(ValueError, match=error):
        SamplingParams(**values)


def test_parameters_of_a_generation_config():
    def params(**fields):
        return SamplingParams.from_generation_config(SimpleNamespace(**fields))

    assert params() == SamplingParams(temperature=0.0)
    assert params(do_sample=False, temperature=0.7, top_k=9).greedy
    sampled = params(do_sample=True, temperature=0.7, max_new_tokens=5, stop_strings=["x"])
    assert (sampled.temperature, sampled.top_k, sampled.max_tokens) == (0.7, 50, 5)
    assert sampled.stop == ("x",)
    assert params(do_sample=True, top_k=0).top_k == 0
    assert params(num_beams=1, suppress_tokens=[]) == SamplingParams(temperature=0.0)
    for name, value in {"num_beams": 4, "no_repeat_ngram_size": 2, "typical_p": 0.5}.items():
        with pytest.raises(ValueError, match=rf"generation_config\.{name}: .*{value}"):
            params(**{name: value})


def test_request_takes_any_sequence_of_token_ids():
    for prompt in ([1, 2], (1, 2), np.array([1, 2]), np.array([1, 2], np.uint8), Tokens([1, 2])):
        request = Request("a", prompt)
        assert request.prompt_token_ids == [1, 2]
        assert request.sampling_params == SamplingParams()


def test_prompt_is_not_changed_by_its_owner_later():
    mine = np.array([1, 2, 3], np.int32)
    request = Request("a", mine)
    mine[0] = 9
    assert request.prompt_token_ids == [1, 2, 3]
    tokens = [4, 5]
    request = Request("a", Tokens(tokens))
    tokens[0] = 9
    assert request.prompt_token_ids == [4, 5]


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"request_id": ""}, "Request.request_id"),
        ({"request_id": 3}, "Request.request_id"),
        ({"prompt_token_ids": []}, "at least one token id"),
        ({"prompt_token_ids": Tokens([])}, "at least one token id"),
        ({"prompt_token_ids": Tokens([1, -1])}, r"prompt_token_ids\[1\]: .* got -1"),
        ({"prompt_token_ids": "text"}, "one-dimensional sequence of integers, got 'text'"),
        ({"prompt_token_ids": [0.5]}, r"prompt_token_ids\[0\]: expected a token id, .* got 0.5"),
        ({"prompt_token_ids": [[1], [1, 2]]}, r"ids\[0\]: expected a token id, .* got \[1\]"),
        ({"prompt_token_ids": [1, 2**31]}, r"prompt_token_ids\[1\]: .* got 2147483648"),
        ({"sampling_params": {}}, "Request.sampling_params: expected SamplingParams or None"),
        ({"deadline": 0}, "Request.deadline: expected a finite number > 0"),
        ({"arrival": float("inf")}, "Request.arrival"),
        ({"priority": 1.5}, "Request.priority"),
        ({"eos_token_ids": [-1]}, "Request.eos_token_ids"),
    ],
)
def test_impossible_request_is_rejected(values, error):
    with pytest.raises(RequestRejected, match=error):
        Request(**{"request_id": "a", "prompt_token_ids": [1], **values})


def test_chunk_is_tiled_by_blocks_of_both_types():
    spec = CacheSpec(("full_attention",) * 2 + ("sliding_attention",) * 3, 4, 64, 10, 8)
    assert spec.attention_types == ("full_attention", "sliding_attention")
    assert spec.chunk_pages == 6
    assert [spec.blocks_per_chunk(t) for t in spec.attention_types] == [3, 2]
    assert [spec.chunk_tokens(t) for t in spec.attention_types] == [12, 8]
    assert spec.usable_chunks == 8


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"layer_types": ("mamba",)}, r"layer_types: .*'mamba'"),
        ({"layer_types": ()}, "layer_types: expected one or more"),
        ({"num_chunks": 2}, "num_chunks: expected an integer >= 3, got 2"),
        ({"page_size": 0}, "page_size"),
        ({"layer_types": ("sliding_attention",)}, "sliding_window: expected an integer"),
        ({"sliding_window": 0}, "sliding_window"),
    ],
)
def test_impossible_cache_is_refused(values, error):
    good = {"layer_types": ("full_attention",), "page_size": 4, "page_bytes": 64, "num_chunks": 9}
    with pytest.raises(ValueError, match=rf"^CacheSpec\.{error}"):
        CacheSpec(**{**good, **values})


def test_status_of_an_output_is_an_end_exactly_where_it_has_a_reason():
    done = RequestOutput("a", [1], [2], RequestStatus.FINISHED, "length")
    assert done.finish_reason == "length"
    for status, reason in [("FINISHED", None), ("DECODING", "stop"), ("CANCELLED", "because")]:
        with pytest.raises(ValueError, match="RequestOutput"):
            RequestOutput("a", [1], [2], RequestStatus[status], reason)
    assert [s.ended for s in RequestStatus] == [False, False, False, True, True, True]


class Shown:
    """Shows token ids as text."""

    def text(self, token_ids, num_tokens, final):
        return str(token_ids[:num_tokens])

    def new_text(self, text, token_ids, before):
        return text


def test_text_leaves_an_ending_token_out():
    def text(reason, stop_reason=None):
        status = RequestStatus.FINISHED if reason else RequestStatus.DECODING
        values = {"status": status, "finish_reason": reason, "stop_reason": stop_reason}
        ids = {"request_id": "a", "prompt_token_ids": [1], "token_ids": [7, 8]}
        return RequestOutput.build({**values, **ids, "_source": Shown()}).text

    assert text(None) == text("length") == text("stop", "END") == "[7, 8]"
    assert text("stop") == text("stop", 8) == "[7]"
    with pytest.raises(ValueError, match="no tokenizer"):
        RequestOutput("a", [1]).text  # noqa: B018
