"""Text as it is streamed: it only grows, has no broken characters, and comes in pieces."""

from __future__ import annotations

import threading
from functools import cache, partial
from typing import Any

import pytest
import torch

import cbfn
from cbfn import Engine, EngineConfig, RequestOutput, Runner, SamplingParams
from cbfn.step import StepOutputs
from cbfn.text import Decoding, Detokenizer
from tests.conftest import word_tokenizer

EMOJI = "テキスト、日本語 👩‍👩‍👧‍👦 fin 🏳️‍🌈."
UNKNOWN = "\N{REPLACEMENT CHARACTER}"
both_depths = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


@cache
def byte_tokenizer() -> Any:
    """Returns a tokenizer with a token for each byte of EMOJI, and an end."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    names = sorted(set(split.pre_tokenize_str(EMOJI)[0][0]))
    backend = Tokenizer(BPE({name: number for number, name in enumerate(names)}, []))
    backend.pre_tokenizer = split
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


class Scripted:
    """A step that gives the token of a script at each position, whatever the model says."""

    def __init__(self, script: list[int]) -> None:
        self.script = torch.tensor(script)

    def __call__(self, inputs: Any, kv: Any, previous_token_ids: Any) -> StepOutputs:
        at = inputs.sample_positions.long().clamp(0, len(self.script) - 1)
        return StepOutputs(self.script[at])


def scripted_engine(
    monkeypatch: Any, model: Any, ids: list[int], tokenizer: Any, **more: Any
) -> Engine:
    monkeypatch.setattr("cbfn.engine.Runner", partial(Runner, step=Scripted(ids)))
    settings = {"page_size": 4, "num_blocks": 64, "max_batch_tokens": 16} | more
    return Engine(model, tokenizer, EngineConfig(**settings))


@both_depths
@pytest.mark.parametrize("prompt_tokens", [1, 2, 3, 4])
def test_streamed_text_never_shrinks_and_its_pieces_make_up_the_whole(
    monkeypatch: Any, llama: Any, asynchronous: bool, prompt_tokens: int
) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer(EMOJI).input_ids  # the first character has three bytes
    params = SamplingParams(max_tokens=len(ids) - prompt_tokens, temperature=0)
    engine = scripted_engine(monkeypatch, llama, ids, tokenizer, use_async_batching=asynchronous)
    with engine:
        engine.add_request(ids[:prompt_tokens], params)
        outputs = list(engine.stream())
    final = tokenizer.decode(ids[prompt_tokens:])
    assert outputs[-1].token_ids == ids[prompt_tokens:]
    assert outputs[-1].text == final
    before = ""
    for output in outputs:
        assert output.text.startswith(before)
        assert final.startswith(output.text)
        before = output.text
    assert "".join(output.new_text for output in outputs) == final
    assert len({output.text for output in outputs}) > 10  # it is a stream
    if prompt_tokens == 3:
        assert UNKNOWN not in final


def test_special_tokens_and_the_ending_one_are_not_streamed(monkeypatch: Any, llama: Any) -> None:
    tokenizer = byte_tokenizer()
    end = tokenizer.eos_token_id
    ids = tokenizer("fin.").input_ids
    script = [*ids, end, *ids, ids[0]]
    params = SamplingParams(max_tokens=9, temperature=0, stop_token_ids=[ids[0]])
    with scripted_engine(monkeypatch, llama, script, tokenizer) as engine:
        engine.add_request(script[:1], params)
        outputs = list(engine.stream())
    assert [output.text for output in outputs] == ["i", "in", "in.", "in.", "in."]
    assert [output.new_text for output in outputs] == ["i", "n", ".", "", ""]
    assert outputs[-1].token_ids == script[1:6]


@both_depths
def test_new_text_adds_to_the_output_that_was_handed_out_before(
    monkeypatch: Any, llama: Any, asynchronous: bool
) -> None:
    tokenizer = word_tokenizer()
    ids = list(range(4, 24))
    params = SamplingParams(max_tokens=10, temperature=0)
    pieces: dict[str, list[str]] = {"first": [], "second": []}
    engine = scripted_engine(monkeypatch, llama, ids, tokenizer, use_async_batching=asynchronous)
    over = {}
    with engine:
        for name in pieces:
            engine.add_request(ids[:2], params, request_id=name)
        for output in engine.stream("first"):  # the second one's are not handed out meanwhile
            pieces["first"].append(output.new_text)
            over["first"] = output
        while engine.has_unfinished():
            for output in engine.step():
                pieces["second"].append(output.new_text)
                over["second"] = output
        assert not engine._texts
    for name, output in over.items():
        assert "".join(pieces[name]) == output.text == tokenizer.decode(ids[2:12])
    assert len(pieces["first"]) > len(pieces["second"])


@pytest.mark.parametrize("fates", ["cancelled", "preempted", "reused"])
def test_pieces_make_up_the_text_whatever_happens_to_a_request(
    monkeypatch: Any, llama: Any, fates: str
) -> None:
    tokenizer = word_tokenizer()
    ids = list(range(4, 60))
    pieces: dict[str, str] = {}
    over: dict[str, RequestOutput] = {}
    config = {"num_blocks": 8, "safety_margin": 0.0} if fates == "preempted" else {}
    with scripted_engine(monkeypatch, llama, ids, tokenizer, **config) as engine:
        for turn in range(1 + (fates == "reused")):
            for name in ("a", "b", "c"):
                engine.add_request(
                    ids[:3], SamplingParams(max_tokens=12, temperature=0), request_id=name
                )
                pieces[name] = ""
            steps = 0
            while engine.has_unfinished():
                for output in engine.step():
                    pieces[output.request_id] += output.new_text
                    over[output.request_id] = output
                steps += 1
                if fates == "cancelled" and steps == 4:
                    engine.cancel("b")
            for name, output in over.items():
                assert output.text == tokenizer.decode(output.token_ids)
                assert pieces[name] == output.text, (turn, name)
        stats = engine.stats()
    assert (stats.num_preemptions > 0) == (fates == "preempted")
    assert len(over["b"].token_ids) == 12 or fates == "cancelled"


def test_same_commit_followed_again_gives_the_same_new_texts(monkeypatch: Any, llama: Any) -> None:
    ids = list(range(4, 24))
    with scripted_engine(monkeypatch, llama, ids, word_tokenizer()) as engine:
        engine.add_request(ids[:2], SamplingParams(max_tokens=6, temperature=0))
        with_news = engine._with_news

        def twice(outputs: Any) -> Any:
            with_news(outputs)
            return with_news(outputs)

        monkeypatch.setattr(engine, "_with_news", twice)
        outputs = list(engine.stream())
    assert "".join(output.new_text for output in outputs) == outputs[-1].text


def test_outputs_without_a_tokenizer_have_no_new_text(llama: Any) -> None:
    with Engine(llama, config=EngineConfig(page_size=4, num_blocks=16)) as engine:
        engine.add_request([4], SamplingParams(max_tokens=1))
        (output,) = engine.stream()
    for name in ("text", "new_text"):
        with pytest.raises(ValueError, match="'0' has no tokenizer"):
            getattr(output, name)


def test_refused_outputs_of_generate_have_no_text(llama: Any) -> None:
    config = EngineConfig(page_size=4, num_blocks=16)
    refused, good = cbfn.generate(
        llama, [[4, 999], [4]], SamplingParams(max_tokens=2), tokenizer=word_tokenizer(),
        config=config,
    )  # fmt: skip
    assert (refused.text, refused.new_text) == ("", "")
    assert refused.prompt_token_ids == [4, 999]
    assert good.text


def test_texts_are_decoded_once_for_all_outputs(monkeypatch: Any) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer(EMOJI * 9).input_ids
    decoding = Decoding(tokenizer)
    source = Detokenizer(decoding)
    source.text(ids, 1, final=False)
    fed = []
    feed = type(source._growing)._feed
    monkeypatch.setattr(
        type(source._growing), "_feed", lambda self, token: (fed.append(token), feed(self, token))
    )
    for number in [*range(1, len(ids) + 1), 5, len(ids)]:
        source.text(ids[:number], number, final=False)
    assert fed == ids[1:]


def test_interrupted_reading_goes_on_from_the_start(monkeypatch: Any) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer(EMOJI).input_ids
    source = Detokenizer(Decoding(tokenizer))
    source.text(ids, 5, final=False)
    kind = type(source._growing)
    feed = kind._feed

    def interrupted(self: Any, token: int) -> None:
        feed(self, token)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(kind, "_feed", interrupted)
        with pytest.raises(KeyboardInterrupt):
            source.text(ids, 9, final=False)
    assert source.text(ids, len(ids), final=False) == EMOJI


def test_decoder_that_contradicts_itself_gives_no_more_text_before_the_end() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer(EMOJI).input_ids
    source = Detokenizer(Decoding(tokenizer))
    text = source.text(ids, 9, final=False)

    class Broken:
        def step(self, *_: Any) -> str:
            raise Exception("Invalid prefix encountered")  # what the library raises

    source._growing._stream = Broken()  # type: ignore[union-attr]
    assert source.text(ids, len(ids) - 1, final=False) == text
    assert source.text(ids, len(ids), final=True) == EMOJI


def test_outputs_are_read_from_many_threads() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer(EMOJI * 20).input_ids
    expected = Detokenizer(Decoding(tokenizer))
    source = Detokenizer(Decoding(tokenizer))
    texts = [expected.text(ids, number, final=False) for number in range(len(ids) + 1)]
    wrong: list[int] = []

    def read(start: int) -> None:
        for number in range(start, len(ids), 7):
            if source.text(ids[:number], number, final=False) != texts[number]:
                wrong.append(number)

    threads = [threading.Thread(target=read, args=(start,)) for start in range(7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
