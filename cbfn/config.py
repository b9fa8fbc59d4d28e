"""Settings: how one request is sampled, and how the engine runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from immutables import Map

from cbfn import checks

DEFAULT_MAX_BATCH_TOKENS = 512
DEFAULT_MAX_REQUESTS = 64
POLICY_NAMES = ("fifo", "prefill_first")
SAFETY_MARGINS = {"fifo": 0.15}

# generation_config fields that change the output and have no counterpart here, with neutral values
_FOREIGN_GENERATION_FIELDS: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "top_h": (),
    "penalty_alpha": (),
    "dola_layers": (),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "bad_words_ids": ((), []),
    "constraints": ((), []),
    "force_words_ids": ((), []),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "suppress_tokens": ((), []),
    "begin_suppress_tokens": ((), []),
    "sequence_bias": ({}, ()),
    "guidance_scale": (1.0, 1),
    "watermarking_config": (),
    "token_healing": (False,),
    "max_time": (),
}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends. The names are vLLM's.

    Arguments:
        max_tokens: new tokens at most, >= 1; None: until the model's or the cache's limit.
        min_tokens: no end by EOS or stop token before this many new tokens.
        temperature: divides the logits, >= 0; 0 is greedy.
        top_k: sample among the `top_k` likeliest tokens; 0 or -1 is off.
        top_p: sample among the fewest tokens whose probability reaches `top_p`, in (0, 1].
        min_p: drop tokens less likely than `min_p` times the likeliest, in [0, 1].
        seed: 64-bit seed of this request's noise; None: drawn from `EngineConfig.seed` and the
            request's serial.
        n: independent samples of the prompt, >= 1.
        stop: strings that end the request; one string or several.
        stop_token_ids: tokens that end the request, beside the model's EOS.
        ignore_eos: go on after the model's EOS.
        logprobs, prompt_logprobs: how many alternatives to report for each token; None is off.
        presence_penalty, frequency_penalty: in [-2, 2], 0 is off.
        repetition_penalty: > 0, 1 is off.
        logit_bias: token id -> number in [-100, 100] added to its logit.
        allowed_token_ids: sample among these only.
        bad_words: strings that are never generated.

    Raises ValueError that names the field, the value and the allowed range.
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] | list[str] | str = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | list[int] | None = None
    bad_words: tuple[str, ...] | list[str] | str = ()

    def __post_init__(self) -> None:
        check = _Fields(self)
        check.optional("max_tokens", checks.integer, 1, 2**31 - 1)
        check("min_tokens", checks.integer, 0)
        check("temperature", checks.real, 0.0)
        check("top_k", checks.integer, -1, 2**31 - 1)
        check("top_p", checks.real, 0.0, 1.0, True)
        check("min_p", checks.real, 0.0, 1.0)
        check.optional("seed", checks.integer, -(2**63), 2**64 - 1)
        check("n", checks.integer, 1)
        check("stop", checks.texts)
        check("stop_token_ids", checks.token_ids)
        check("ignore_eos", checks.boolean)
        check.optional("logprobs", checks.integer, 0)
        check.optional("prompt_logprobs", checks.integer, 0)
        check("presence_penalty", checks.real, -2.0, 2.0)
        check("frequency_penalty", checks.real, -2.0, 2.0)
        check("repetition_penalty", checks.real, 0.0, None, True)
        check.optional("logit_bias", _logit_bias)
        check.optional("allowed_token_ids", checks.token_ids)
        check("bad_words", checks.texts)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"SamplingParams.min_tokens: expected at most max_tokens ({self.max_tokens}), "
                f"got {self.min_tokens}"
            )
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ValueError(
                "SamplingParams.allowed_token_ids: expected None or at least one id, got none"
            )

    @property
    def greedy(self) -> bool:
        """True where the likeliest token is taken and no noise is drawn."""
        return self.temperature == 0.0

    @classmethod
    def from_generation_config(cls, generation_config: Any) -> SamplingParams:
        """Returns the parameters that sample as `model.generate(generation_config=...)` would.

        `max_new_tokens` gives `max_tokens` (16 where it is unset: `max_length` counts the prompt
        too and is left out). Sampling without a `top_k` means 50, as in `generate`.

        Raises ValueError for a field that changes the output and has no counterpart here, and for
        what is no generation config.
        """
        if (problem := _no_generation_config(generation_config)) is not None:
            raise ValueError(problem)
        given = {
            name: value
            for name in (*_FOREIGN_GENERATION_FIELDS, *_GENERATION_NAMES)
            if (value := getattr(generation_config, name, None)) is not None
        }
        for name, neutral in _FOREIGN_GENERATION_FIELDS.items():
            if name in given and given[name] not in neutral:
                raise ValueError(
                    f"generation_config.{name}: expected it unset (cbfn has no counterpart), "
                    f"got {given[name]!r}; unset it, generation_config.{name} = None, or pass "
                    "SamplingParams of your own"
                )
        settings = {ours: given[name] for name, ours in _GENERATION_NAMES.items() if name in given}
        if not getattr(generation_config, "do_sample", None):
            settings |= {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        else:
            settings.setdefault("top_k", 50)
        return cls(**settings)


_GENERATION_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "num_return_sequences": "n",
    "stop_strings": "stop",
}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How the engine runs. The names are those of transformers' `ContinuousBatchingConfig`.

    None means: decided from the device, the model and the memory when the engine is built.

    Arguments:
        page_size: tokens in a page (the KV of one layer), >= 1.
        num_blocks: size of the cache in blocks of `page_size` tokens of the full model; None: as
            many as `max_memory_percent` leaves room for, and requests of the model's length use.
        max_batch_tokens: token budget of a step.
        max_requests_per_batch: rows of a step at most.
        max_memory_percent: share of memory to use, in (0, 1]. On a GPU, of all that it has: what
            is in use may come to that, weights, steps and other processes included; None: 0.9. On a
            CPU, of what is available, for the cache; None: 0.25. Where `num_blocks` is given,
            None: 1.
        allow_block_sharing: reuse the KV of equal prefixes.
        use_async_batching: plan batch N+1 while batch N runs.
        use_cuda_graph: capture the step in CUDA graphs.
        compile: run the step through `torch.compile`.
        fuse_projections: compute q, k and v, and gate and up, as one product each; their
            parameters move into common tensors, see `cbfn.fusing`.
        scheduler: "fifo", "prefill_first", or a policy `BatchState -> Iterable[request id]`.
        safety_margin: share of the cache that new prefills leave free, in [0, 1); None: 0.15
            for "fifo", 0 for others.
        cpu_offload_space: GiB of host memory for the KV of preempted requests; on a GPU it is
            pinned, best a power of two, and stays so until the process ends.
        after_weights_update: "keep": requests that run go on with the KV that older weights
            computed; "recompute": all their KV is computed again.
        max_queue_size: requests that may wait; 0 is unlimited.
        seed: seed of the requests that bring none.

    Raises ValueError that names the field, the value and what was expected.
    """

    page_size: int = 64
    num_blocks: int | None = None
    max_batch_tokens: int | None = None
    max_requests_per_batch: int | None = None
    max_memory_percent: float | None = None
    allow_block_sharing: bool = True
    use_async_batching: bool | None = None
    use_cuda_graph: bool | None = None
    compile: bool | None = None
    fuse_projections: bool | None = None
    scheduler: str | Callable[[Any], Iterable[str]] = "fifo"
    safety_margin: float | None = None
    cpu_offload_space: float = 0.0
    after_weights_update: str = "keep"
    max_queue_size: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        check = _Fields(self)
        check("page_size", checks.integer, 1, 2**16)
        check.optional("num_blocks", checks.integer, 1)
        check.optional("max_batch_tokens", checks.integer, 1, 2**20)
        check.optional("max_requests_per_batch", checks.integer, 1, 2**16)
        check.optional("max_memory_percent", checks.real, 0.0, 1.0, True)
        check("allow_block_sharing", checks.boolean)
        check.optional("use_async_batching", checks.boolean)
        check.optional("use_cuda_graph", checks.boolean)
        check.optional("compile", checks.boolean)
        check.optional("fuse_projections", checks.boolean)
        check.optional("safety_margin", checks.real, 0.0, 1.0)
        check("cpu_offload_space", checks.real, 0.0)
        check("max_queue_size", checks.integer, 0)
        check("seed", checks.integer, 0, 2**64 - 1)
        if self.after_weights_update not in ("keep", "recompute"):
            raise ValueError(
                'EngineConfig.after_weights_update: expected "keep" or "recompute", '
                f"got {self.after_weights_update!r}"
                f"{_did_you_mean(self.after_weights_update, ('keep', 'recompute'))}"
            )
        if not callable(self.scheduler) and self.scheduler not in POLICY_NAMES:
            raise ValueError(
                'EngineConfig.scheduler: expected "fifo", "prefill_first" or a policy function, '
                f"got {self.scheduler!r}{_did_you_mean(self.scheduler, POLICY_NAMES)}"
            )
        if self.safety_margin == 1.0:
            raise ValueError("EngineConfig.safety_margin: expected a number in [0, 1), got 1.0")

    def __reduce__(self) -> tuple[Any, ...]:
        checks.picklable("EngineConfig.scheduler", self.scheduler)
        return _config, ({name: getattr(self, name) for name in self.__dataclass_fields__},)

    def __copy__(self) -> EngineConfig:
        return replace(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> EngineConfig:
        return replace(self, scheduler=deepcopy(self.scheduler, memo))

    @property
    def token_budget(self) -> int:
        """Tokens of a step at most, with the default filled in."""
        return self.max_batch_tokens or DEFAULT_MAX_BATCH_TOKENS

    @property
    def row_budget(self) -> int:
        """Rows of a step at most, with the default filled in; every row takes a token or more."""
        return min(self.max_requests_per_batch or DEFAULT_MAX_REQUESTS, self.token_budget)

    @property
    def margin(self) -> float:
        """The safety margin, with the scheduler's default filled in."""
        if self.safety_margin is not None:
            return self.safety_margin
        return SAFETY_MARGINS.get(self.scheduler, 0.0) if isinstance(self.scheduler, str) else 0.0


def _config(values: dict[str, Any]) -> EngineConfig:
    return EngineConfig(**values)


class _Fields:
    """Checks fields of a frozen dataclass in its `__post_init__`, and keeps what is returned."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def __call__(self, name: str, check: Callable[..., Any], *bounds: Any) -> None:
        label = f"{type(self.owner).__name__}.{name}"
        object.__setattr__(self.owner, name, check(label, getattr(self.owner, name), *bounds))

    def optional(self, name: str, check: Callable[..., Any], *bounds: Any) -> None:
        """As a call, where None is allowed too."""
        if getattr(self.owner, name) is not None:
            self(name, check, *bounds)


def _logit_bias(field: str, value: Any) -> Map[int, float]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{field}: expected a mapping of token ids to numbers, got {value!r}")
    return Map(
        {
            checks.integer(f"{field} key", token, 0, 2**31 - 1): checks.real(
                f"{field}[{token}]", bias, -100.0, 100.0
            )
            for token, bias in value.items()
        }
    )


def _did_you_mean(value: Any, names: tuple[str, ...]) -> str:
    """Returns a question, or nothing where no name is close."""
    text = value.lower() if isinstance(value, str) else ""
    close = get_close_matches(text, names, 1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def _no_generation_config(value: Any) -> str | None:
    """Returns what to say of a value whose fields are nowhere to be found, though it has some."""
    expected = f"generation_config: expected a GenerationConfig, got {type(value).__name__}"
    if isinstance(value, Mapping):
        return f"{expected}; did you mean transformers.GenerationConfig(**generation_config)?"
    if hasattr(value, "generation_config"):
        return f"{expected}; did you mean its attribute .generation_config?"
    if value is None or isinstance(value, str):
        return f"{expected}; pass model.generation_config"
    return None


def checked_config(config: Any) -> EngineConfig:
    """Returns the config, `EngineConfig()` for None. Raises ValueError for anything else."""
    if not isinstance(config, EngineConfig | None):
        hint = "; did you mean EngineConfig(**config)?" if isinstance(config, Mapping) else ""
        raise ValueError(f"config: expected an EngineConfig or None, got {config!r:.80}{hint}")
    return config or EngineConfig()
