"""`generate`: a list of prompts in, a list of outputs out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from cbfn import progress as bars
from cbfn.config import EngineConfig, SamplingParams
from cbfn.engine import Engine
from cbfn.prompts import ArrayLike, Prompt, listed, tokenized
from cbfn.types import Decoded, RequestOutput, RequestRejected, RequestStatus


def generate(
    model: Any,
    prompts: Iterable[Prompt] | ArrayLike,
    sampling_params: SamplingParams | Sequence[SamplingParams | None] | None = None,
    *,
    tokenizer: Any = None,
    config: EngineConfig | None = None,
    progress: bool = False,
) -> list[RequestOutput]:
    """Returns the finished outputs of `prompts`, in their order.

    Arguments:
        model: a path, an id, or a loaded transformers causal LM, which is used in place.
        prompts: texts, token ids, or a mix. An integer matrix [prompts, T] (a tensor, an array) or
            what a tokenizer returns has a prompt in each row; an `attention_mask` cuts padding off.
        sampling_params: for all prompts, or one for each.
        progress: show a bar on stderr.

    A prompt that is refused gives a FAILED output with its `error`; the others run. Raises
    ValueError for what is no list of prompts, and where the numbers of prompts and of parameters
    differ.
    """
    items = listed(prompts)
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        params: list[SamplingParams | None] = [sampling_params] * len(items)
    elif isinstance(sampling_params, Iterable) and not isinstance(sampling_params, Mapping):
        params = list(sampling_params)
    else:
        raise ValueError(
            "sampling_params: expected SamplingParams, a list with one for each prompt, or None, "
            f"got {sampling_params!r:.80}{_hint(sampling_params)}"
        )
    if len(params) != len(items):
        raise ValueError(
            f"sampling_params: expected one, or one for each of {len(items)} prompts, "
            f"got {len(params)}"
        )
    results: list[RequestOutput | None] = [None] * len(items)
    with Engine(model, tokenizer, config, progress=progress) as engine:
        todo = iter(enumerate(zip(items, params, strict=True)))
        limit = engine.runner.config.max_queue_size
        bar = bars.bar(len(items), "generating", progress, unit="requests")
        with bar:
            while True:
                room = limit - engine.stats().num_waiting if limit else None
                for index, (prompt, param) in islice(todo, room):
                    ids: Any = ()
                    try:
                        ids = tokenized(f"prompts[{index}]", prompt, engine.tokenizer)
                        engine.add_request(ids, param, request_id=str(index))
                    except ValueError as error:
                        results[index] = _refused(index, ids, error)
                        bar.update()
                if not engine.has_unfinished():
                    break
                for output in engine.step():
                    if output.status.ended:
                        results[int(output.request_id)] = output
                        bar.update()
    return [output for output in results if output is not None]


def _hint(params: Any) -> str:
    if isinstance(params, Mapping):
        return "; did you mean SamplingParams(**sampling_params)?"
    if hasattr(params, "do_sample"):
        return "; did you mean SamplingParams.from_generation_config(sampling_params)?"
    return ""


def _refused(index: int, ids: Sequence[int], error: ValueError) -> RequestOutput:
    if not isinstance(error, RequestRejected):
        cause, error = error.__cause__, RequestRejected(str(error))
        error.__cause__ = cause
    return RequestOutput(
        request_id=str(index),
        prompt_token_ids=tuple(map(int, ids)),
        status=RequestStatus.FAILED,
        finish_reason="error",
        error=error,
        decoded=Decoded(""),
    )
