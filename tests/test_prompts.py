"""Prompts as people have them: each kind works, or its error says what was expected."""

from __future__ import annotations

import array
import re
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import cbfn
from cbfn import Engine, EngineConfig, Request, RequestRejected, RequestStatus, SamplingParams
from cbfn.prompts import listed, token_ids, tokenized
from cbfn.types import Tokens
from tests.conftest import greedy_alone, word_tokenizer

pytestmark = pytest.mark.usefixtures("without_annotation_checks")

MATRIX = [[4, 5, 6], [7, 8, 9]]
CONFIG = EngineConfig(page_size=4, num_blocks=64, max_batch_tokens=32)
THREE = SamplingParams(max_tokens=3, temperature=0)


def ids_of(prompts: Any) -> list[list[int]]:
    """Returns the token ids of all prompts of a list."""
    return [tokenized(f"prompts[{i}]", p).tolist() for i, p in enumerate(listed(prompts))]


def texts(*words: str, **how: Any) -> Any:
    """Returns what the tokenizer of 128 words makes of texts."""
    return word_tokenizer()(list(words), **how)


def left_padded(**how: Any) -> Any:
    tokenizer = word_tokenizer()
    tokenizer.padding_side = "left"
    return tokenizer(["w4 w5 w6", "w7"], padding=True, **how)


# What is a list of prompts

MATRICES: dict[str, Callable[[], Any]] = {
    "tensor": lambda: torch.tensor(MATRIX),
    "tensor of int32": lambda: torch.tensor(MATRIX, dtype=torch.int32),
    "tensor of uint8": lambda: torch.tensor(MATRIX, dtype=torch.uint8),
    "tensor that is not contiguous": lambda: torch.tensor(MATRIX).T.contiguous().T,
    "array": lambda: np.array(MATRIX),
    "array of big-endian numbers": lambda: np.array(MATRIX, ">i4"),
    "matrix": lambda: np.matrix(MATRIX),
    "list of tensors": lambda: [torch.tensor(row) for row in MATRIX],
    "list of [1, T] tensors": lambda: [torch.tensor([row]) for row in MATRIX],
    "tuple of arrays": lambda: tuple(np.array(row) for row in MATRIX),
    "array of lists": lambda: ragged(MATRIX),
    "generator of lists": lambda: (row for row in MATRIX),
    "encoding": lambda: texts("w4 w5 w6", "w7 w8 w9"),
    "encoding of tensors": lambda: texts("w4 w5 w6", "w7 w8 w9", return_tensors="pt"),
    "encoding of arrays": lambda: texts("w4 w5 w6", "w7 w8 w9", return_tensors="np"),
    "mapping": lambda: {"input_ids": MATRIX},
    "mapping of tensors in a list": lambda: {"input_ids": [torch.tensor(r) for r in MATRIX]},
    "list of encodings": lambda: [word_tokenizer()(text) for text in ("w4 w5 w6", "w7 w8 w9")],
    "list of encodings of tensors": lambda: [
        word_tokenizer()(text, return_tensors="pt") for text in ("w4 w5 w6", "w7 w8 w9")
    ],
    "encodings of the tokenizers library": lambda: word_tokenizer().backend_tokenizer.encode_batch(
        ["w4 w5 w6", "w7 w8 w9"]
    ),
}


def ragged(rows: list[list[int]]) -> np.ndarray:
    out = np.empty(len(rows), object)
    out[:] = rows
    return out


@pytest.mark.parametrize("kind", MATRICES)
def test_rows_are_prompts(kind: str) -> None:
    assert ids_of(MATRICES[kind]()) == MATRIX


PADDED: dict[str, Callable[[], Any]] = {
    "on the right": lambda: texts("w4 w5 w6", "w7", padding=True),
    "on the right, tensors": lambda: texts("w4 w5 w6", "w7", padding=True, return_tensors="pt"),
    "on the left": left_padded,
    "on the left, tensors": lambda: left_padded(return_tensors="pt"),
    "on the left, arrays": lambda: left_padded(return_tensors="np"),
    "on both sides": lambda: {
        "input_ids": [[0, 4, 5, 6, 0], [0, 0, 0, 7, 0]],
        "attention_mask": [[0, 1, 1, 1, 0], [0, 0, 0, 1, 0]],
    },
    "mask of bools": lambda: {
        "input_ids": torch.tensor([[4, 5, 6], [7, 0, 0]]),
        "attention_mask": torch.tensor([[True, True, True], [True, False, False]]),
    },
    "padding that is no token id": lambda: {
        "input_ids": torch.tensor([[4, 5, 6], [7, -100, -100]]),
        "attention_mask": torch.tensor([[1, 1, 1], [1, 0, 0]]),
    },
    "ragged, of tensors": lambda: {
        "input_ids": [torch.tensor([4, 5, 6, 0]), torch.tensor([7])],
        "attention_mask": [torch.tensor([1, 1, 1, 0]), torch.tensor([1])],
    },
    "encodings of the tokenizers library": lambda: padded_by_the_library(),
}


def padded_by_the_library() -> Any:
    backend = word_tokenizer().backend_tokenizer
    backend.enable_padding(pad_id=0, pad_token="[PAD]")
    return backend.encode_batch(["w4 w5 w6", "w7"])


@pytest.mark.parametrize("kind", PADDED)
def test_mask_cuts_padding_off(kind: str) -> None:
    assert ids_of(PADDED[kind]()) == [[4, 5, 6], [7]]


def test_pad_ids_without_a_mask_are_the_users_word() -> None:
    assert ids_of(torch.tensor([[4, 5, 0], [0, 0, 7]])) == [[4, 5, 0], [0, 0, 7]]
    assert ids_of({"input_ids": [[4, 5, 0]]}) == [[4, 5, 0]]


@pytest.mark.parametrize(
    "nothing", [[], (), torch.empty(0, 5, dtype=torch.long), {"input_ids": []}]
)
def test_no_prompts_are_none(nothing: Any) -> None:
    assert listed(nothing) == []


def test_texts_and_ids_may_be_mixed_in_arrays_too() -> None:
    assert listed(np.array(["w4", "w5"])) == ["w4", "w5"]
    mixed = listed(["w4 w5", torch.tensor([7]), np.int64([8]), deque([9]), range(2, 4)])
    found = [tokenized("prompt", prompt, word_tokenizer()).tolist() for prompt in mixed]
    assert found == [[4, 5], [7], [8], [9], [2, 3]]


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "text": (lambda: "w4 w5", "got the string 'w4 w5'; did you mean [prompts]?"),
    "ids": (lambda: [1, 2, 3], "got one prompt: [1, 2, 3]; did you mean [prompts]?"),
    "numpy ids": (lambda: list(np.arange(3)), "got one prompt: "),
    "ids with a bool": (lambda: [True, 2, 3], "got one prompt: [True, 2, 3]"),
    "0-d tensor in a list": (
        lambda: [torch.tensor(3)],
        "got one prompt: [tensor(3)]; did you mean [prompts]?",
    ),
    "1-D tensor": (
        lambda: torch.tensor([1, 2, 3]),
        "got one prompt: a tensor of shape [3] and dtype int64; did you mean [prompts]?",
    ),
    "1-D array": (lambda: np.arange(3), "got one prompt: an array of shape [3] and dtype int64"),
    "0-d tensor": (lambda: torch.tensor(3), "got tensor(3)"),
    "number": (lambda: 17, "got 17"),
    "nothing": (lambda: None, "got None"),
    "bytes": (lambda: b"w4", "got b'w4'; decode it"),
    "set": (lambda: {"w4"}, "got a set or the keys of a dict"),
    "floats": (
        lambda: torch.tensor([[1.0, 2.0]]),
        "got a tensor of shape [1, 2] and dtype float32; a tensor or an array of prompts has int",
    ),
    "bools": (lambda: torch.tensor([[True]]), "got a tensor of shape [1, 1] and dtype bool"),
    "bfloat16": (lambda: torch.ones(2, 2, dtype=torch.bfloat16), "dtype bfloat16"),
    "numpy floats": (lambda: np.ones((2, 2)), "got an array of shape [2, 2] and dtype float64"),
    "3-D tensor": (lambda: torch.ones(1, 2, 3, dtype=int), "got a tensor of shape [1, 2, 3]"),
    "mapping of something else": (
        lambda: {"text": ["w4"]},
        "expected a prompt or a mapping with input_ids, got dict with the keys ['text']",
    ),
    "message": (
        lambda: {"role": "user", "content": "w4"},
        "turn messages into a prompt with tokenizer.apply_chat_template",
    ),
    "encoding of one text": (
        lambda: word_tokenizer()("w4 w5"),
        "got one prompt: BatchEncoding with the keys ['input_ids', ",
    ),
    "one encoding of the tokenizers library": (
        lambda: word_tokenizer().backend_tokenizer.encode("w4"),
        "got one prompt: Encoding(",
    ),
    "fewer masks than rows": (
        lambda: {"input_ids": MATRIX, "attention_mask": [[1, 1, 1]]},
        "prompts.attention_mask: expected 2 rows, one for each of input_ids, got 1",
    ),
    "ids in the mapping that are none": (
        lambda: {"input_ids": 3},
        "prompts.input_ids: expected one row, or rows of ids, got 3",
    ),
    "deep mapping": (
        lambda: {"input_ids": torch.ones(1, 1, 1, dtype=int)},
        "prompts.input_ids: expected one row, or rows of ids, got a tensor of shape [1, 1, 1]",
    ),
    "lazy tensor": (
        lambda: torch.ones(1, 2, dtype=int, device="meta"),
        "cannot be copied to the host",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_no_list_of_prompts_is_named_before_a_model_is_loaded(kind: str) -> None:
    make, expected = WRONG[kind]
    with pytest.raises(ValueError, match=re.escape(expected)) as info:
        cbfn.generate("/no/such/model", make())
    assert str(info.value).startswith("prompts")
    assert "\n" not in str(info.value)


def test_data_frame_is_not_taken_for_the_names_of_its_columns() -> None:
    class DataFrame:
        dtypes = shape = ()

        def __iter__(self) -> Any:
            return iter(["question", "answer"])

    with pytest.raises(ValueError, match=r"prompts: .* got a DataFrame; pass one of its columns"):
        listed(DataFrame())


# What is one prompt

ONES: dict[str, Callable[[], Any]] = {
    "list": lambda: [4, 5, 6],
    "tuple": lambda: (4, 5, 6),
    "range": lambda: range(4, 7),
    "deque": lambda: deque([4, 5, 6]),
    "array of the standard library": lambda: array.array("i", [4, 5, 6]),
    "tokens of an output": lambda: Tokens([4, 5, 6]),
    "numpy ints": lambda: [np.int64(4), np.uint8(5), np.int32(6)],
    "0-d tensors": lambda: [torch.tensor(4), 5, torch.tensor(6)],
    "tensor": lambda: torch.tensor([4, 5, 6]),
    "tensor [1, T]": lambda: torch.tensor([[4, 5, 6]]),
    "array": lambda: np.array([4, 5, 6], np.uint16),
    "array [1, T]": lambda: np.array([[4, 5, 6]]),
    "encoding": lambda: word_tokenizer()("w4 w5 w6"),
    "encoding of one row": lambda: texts("w4 w5 w6"),
    "encoding of a tensor": lambda: word_tokenizer()("w4 w5 w6", return_tensors="pt"),
    "encoding with padding": lambda: word_tokenizer()(
        "w4 w5 w6", padding="max_length", max_length=9
    ),
    "mapping": lambda: {"input_ids": [4, 5, 6]},
    "encoding of the tokenizers library": lambda: word_tokenizer().backend_tokenizer.encode(
        "w4 w5 w6"
    ),
}


@pytest.mark.parametrize("kind", ONES)
def test_one_prompt_is_taken(kind: str) -> None:
    assert token_ids("prompt", ONES[kind]()).tolist() == [4, 5, 6]
    assert Request("a", ONES[kind]()).prompt_token_ids == [4, 5, 6]


def test_prompt_is_a_read_only_copy() -> None:
    for mine in (np.array([4, 5], np.int32), torch.tensor([4, 5], dtype=torch.int32)):
        ids = token_ids("prompt", mine)
        mine[0] = 9
        assert ids.tolist() == [4, 5]
        assert ids.dtype == np.int32
        assert not ids.flags.writeable


IMPOSSIBLE: dict[str, tuple[Callable[[], Any], str]] = {
    "bool among ids": (lambda: [True, 2, 3], "prompt[0]: expected a token id"),
    "False among ids": (lambda: [7, False], "prompt[1]: expected a token id"),
    "numpy bool among ids": (lambda: [7, np.True_], "prompt[1]: expected a token id"),
    "bool tensor among ids": (lambda: [7, torch.tensor(True)], "prompt[1]: expected a token id"),
    "bools in a tuple": (lambda: (True, False), "prompt[0]: expected a token id"),
    "bool tensor": (lambda: torch.tensor([True]), "got a tensor of shape [1] and dtype bool"),
    "bool array": (lambda: np.array([True]), "got an array of shape [1] and dtype bool"),
    "float": (lambda: [4, 5.0], "prompt[1]: expected a token id, an integer, got 5.0"),
    "float tensor": (lambda: torch.tensor([4.0]), "got a tensor of shape [1] and dtype float32"),
    "float array": (lambda: np.array([4.5]), "got an array of shape [1] and dtype float64"),
    "None among ids": (lambda: [4, None], "prompt[1]: expected a token id"),
    "None": (lambda: None, "expected text or token ids, a one-dimensional sequence of integers"),
    "number": (lambda: 17, "got 17; did you mean [17]?"),
    "numpy number": (lambda: np.int64(17), "; did you mean [np.int64(17)]?"),
    "0-d tensor": (lambda: torch.tensor(17), "got tensor(17); did you mean [tensor(17)]?"),
    "bytes": (lambda: b"w4", "got b'w4'; decode it"),
    "bytearray": (lambda: bytearray(b"w4"), "decode it"),
    "memoryview": (lambda: memoryview(b"w4"), "decode it"),
    "set": (lambda: {4}, "got {4}; a set has no order"),
    "generator": (lambda: (n for n in [4]), "; pass a list of what it yields"),
    "dict": (lambda: {4: 5}, "prompt: expected a prompt or a mapping with input_ids, got dict"),
    "nested": (
        lambda: [[4, 5]],
        "prompt[0]: expected a token id, an integer, got ",
    ),
    "nested, one": (lambda: [[4, 5]], "got [4, 5]; did you mean prompt[0]?"),
    "text in a list": (lambda: ["w4"], "got 'w4'; did you mean prompt[0]?"),
    "texts": (lambda: ["w4", "w5"], "pass each as a prompt of its own"),
    "1-D tensors in a list": (lambda: [torch.tensor([4]), torch.tensor([5])], "prompt[0]: "),
    "messages": (
        lambda: [{"role": "user", "content": "w4"}],
        "turn messages into a prompt with tokenizer.apply_chat_template",
    ),
    "rows": (
        lambda: torch.tensor(MATRIX),
        "prompt: expected one prompt, got 2 rows: a tensor of shape [2, 3] and dtype int64; "
        "pass each as a prompt of its own",
    ),
    "no rows": (lambda: torch.empty(0, 3, dtype=int), "expected one prompt, got 0 rows"),
    "rows of an encoding": (lambda: texts("w4", "w5"), "prompt: expected one prompt, got 2 rows"),
    "3-D tensor": (lambda: torch.ones(1, 1, 1, dtype=int), "got a tensor of shape [1, 1, 1]"),
    "empty": (list, "prompt: expected at least one token id, got none"),
    "empty tensor": (lambda: torch.empty(0, dtype=int), "expected at least one token id, got none"),
    "empty encoding": (lambda: word_tokenizer()(""), "expected at least one token id, got none"),
    "negative": (lambda: torch.tensor([4, -1]), "prompt[1]: expected a token id in [0, 2**31)"),
    "too large": (lambda: [4, 2**31], "prompt[1]: expected a token id in [0, 2**31), got 214748"),
    "too large for numpy": (lambda: [4, 2**70], "prompt[1]: expected a token id in [0, 2**31)"),
    "both": (lambda: [-1, 2**63], "prompt[0]: expected a token id in [0, 2**31), got -1"),
    "mask of zeros": (
        lambda: {"input_ids": [4, 5], "attention_mask": [0, 0]},
        "prompt: attention_mask: expected a 1 for at least one token, got only zeros",
    ),
    "mask with a hole": (
        lambda: {"input_ids": [4, 5, 6, 7], "attention_mask": [0, 1, 0, 1]},
        "prompt: attention_mask: expected padding on the left or on the right only, "
        "got a hole: 0 at position 2, between ones",
    ),
    "short mask": (
        lambda: {"input_ids": [4, 5, 6], "attention_mask": [1, 1]},
        "prompt: attention_mask: expected 3 numbers, one for each token of input_ids, got 2",
    ),
    "mask of other numbers": (
        lambda: {"input_ids": [4, 5], "attention_mask": [1, 2]},
        "prompt: attention_mask: expected 1 for tokens and 0 for padding, got 2",
    ),
}


@pytest.mark.parametrize("kind", IMPOSSIBLE)
def test_what_is_no_prompt_is_refused_by_name(llama: Any, kind: str) -> None:
    make, expected = IMPOSSIBLE[kind]
    with pytest.raises(ValueError, match=re.escape(expected)) as info:
        token_ids("prompt", make())
    assert str(info.value).startswith("prompt")
    assert "\n" not in str(info.value)
    with pytest.raises(RequestRejected):
        Request("a", make())


def test_text_without_tokens_or_tokenizer_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="the tokenizer makes none of ''"):
        tokenized("prompt", "", word_tokenizer())
    with pytest.raises(
        ValueError, match=r"without a tokenizer, got the text 'w4'; pass tokenizer="
    ):
        tokenized("prompt", "w4")
    with pytest.raises(ValueError, match=r"prompt: the tokenizer refused '\\ud800': ") as info:
        tokenized("prompt", "\ud800", word_tokenizer())
    assert info.value.__cause__ is not None


# Through the doors


def test_tensor_of_prompts_gives_the_tokens_of_each_row(llama: Any) -> None:
    alone = [greedy_alone(llama, row, 3) for row in MATRIX]
    for prompts in (torch.tensor(MATRIX), np.array(MATRIX), texts("w4 w5 w6", "w7 w8 w9")):
        outputs = cbfn.generate(llama, prompts, THREE, config=CONFIG)
        assert [output.token_ids[:] for output in outputs] == alone
    padded = cbfn.generate(llama, left_padded(return_tensors="pt"), THREE, config=CONFIG)
    assert [list(o.prompt_token_ids) for o in padded] == [[4, 5, 6], [7]]
    assert padded[1].token_ids[:] == greedy_alone(llama, [7], 3)


def test_bad_prompts_among_good_ones_fail_alone(llama: Any) -> None:
    bad = [None, [True, 2], torch.tensor(3), {4}, b"w4", torch.ones(2, 2), "text", [4, 999], [-1]]
    prompts = [MATRIX[0], *bad, MATRIX[1]]
    outputs = cbfn.generate(llama, prompts, THREE, config=CONFIG)
    for row, output in ((0, outputs[0]), (1, outputs[-1])):
        assert output.token_ids[:] == greedy_alone(llama, MATRIX[row], 3)
    for index, output in enumerate(outputs[1:-1], start=1):
        assert isinstance(output.error, RequestRejected)
        assert (output.status, output.finish_reason) == (RequestStatus.FAILED, "error")
        assert output.request_id == str(index)
        named = f"request '{index}': prompt_token_ids[1]" if index == 8 else f"prompts[{index}]"
        assert str(output.error).startswith(named)
    assert outputs[8].prompt_token_ids == (4, 999)


def test_rows_without_a_valid_mask_fail_alone(llama: Any) -> None:
    prompts = {
        "input_ids": torch.tensor([[4, 5, 6]] * 3),
        "attention_mask": torch.tensor([[1, 1, 1], [0, 0, 0], [1, 0, 1]]),
    }
    good, empty, hole = cbfn.generate(llama, prompts, THREE, config=CONFIG)
    assert good.token_ids[:] == greedy_alone(llama, [4, 5, 6], 3)
    assert str(empty.error).startswith("prompts[1]: attention_mask: expected a 1 for at least one")
    assert str(hole.error).startswith("prompts[2]: attention_mask: expected padding on the left")


def test_number_of_parameters_is_that_of_the_rows(llama: Any) -> None:
    with pytest.raises(ValueError, match="one for each of 2 prompts, got 3"):
        cbfn.generate(llama, torch.tensor(MATRIX), [THREE] * 3)


def test_engine_takes_a_row_and_refuses_several(llama: Any) -> None:
    with Engine(llama, word_tokenizer(), CONFIG) as engine:
        for kind, make in ONES.items():
            engine.add_request(make(), THREE, request_id=kind)
        outputs = {o.request_id: o for o in engine.stream() if o.status.ended}
        alone = greedy_alone(llama, [4, 5, 6], 3)
        assert {kind: o.token_ids[:] for kind, o in outputs.items()} == dict.fromkeys(ONES, alone)
        for make, expected in IMPOSSIBLE.values():
            with pytest.raises(RequestRejected, match=re.escape(expected)):
                engine.add_request(make())
        assert not engine.has_unfinished()


@pytest.mark.gpu
def test_tensors_on_a_gpu_are_prompts() -> None:
    matrix = torch.tensor(MATRIX, device="cuda")
    assert ids_of(matrix) == ids_of(list(matrix)) == ids_of({"input_ids": matrix}) == MATRIX
    assert token_ids("prompt", [torch.tensor(4, device="cuda"), 5]).tolist() == [4, 5]
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]], device="cuda")
    assert ids_of({"input_ids": matrix, "attention_mask": mask}) == [[4, 5, 6], [7]]


def test_prompts_are_taken_without_torch() -> None:
    program = (
        "import sys; from cbfn.prompts import listed; listed([[1]]); print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.stdout.strip() == "False"
