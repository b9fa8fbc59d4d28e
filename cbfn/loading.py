"""Models and tokenizers as people pass them: what is loaded, what is unwrapped, what is refused."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from cbfn.progress import hidden_bars

MINIMUM_VERSIONS = {"torch": "2.11", "transformers": "5.17"}  # as in pyproject.toml

# wrapper class -> the attribute that holds what it wraps; by name, so that nothing is imported
_WRAPPERS = {
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
}
_SHARDED = ("torch.distributed.fsdp.", "torch.distributed._composable.")
_HOLDERS = ("model", "module", "pretrained_model", "base_model")  # pipelines, trainers, averages


class ModelNotSupported(ValueError):
    """A model that cannot run here; the message says why."""


def check_versions() -> None:
    """Raises ImportError where torch or transformers is older than what cbfn needs."""
    import transformers

    for name, module in (("torch", torch), ("transformers", transformers)):
        minimum = MINIMUM_VERSIONS[name]
        if _release(module.__version__) < _release(minimum):
            raise ImportError(
                f"{name}: expected version {minimum} or newer, got {module.__version__}: "
                f'pip install --upgrade "{name}>={minimum}"'
            )


def _release(version: str) -> tuple[int, ...]:
    """Returns the major and minor number of a version, and large ones where it has none."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else (2**31, 0)


def unwrap(model: Any) -> Any:
    """Returns the module within `torch.compile`, DistributedDataParallel and DataParallel."""
    while (name := next(filter(None, map(_WRAPPERS.get, _class_names(model))), None)) is not None:
        model = getattr(model, name)
    return model


def checked_module(model: Any) -> Any:
    """Returns a transformers model, unwrapped. Raises ModelNotSupported for what is none, and for
    one whose parameters are sharded or have adapters beside them."""
    from transformers import PreTrainedModel

    model = unwrap(model)
    name = type(model).__name__
    if _is_of(model, ("peft.",)) or getattr(model, "_hf_peft_config_loaded", False) is True:
        raise _with_adapters(name)
    if _is_of(model, _SHARDED):
        raise _sharded(name)
    if not isinstance(model, PreTrainedModel):
        raise ModelNotSupported(
            f"model: expected a transformers causal LM that is loaded, {_what_it_is(model)}"
        )
    for module in model.modules():
        if _is_of(module, ("peft.",)):
            raise _with_adapters(name)
        if _is_of(module, _SHARDED):
            raise _sharded(name)
    if any(type(p).__name__ == "DTensor" or hasattr(p, "ds_id") for p in model.parameters()):
        raise _sharded(name)
    return model


@hidden_bars()
def load(model: Any, tokenizer: Any = None) -> tuple[Any, Any]:
    """Returns a model and its tokenizer, loaded if they are paths or ids.

    Weights load in the checkpoint's dtype on a GPU, and in fp32 on a CPU, where it is fastest. A
    loaded model is returned without its wrappers (see `unwrap`); a model loaded from a path brings
    its tokenizer, or None with a warning.

    Raises ValueError for a tokenizer that is none, and for a path that leads to no model; OSError
    for an id that cannot be had; ImportError where torch or transformers is too old.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    check_versions()
    is_place = isinstance(tokenizer, (str, os.PathLike))
    if tokenizer is not None and not is_place:
        _check_tokenizer(tokenizer)
    if is_place:
        tokenizer = _source("tokenizer", tokenizer)
    if isinstance(model, (str, os.PathLike)):
        on_gpu = torch.cuda.is_available()
        source = _source("model", model)
        with _explained("model", source):
            model = AutoModelForCausalLM.from_pretrained(
                source, dtype="auto" if on_gpu else torch.float32
            )
        model = model.to("cuda") if on_gpu else model
        if tokenizer is None:
            try:
                tokenizer = AutoTokenizer.from_pretrained(source)
            except (OSError, ValueError) as error:
                warnings.warn(
                    f"{source}: no tokenizer, so no text: pass tokenizer=..., or prompts as token "
                    f"ids ({_first_line(error)})",
                    stacklevel=3,
                )
    if is_place:
        with _explained("tokenizer", tokenizer):
            tokenizer = AutoTokenizer.from_pretrained(tokenizer)
    return unwrap(model), tokenizer


def _class_names(value: Any) -> list[str]:
    return [f"{kind.__module__}.{kind.__name__}" for kind in type(value).__mro__]


def _is_of(value: Any, packages: tuple[str, ...]) -> bool:
    return any(name.startswith(packages) for name in _class_names(value))


def _with_adapters(name: str) -> ModelNotSupported:
    return ModelNotSupported(
        f"model: {name} has adapters (PEFT), which cbfn does not run yet: merge them into the "
        "weights, model = peft_model.merge_and_unload(), and pass the result"
    )


def _sharded(name: str) -> ModelNotSupported:
    return ModelNotSupported(
        f"model: the parameters of {name} are sharded (FSDP, DTensor or ZeRO 3), expected a whole "
        "model on one device: gather them in a full state dict, and load it into a model of its own"
    )


def _what_it_is(model: Any) -> str:
    """Returns what was got in place of a model, and what to pass."""
    from transformers import PretrainedConfig, PreTrainedModel

    got = f"got {type(model).__name__}"
    if isinstance(model, (str, os.PathLike)):
        return (
            f"got {os.fspath(model)!r}: Engine and generate load paths and ids; here pass "
            "AutoModelForCausalLM.from_pretrained(...)"
        )
    if isinstance(model, type):
        return f"got the class {model.__name__}: pass {model.__name__}.from_pretrained(...)"
    if hasattr(model, "_torchdynamo_orig_callable"):
        return "got a compiled function: pass the module that it belongs to"
    if isinstance(model, PretrainedConfig):
        return f"{got}: pass AutoModelForCausalLM.from_config(config), or a model with weights"
    if not isinstance(model, nn.Module) and hasattr(model, "decode"):
        return f"{got}, a tokenizer: the model comes first, then the tokenizer"
    for name in _HOLDERS:
        if isinstance(unwrap(getattr(model, name, None)), PreTrainedModel):
            return f"{got}: pass the model that it holds, its attribute .{name}"
    return f"{got}: load one with AutoModelForCausalLM.from_pretrained(...)"


def _check_tokenizer(tokenizer: Any) -> None:
    expected = "tokenizer: expected a tokenizer, a path or an id, got"
    kind = type(tokenizer).__name__
    if kind.endswith("Processor") and hasattr(tokenizer, "tokenizer"):
        raise ValueError(f"{expected} a {kind}: pass its attribute .tokenizer")
    if _is_of(tokenizer, ("tokenizers.",)):
        raise ValueError(
            f"{expected} a tokenizers.{kind}: wrap it, "
            "transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)"
        )
    if isinstance(tokenizer, nn.Module):
        raise ValueError(f"{expected} {kind}, a model: the model comes first, then the tokenizer")
    if not hasattr(tokenizer, "decode"):
        raise ValueError(f"{expected} {tokenizer!r:.80}")


def _source(field: str, place: str | os.PathLike[str]) -> str:
    """Returns a path or an id of a hub. Raises ValueError for what can only be a path, and leads to
    no folder with a model."""
    source = os.path.expanduser(os.fspath(place))
    named = f"{field}: expected a folder or an id, got {os.fspath(place)!r}"
    is_path = (
        not isinstance(place, str) or source[:1] in (os.sep, ".", "~") or source.count("/") > 1
    )
    if is_path and not os.path.exists(source):
        raise ValueError(f"{named}: it does not exist")
    if os.path.isfile(source):
        raise ValueError(f"{named}: it is a file; {_instead_of_file(source)}")
    if field == "model" and os.path.isdir(source):
        names = os.listdir(source)
        if "config.json" not in names:
            raise ValueError(f"{named}: it has no config.json; {_instead_of_folder(names)}")
    return source


def _instead_of_file(path: str) -> str:
    if path.lower().endswith(".gguf"):
        return (
            "load it with AutoModelForCausalLM.from_pretrained(folder, gguf_file=name), and pass "
            "what that returns"
        )
    return "pass the folder that it lies in"


def _instead_of_folder(names: list[str]) -> str:
    if "adapter_config.json" in names:
        return (
            "it holds an adapter (PEFT): merge it into its base model, "
            "PeftModel.from_pretrained(base, folder).merge_and_unload(), and pass the result"
        )
    if any(name.lower().endswith(".gguf") for name in names):
        return f"its GGUF file: {_instead_of_file('.gguf')}"
    if "snapshots" in names:
        return "pass the folder of one revision, below its folder snapshots"
    return "pass a folder that save_pretrained has written"


@contextmanager
def _explained(field: str, source: str) -> Iterator[None]:
    """Errors of ids that cannot be had say what to do; those of folders pass as they are."""
    try:
        yield
    except OSError as error:
        if os.path.isdir(source):
            raise
        raise OSError(
            f"{field}: expected a folder that exists here, or an id that the hub knows, got "
            f"{source!r}: {_first_line(error)} (Check the name. Without a network, pass a folder. "
            "If the model is gated or private, log in: hf auth login.)"
        ) from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
