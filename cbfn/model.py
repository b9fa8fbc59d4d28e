"""A transformers causal LM as a function of packed tokens, used in place.

`adopt` makes a shell around the user's model: a copy of its module tree and configuration whose
parameters and buffers are the user's own tensors. The shell runs our attention, in eval mode; the
model that was passed keeps its mode, configuration and attention, and in-place changes of its
weights are seen at once.
"""

from __future__ import annotations

import copy
import inspect
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from cbfn.progress import hidden_bars
from cbfn.types import FULL, SLIDING

ATTENTION_NAME = "cbfn"
# attend(module, query [1, H, T, D], key, value [1, K, T, D], **extras) -> [1, T, H, D]
Attend = Callable[..., Tensor]

# what attention layers ask for, and what forward passes hand through to them
_KNOWN_EXTRAS = {"dropout", "scaling", "sliding_window", "softcap", "s_aux", "is_causal"}
_HANDED_THROUGH = {
    "position_ids",
    "use_cache",
    "cache_position",
    "output_attentions",
    "output_router_logits",
}
_UNSUPPORTED_ROPE = ("dynamic", "longrope")


class ModelNotSupported(ValueError):
    """A model that cannot run here; the message says why."""


@dataclass(frozen=True, slots=True)
class Adopted:
    """A model ready to run, and what its attention layers look like.

    Arguments:
        module: the shell; call it through `logits`.
        attention_modules: the modules that attend, in layer order.
        layer_types: full or sliding, for each of them.
        sliding_window: tokens that sliding layers see, or None.
        num_heads, num_kv_heads, head_dim: H, K, D.
        vocab_size: ids that the embedding knows; num_logits: V, the width of the logits.
        max_model_len: positions that the model was made for, or None.
    """

    module: nn.Module
    attention_modules: tuple[nn.Module, ...]
    layer_types: tuple[str, ...]
    sliding_window: int | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    num_logits: int
    max_model_len: int | None
    dtype: torch.dtype
    device: torch.device

    def logits(
        self,
        attend: Attend,
        input_ids: Int[Tensor, "T"],
        positions: Int[Tensor, "T"],
        logits_index: Int[Tensor, "B"] | None,
    ) -> Float[Tensor, "B V"]:
        """Returns the logits of the tokens that `logits_index` names, None: of all.

        `attend` writes the KV.
        """
        output = self.module(
            input_ids=input_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=0 if logits_index is None else logits_index,
            attend=attend,
        )
        logits: Tensor = output.logits[0]
        return logits


def paged_attention(
    module: nn.Module,
    query: Float[Tensor, "1 H T D"],
    key: Float[Tensor, "1 K T D"],
    value: Float[Tensor, "1 K T _"],
    attention_mask: Any,
    *,
    attend: Attend | None = None,
    **extras: Any,
) -> tuple[Tensor, None]:
    """The function behind the attention interface: passes on to the step's own `attend`."""
    if attend is None:
        raise ValueError("its layers hand no keyword arguments on to their attention")
    if attention_mask is not None:
        raise ValueError("it makes an attention mask of its own")
    return attend(module, query, key, value, **extras), None


@hidden_bars()
def load(model: Any, tokenizer: Any = None) -> tuple[Any, Any]:
    """Returns a model and its tokenizer, loaded if they are paths or ids.

    Weights load in the checkpoint's dtype on a GPU, and in fp32 on a CPU, where it is fastest. A
    loaded model is returned as it is; a model loaded from a path brings its tokenizer, or None with
    a warning. Raises ValueError for a tokenizer that is none, and for a path that leads nowhere.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    is_place = isinstance(tokenizer, (str, os.PathLike))
    if tokenizer is not None and not is_place and not hasattr(tokenizer, "decode"):
        raise ValueError(f"tokenizer: expected a tokenizer, a path or an id, got {tokenizer!r:.80}")
    if is_place:
        tokenizer = _source("tokenizer", tokenizer)
    if isinstance(model, (str, os.PathLike)):
        on_gpu = torch.cuda.is_available()
        source = _source("model", model)
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype="auto" if on_gpu else torch.float32
        )
        model = model.to("cuda") if on_gpu else model
        if tokenizer is None:
            try:
                tokenizer = AutoTokenizer.from_pretrained(source)
            except (OSError, ValueError) as error:
                warnings.warn(f"{source}: no tokenizer, so no text: {error}", stacklevel=3)
    if is_place:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer)
    return model, tokenizer


def _source(field: str, place: str | os.PathLike[str]) -> str:
    """Returns a path or an id of a hub. Raises ValueError for what can only be a path, and is no
    path to anything."""
    source = os.fspath(place)
    is_path = (
        not isinstance(place, str) or source[:1] in (os.sep, ".", "~") or source.count("/") > 1
    )
    if is_path and not os.path.exists(source):
        raise ValueError(f"{field}: expected a folder or an id, got {source!r}: it does not exist")
    return source


def adopt(model: Any) -> Adopted:
    """Returns a shell around a transformers causal LM. Raises ModelNotSupported with the reason."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise ModelNotSupported(
            f"model: expected a transformers causal LM that is loaded, got {type(model).__name__}"
        )
    config = _check_config(model)
    embedding: Any = model.get_input_embeddings()
    first = _check_parameters(model)
    shell = _shell(model)
    calls, swapped = _probe(shell, first.device)
    modules, layer_types, window, shape = _check_calls(model, config, calls)
    _check_independence(model, calls, swapped)
    return Adopted(
        module=shell,
        attention_modules=modules,
        layer_types=layer_types,
        sliding_window=window,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=embedding.weight.shape[0],
        num_logits=calls.num_logits,
        max_model_len=getattr(config, "max_position_embeddings", None),
        dtype=shape.dtype,
        device=first.device,
    )


def rebind(model: Any, adopted: Adopted) -> None:
    """Gives the shell the parameters that `model` has now, where they are other objects."""
    theirs = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in list(adopted.module.named_parameters(remove_duplicate=False)):
        if theirs[name] is not parameter:
            owner, _, leaf = name.rpartition(".")
            adopted.module.get_submodule(owner).register_parameter(leaf, theirs[name])


def eos_token_ids(model: Any) -> tuple[int, ...]:
    """Returns the end-of-sequence ids: the generation config's, else the config's."""
    for config in (getattr(model, "generation_config", None), model.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            ids = ids if isinstance(ids, (list, tuple)) else [ids]
            return tuple(int(token) for token in ids if token >= 0)  # -1 is used for none
    return ()


@dataclass(frozen=True, slots=True)
class _Shape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype


@dataclass(slots=True)
class _Calls:
    """What the attention layers asked for in one forward pass, in which attention gives zeros."""

    modules: list[nn.Module] = field(default_factory=list)
    shapes: list[tuple[_Shape, int]] = field(default_factory=list)
    extras: list[dict[str, Any]] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)  # [1, T, ...]: what was computed of tokens
    num_logits: int = 0

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **extras: Any
    ) -> Tensor:
        shape = _Shape(query.shape[1], key.shape[1], key.shape[3], key.dtype)
        self.modules.append(module)
        self.shapes.append((shape, value.shape[3]))
        self.extras.append({name: extra for name, extra in extras.items() if extra is not None})
        self.values += [states.transpose(1, 2).clone() for states in (query, key, value)]
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


def decoder_layers(model: Adopted) -> list[nn.Module]:
    """Returns the entries of the shell's module lists that hold an attention module each."""
    attention = {id(module) for module in model.attention_modules}
    lists = (m for m in model.module.modules() if isinstance(m, nn.ModuleList))
    return [
        layer
        for entries in lists
        for layer in entries
        if any(id(module) in attention for module in layer.modules())
    ]


def has_experts(layer: nn.Module) -> bool:
    """Returns whether a decoder layer may have experts: transformers stacks their matrices."""
    return any(parameter.dim() >= 3 for parameter in layer.parameters())


def _refuse(model: Any, reason: str) -> ModelNotSupported:
    return ModelNotSupported(f"{type(model).__name__} cannot run here: {reason}")


def _check_config(model: Any) -> Any:
    config = model.config.get_text_config()
    if getattr(model.config, "is_encoder_decoder", False):
        raise _refuse(model, "it is an encoder-decoder, expected a decoder-only causal LM")
    if model.get_output_embeddings() is None:
        raise _refuse(model, "it has no language-model head")
    types = set(getattr(config, "layer_types", None) or ())
    if types - {FULL, SLIDING}:
        raise _refuse(
            model, f"layers of type {sorted(types - {FULL, SLIDING})}, expected {FULL} or {SLIDING}"
        )
    for rope in _rope_types(getattr(config, "rope_parameters", None)):
        if rope in _UNSUPPORTED_ROPE:
            raise _refuse(model, f"rope type {rope!r} changes with the batch's longest sequence")
    return config


def _rope_types(parameters: Any) -> list[str]:
    if not isinstance(parameters, dict):
        return []
    nested = [rope for value in parameters.values() for rope in _rope_types(value)]
    return nested + ([parameters["rope_type"]] if "rope_type" in parameters else [])


def _check_parameters(model: nn.Module) -> nn.Parameter:
    """Returns the first parameter, after checking that all are on one real device."""
    parameters = list(model.parameters())
    devices = {p.device for p in parameters}
    if len(devices) != 1 or next(iter(devices)).type not in ("cpu", "cuda"):
        raise _refuse(
            model,
            f"its parameters are on {sorted(map(str, devices))}, expected one device, CPU or CUDA",
        )
    return parameters[0]


def _shell(model: nn.Module) -> nn.Module:
    """Returns a copy of the module tree that shares every parameter and buffer with `model`."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    try:
        shell = copy.deepcopy(model, memo=dict[int, Any](shared))
    except Exception as error:  # modules may hold anything
        raise _refuse(model, f"its modules cannot be copied: {error!r}") from error
    shell.eval()
    _register()
    configs: list[Any] = [m.config for m in shell.modules() if hasattr(m, "config")]
    for config in configs:
        config._attn_implementation_internal = ATTENTION_NAME
    return shell


def _register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, paged_attention)


def _probe(shell: nn.Module, device: torch.device) -> tuple[_Calls, _Calls]:
    """Returns what the layers asked for in a pass over two tokens, and in one with them swapped."""
    for name in ("position_ids", "logits_to_keep"):
        if name not in inspect.signature(shell.forward).parameters:
            raise _refuse(shell, f"its forward does not take {name}")
    two = torch.arange(2, device=device)
    return _pass(shell, two), _pass(shell, two.flip(0))


def _pass(shell: nn.Module, tokens: Int[Tensor, "T"]) -> _Calls:
    """Returns what the layers ask for, and what they compute, of tokens at the places they name."""
    calls = _Calls()
    try:
        with torch.no_grad():
            output = shell(
                input_ids=tokens[None],
                position_ids=tokens[None],
                use_cache=False,
                logits_to_keep=torch.arange(len(tokens), device=tokens.device),
                attend=calls.attend,
            )
    except Exception as error:
        raise _refuse(shell, f"a pass over two tokens failed: {error!r}") from error
    calls.num_logits = output.logits.shape[-1]
    calls.values.append(output.logits)
    return calls


def _check_calls(
    model: Any, config: Any, calls: _Calls
) -> tuple[tuple[nn.Module, ...], tuple[str, ...], int | None, _Shape]:
    """Returns the attention modules, their types, the window and the common shape."""
    indices = [getattr(module, "layer_idx", None) for module in calls.modules]
    if not indices or indices != list(range(config.num_hidden_layers)):
        raise _refuse(
            model,
            f"{len(indices)} of {config.num_hidden_layers} layers attend once, in order, through "
            "transformers' attention interface",
        )
    shapes = {shape for shape, _ in calls.shapes}
    if len(shapes) > 1:
        raise _refuse(model, f"layers differ in heads, head dimension or dtype: {shapes}")
    shape, value_dim = calls.shapes[0]
    if value_dim != shape.head_dim:
        raise _refuse(model, f"keys have dimension {shape.head_dim}, values {value_dim}")
    if shape.num_heads % shape.num_kv_heads:
        raise _refuse(model, f"{shape.num_heads} query heads, {shape.num_kv_heads} key-value heads")
    known = _KNOWN_EXTRAS | _HANDED_THROUGH
    unknown = {name for extras in calls.extras for name in extras} - known
    if unknown:
        raise _refuse(model, f"its attention asks for {sorted(unknown)}")
    if any(getattr(m, "is_causal", True) is False for m in calls.modules):
        raise _refuse(model, "its attention is not causal")
    windows = [extras.get("sliding_window") for extras in calls.extras]
    if len({w for w in windows if w is not None}) > 1:
        raise _refuse(model, f"layers with different sliding windows: {windows}")
    layer_types = tuple(SLIDING if window else FULL for window in windows)
    for index, declared in enumerate(_declared_layer_types(config)):
        if declared != layer_types[index]:
            raise _refuse(
                model,
                f"layer {index} has {declared} by the configuration, and asks for "
                f"{layer_types[index]}",
            )
    window = next((int(w) for w in windows if w), None)
    return tuple(calls.modules), layer_types, window, shape


def _check_independence(model: Any, calls: _Calls, swapped: _Calls) -> None:
    """Checks that what is computed of a token, attention aside, is its own and its position's."""
    for pair in zip(calls.values, swapped.values, strict=True):
        values, others = (torch.nan_to_num(states, 0.0, 0.0, 0.0) for states in pair)
        spread = 0.02 * float(values.abs().max())
        if not torch.allclose(values, others.flip(1), rtol=0.0, atol=spread):
            raise _refuse(model, "what it computes of a token depends on the tokens before it")


def _declared_layer_types(config: Any) -> tuple[str, ...]:
    """Returns the layer types as transformers' own cache reads them from a configuration."""
    num_layers = config.num_hidden_layers
    types = getattr(config, "layer_types", None)
    if types is None:
        types = [SLIDING if getattr(config, "sliding_window", None) else FULL] * num_layers
    return tuple(types[:num_layers])
