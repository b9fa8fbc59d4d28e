"""`generate`: a list of prompts in, a list of outputs out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from cbfn import progress as bars
from cbfn.config import EngineConfig, SamplingParams
from cbfn.engine import Engine, Prompt
from cbfn.types import Decoded, RequestOutput, RequestRejected, RequestStatus


def generate(
    model: Any,
    prompts: Iterable[Prompt],
    sampling_params: SamplingParams | Sequence[SamplingParams | None] | None = None,
    *,
    tokenizer: Any = None,
    config: EngineConfig | None = None,
    progress: bool = False,
) -> list[RequestOutput]:
    """Returns the finished outputs of `prompts`, in their order.

    Arguments:
        model: a path, an id, or a loaded transformers causal LM, which is used in place.
        prompts: texts, token ids, or a mix.
        sampling_params: for all prompts, or one for each.
        progress: show a bar on stderr.

    A prompt that is refused gives a FAILED output with its `error`; the others run. Raises
    ValueError for what is no list of prompts, and where the numbers of prompts and of parameters
    differ.
    """
    if isinstance(prompts, str):
        raise ValueError(f"prompts: expected a list of prompts, got the string {prompts!r:.60}")
    if not isinstance(prompts, Iterable):
        raise ValueError(f"prompts: expected a list of prompts, got {prompts!r:.60}")
    prompts = list(prompts)
    if prompts and all(isinstance(prompt, int) for prompt in prompts):
        raise ValueError(f"prompts: expected a list of prompts, got one prompt: {prompts!r:.60}")
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        params: list[SamplingParams | None] = [sampling_params] * len(prompts)
    elif isinstance(sampling_params, Iterable) and not isinstance(sampling_params, Mapping):
        params = list(sampling_params)
    else:
        raise ValueError(
            "sampling_params: expected SamplingParams, a list with one for each prompt, or None, "
            f"got {sampling_params!r:.80}"
        )
    if len(params) != len(prompts):
        raise ValueError(
            f"sampling_params: expected one, or one for each of {len(prompts)} prompts, "
            f"got {len(params)}"
        )
    results: list[RequestOutput | None] = [None] * len(prompts)
    with Engine(model, tokenizer, config, progress=progress) as engine:
        index_of: dict[str, int] = {}
        todo = iter(enumerate(zip(prompts, params, strict=True)))
        limit = engine.runner.config.max_queue_size
        bar = bars.bar(len(prompts), "generating", progress, unit="requests")
        with bar:
            while True:
                room = limit - engine.stats().num_waiting if limit else None
                for index, (prompt, param) in islice(todo, room):
                    try:
                        index_of[engine.add_request(prompt, param)] = index
                    except RequestRejected as error:
                        results[index] = _refused(index, prompt, error)
                        bar.update()
                if not engine.has_unfinished():
                    break
                for output in engine.step():
                    if output.status.ended:
                        results[index_of[output.request_id]] = output
                        bar.update()
    return [output for output in results if output is not None]


def _refused(index: int, prompt: Prompt, error: RequestRejected) -> RequestOutput:
    has_tokens = hasattr(prompt, "tolist") or isinstance(prompt, Sequence)
    tokens: Any = prompt if has_tokens and not isinstance(prompt, str) else ()
    return RequestOutput(
        request_id=str(index),
        prompt_token_ids=tokens,
        status=RequestStatus.FAILED,
        finish_reason="error",
        error=error,
        decoded=Decoded(""),
    )
