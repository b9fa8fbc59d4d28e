"""Texts of requests: all of it at their end, and before that what no later token changes.

Three things make the text of a few tokens uncertain. A character may lie in several tokens.
Adjacent byte tokens (`<0xE3>`) are one UTF-8 string: a byte that does not fit makes all of them
U+FFFD, the characters that were whole before included. And a tokenizer may clean up spaces before
punctuation.
"""

from __future__ import annotations

import json
import re
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from operator import itemgetter
from threading import Lock
from typing import Any

from cbfn.outputs import Outputs
from cbfn.requestoutput import RequestOutput

_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# A clean-up starts at a space, and what follows within five characters decides on it (" ' ve").
_CLEANED = 8


class Texts(dict[str, "Detokenizer"]):
    """The detokenizers of an engine's requests by id, each made when its first output comes."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self._decoding = Decoding(tokenizer)

    def __missing__(self, request_id: str) -> Detokenizer:
        source = self[request_id] = Detokenizer(self._decoding)
        return source

    def follow(
        self, outputs: Outputs, news: Mapping[str, RequestOutput]
    ) -> Iterator[RequestOutput]:
        """Yields a commit's outputs with texts; `news` are those that are not handed out yet.

        An output's new text begins where the output handed out before it ended. The same commit may
        be followed again after an exception, with the same result.
        """
        waiting = news.get
        for output in outputs.with_text(self):  # a step runs this for each of its rows
            values = output.__dict__
            waits = waiting(values["request_id"])
            before = values["_source"].follow(values["_token_ids"][1], values["status"].ended)
            values["_before"] = before if waits is None else waits.__dict__["_before"]
            yield output

    def forget(self, handed_out: Iterable[RequestOutput]) -> None:
        """Drops the detokenizers of requests whose terminal output is handed out."""
        for output in handed_out:
            if output.status.ended:
                self.pop(output.request_id, None)


class Detokenizer:
    """The text of one request. Outputs share it, and ask for the text of their own length."""

    __slots__ = ("_decoding", "_growing", "_lock", "_newest")

    def __init__(self, decoding: Decoding) -> None:
        self._newest = ((0, False), 0)  # tokens and end of the newest output, tokens before it
        self._lock = Lock()
        self._decoding = decoding
        self._growing: _Streamed | _HeldBack | None = None

    def follow(self, num_tokens: int, ended: bool) -> int:
        """Returns how many tokens the output before this one has; the same when asked again."""
        newest, before = self._newest
        if newest != (num_tokens, ended):
            before = newest[0]
            self._newest = ((num_tokens, ended), before)
        return before

    def text(self, token_ids: list[int], num_tokens: int, final: bool) -> str:
        """Returns the text of the first tokens: all of it, or what is certain."""
        if final:
            return self._decoding.decode(token_ids[:num_tokens])
        return self._certain(token_ids, num_tokens)

    def new_text(self, text: str, token_ids: list[int], before: int) -> str:
        """Returns what `text` adds to the certain text of the first `before` tokens."""
        return text[len(self._certain(token_ids, before)) :]

    def _certain(self, token_ids: list[int], num_tokens: int) -> str:
        if not self._lock.acquire(blocking=False):
            # another thread reads, or this is a signal handler within a reading: nobody waits
            return self._new().certain(token_ids, num_tokens)
        try:
            if self._growing is None:
                self._growing = self._new()
            return self._growing.certain(token_ids, num_tokens)
        finally:
            self._lock.release()

    def _new(self) -> _Streamed | _HeldBack:
        kind = _Streamed if self._decoding.backend is not None else _HeldBack
        return kind(self._decoding)


class _Streamed:
    """Certain text by the incremental decoder of the library `tokenizers`."""

    __slots__ = ("_decoding", "_interrupted", "_lengths", "_pending", "_raw", "_stream", "_text")

    def __init__(self, decoding: Decoding) -> None:
        self._decoding = decoding
        self._restart()

    def _restart(self) -> None:
        from tokenizers.decoders import DecodeStream

        self._stream: Any = DecodeStream(skip_special_tokens=True)
        self._pending: list[int] = []  # a run of byte tokens that is not over
        self._raw = self._text = ""  # before and after the clean-up of spaces
        self._lengths = array("i", [0])  # of the certain text, by number of tokens
        self._interrupted = False

    def certain(self, token_ids: list[int], num_tokens: int) -> str:
        if self._interrupted:
            self._restart()
        known = len(self._lengths) - 1
        if known < num_tokens:
            self._interrupted = True
            for token in token_ids[known:num_tokens]:
                self._feed(token)
                self._lengths.append(len(self._text))
            self._interrupted = False
        return self._text[: self._lengths[min(num_tokens, len(self._lengths) - 1)]]

    def _feed(self, token: int) -> None:
        if self._stream is None:
            return
        decoding = self._decoding
        self._pending.append(token)
        if decoding.has_bytes and not decoding.ends_bytes(token):
            return
        try:
            piece = self._stream.step(decoding.backend, self._pending)
        except Exception as error:
            if (
                type(error) is not Exception
            ):  # of a signal handler; the library raises this very one
                raise
            # it has contradicted itself: nothing more is certain before the end
            self._stream = piece = None
        self._pending = []
        if piece:
            self._raw += piece
            self._text = decoding.settled(self._raw) if decoding.cleans else self._raw


class _HeldBack:
    """Certain text of a tokenizer of which nothing is known but `decode`.

    Taken for certain is the text up to the last token that is neither part of a character nor
    perhaps a byte, without its last few characters from a space on.
    """

    __slots__ = ("_decoding", "_known", "_text")

    def __init__(self, decoding: Decoding) -> None:
        self._decoding = decoding
        self._text = ""
        self._known = [(0, 0)]  # numbers of tokens that were asked for, and lengths of their texts

    def certain(self, token_ids: list[int], num_tokens: int) -> str:
        at = bisect_right(self._known, num_tokens, key=itemgetter(0))
        known, shortest = self._known[at - 1]
        if known == num_tokens:
            return self._text[:shortest]
        text = self._guess(token_ids[:num_tokens])
        if at == len(self._known):
            if not text.startswith(self._text):
                text = self._text
            self._text, length = text, len(text)
        else:  # asked late: between the texts of fewer and of more tokens
            longest = self._known[at][1]
            pairs = enumerate(zip(text, self._text[:longest], strict=False))
            shorter = min(len(text), longest)
            length = next((place for place, (one, other) in pairs if one != other), shorter)
        length = max(length, shortest)
        self._known.insert(at, (num_tokens, length))
        return self._text[:length]

    def _guess(self, token_ids: list[int]) -> str:
        end = len(token_ids)
        while end and not self._decoding.ends_character(token_ids[end - 1]):
            end -= 1
        if not end:
            return ""
        text = self._decoding.decode(token_ids[:end]).rstrip(_UNKNOWN)
        space = text.find(" ", max(len(text) - _CLEANED, 0))
        return text if space < 0 else text[:space]


class Decoding:
    """What is known of how a tokenizer decodes; `backend` is None where that is not enough.

    Arguments:
        tokenizer: of transformers, or anything with `decode(ids, skip_special_tokens=True)`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._ends_bytes: dict[int, bool] = {}
        self._ends_character: dict[int, bool] = {}

    def decode(self, token_ids: list[int]) -> str:
        """Returns the text of all that is there."""
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    @cached_property
    def backend(self) -> Any:
        """The `tokenizers.Tokenizer` that decodes, where its text grows as its decoder streams."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            return None
        import tokenizers
        from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

        kind, base, fast = type(self.tokenizer), PreTrainedTokenizerBase, PreTrainedTokenizerFast
        known = (
            isinstance(backend, tokenizers.Tokenizer)
            and isinstance(self.tokenizer, fast)
            and (kind.decode, kind._decode) == (base.decode, fast._decode)
            and kind.clean_up_tokenization is base.clean_up_tokenization
            and _grows(self._decoders)
        )
        return backend if known else None

    @cached_property
    def has_bytes(self) -> bool:
        """True where adjacent byte tokens are decoded together."""
        return any(part["type"] == "ByteFallback" for part in self._decoders)

    @cached_property
    def cleans(self) -> bool:
        """True where transformers takes spaces before punctuation out of the text."""
        if not getattr(self.tokenizer, "clean_up_tokenization_spaces", False):
            return False
        switch = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
        spared = type(self.backend.model).__name__ == "BPE"
        return not spared or getattr(self.tokenizer, switch, True)

    def ends_bytes(self, token: int) -> bool:
        """Returns True for a token behind which adjacent bytes are over.

        Special tokens are left out before the bytes are put together, and so are unknown ids.
        """
        if token not in self._ends_bytes:
            name = self.backend.id_to_token(token)
            skipped = name is None or name in self._special
            self._ends_bytes[token] = not skipped and not _BYTE.fullmatch(name)
        return self._ends_bytes[token]

    def ends_character(self, token: int) -> bool:
        """Returns True for a token that, by its own text, is whole and no byte."""
        if token not in self._ends_character:
            text = self.decode([token])
            is_byte = len(text) == 1 and text.isascii()
            self._ends_character[token] = bool(text) and _UNKNOWN not in text and not is_byte
        return self._ends_character[token]

    def settled(self, raw: str) -> str:
        """Returns the text that spaces are cleaned up in, as far as nothing more changes it."""
        text: str = self.tokenizer.clean_up_tokenization(raw)
        space = raw.find(" ", max(len(raw) - _CLEANED, 0))
        if space < 0:
            return text
        behind = len(raw) - space - raw.count(" ", space)  # clean-up takes out nothing but spaces
        for at in range(len(text) - 1, -1, -1):
            if not behind:
                return text[: at + 1].rstrip(" ")
            behind -= text[at] != " "
        return ""

    @cached_property
    def _special(self) -> frozenset[str]:
        tokens = self.backend.get_added_tokens_decoder().values()
        return frozenset(token.content for token in tokens if token.special)

    @cached_property
    def _decoders(self) -> list[dict[str, Any]]:
        decoder = self.tokenizer.backend_tokenizer.decoder
        if decoder is None:
            return []
        try:
            return _flat(json.loads(decoder.__getstate__()))
        except Exception:  # a decoder written in Python
            return [{"type": "Custom"}]


def _flat(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [part for inner in decoder["decoders"] for part in _flat(inner)]


def _grows(decoders: list[dict[str, Any]]) -> bool:
    """Returns True where more tokens only add text, but for unfinished characters and bytes."""
    joined = False  # before that each token is decoded by itself
    for part in decoders:
        match part["type"]:
            case "Fuse" | "ByteLevel":
                good, joined = not joined or part["type"] == "Fuse", True
            case "Replace" | "ByteFallback" | "Metaspace":
                good = not joined
            case "WordPiece" | "BPEDecoder":  # each looks at its neighbours
                good = len(decoders) == 1
            case "Strip":
                good = not joined or (part["start"] <= 1 and not part["stop"])
            case _:
                good = False
        if not good:
            return False
    return True
