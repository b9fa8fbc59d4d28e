"""Sampling as pure functions of logits and per-row parameters.

Noise comes from a counter-based generator: a hash of (seed, position, vocabulary index) and nothing
else, so a token does not depend on batch mates, on the row, or on how often a request was
preempted. Adding Gumbel noise and taking the largest draws from the softmax (the Gumbel-max trick,
Gumbel 1954).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float32, Int, Int32, Int64
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class SamplingNeeds:
    """What the rows of a step ask for; what nobody asks for is not computed.

    Arguments:
        noise: some row has a temperature above 0.
        filters: some such row has top_k, top_p or min_p on.
    """

    noise: bool = False
    filters: bool = False


ALL_NEEDS = (SamplingNeeds(True, True), SamplingNeeds(True), SamplingNeeds())


MAX_PARTS = 32
MIN_PART = 512
# What stands for the token of a row that has none, see `sample`. An int32 holds it too, and a
# caller's own sampler does not return it by mistake.
INVALID_TOKEN = -(2**31)
# Beyond these temperatures no draw changes any more; between them all quotients are normal numbers.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-20, 1e20


def largest(
    values: Float[Tensor, "B V"], parts: int
) -> tuple[Int64[Tensor, "B"], Float[Tensor, "B"]]:
    """Returns the place of the largest value of each row, the first of several, and that value.

    NaN counts as larger than any number. A row is searched in that many parts: on a GPU one row
    alone would occupy one multiprocessor, and a batch of few rows a fraction of the device.
    """
    if parts == 1:
        first = values.argmax(dim=-1)
        return first, values.gather(1, first[:, None])[:, 0]
    missing = -values.shape[-1] % parts
    if missing:  # never the first of the largest
        values = nn.functional.pad(values, (0, missing), value=float("-inf"))
    cut = values.unflatten(-1, (parts, -1))
    best, place = cut.amax(dim=-1), cut.argmax(dim=-1)
    part = best.argmax(dim=-1, keepdim=True)
    return (part * cut.shape[-1] + place.gather(1, part))[:, 0], best.gather(1, part)[:, 0]


def parts_of(vocab_size: int, device: torch.device) -> int:
    """Returns in how many parts a row is searched."""
    if device.type == "cpu":
        return 1
    return max(min(MAX_PARTS, vocab_size // MIN_PART), 1)


def likeliest(
    logits: Float[Tensor, "B V"],
) -> tuple[Int64[Tensor, "B"], Float32[Tensor, "B"]]:
    """Returns the likeliest token of each row, the first of several, and its logit.

    The largest logit alone tells whether a row has a token at all: it is NaN where any logit is,
    and -inf where all are. Such a row gives `INVALID_TOKEN`.
    """
    best, top = largest(logits.float(), parts_of(logits.shape[-1], logits.device))
    return torch.where(top > float("-inf"), best, INVALID_TOKEN), top


def scale(
    logits: Float[Tensor, "B V"], top: Float[Tensor, "B"], temperature: Float32[Tensor, "B"]
) -> Float32[Tensor, "B V"]:
    """Returns the logits, less the largest of the row, over the temperature."""
    # The largest is 0 afterwards, so no temperature, however small, makes it overflow. A finite
    # temperature may be infinite in fp32, and what the filters removed over that would be NaN.
    divisor = temperature.clamp(MIN_TEMPERATURE, MAX_TEMPERATURE)
    return (logits.float() - top.float()[:, None]) / divisor[:, None]


def draw(
    logits: Float[Tensor, "B V"],
    best: Int64[Tensor, "B"],
    top: Float[Tensor, "B"],
    temperature: Float32[Tensor, "B"],
    seeds: Int64[Tensor, "B"],
    positions: Int32[Tensor, "B"],
) -> Int64[Tensor, "B"]:
    """Returns a token for each row: `best` where temperature is 0, else a drawn one.

    `best` and `top` are what `likeliest` returns. Nothing can be drawn where `best` is
    `INVALID_TOKEN`, or where the largest logit is infinite: such a row gives `INVALID_TOKEN`.
    """
    noise = gumbel_noise(seeds, positions, logits.shape[-1])
    noisy = scale(logits, top, temperature) + noise
    drawn, _ = largest(noisy, parts_of(logits.shape[-1], logits.device))
    drawn = torch.where(top < float("inf"), drawn, INVALID_TOKEN)
    return torch.where((temperature > 0) & (best >= 0), drawn, best)


def sample(
    logits: Float[Tensor, "B V"],
    temperature: Float32[Tensor, "B"],
    top_k: Int32[Tensor, "B"],
    top_p: Float32[Tensor, "B"],
    min_p: Float32[Tensor, "B"],
    seeds: Int64[Tensor, "B"],
    positions: Int32[Tensor, "B"],
    needs: SamplingNeeds,
    likeliest: Callable[..., tuple[Tensor, Tensor]] = likeliest,
    draw: Callable[..., Tensor] = draw,
) -> Int64[Tensor, "B"]:
    """Returns a token for each row: the likeliest where temperature is 0, else a drawn one.

    `positions[i]` is the position that row i's token will have; `top_k` 0, `top_p` 1 and `min_p` 0
    are off. The filters apply in the order temperature, top-k, top-p, min-p. For `likeliest` and
    `draw` stand the functions of these names, or compiled ones.

    A row whose logits hold NaN, or nothing but -inf, or whose largest logit is +inf where it draws,
    gives `INVALID_TOKEN`, which is negative: clamp the ids before indexing with them. Such a row
    changes nothing for the others.
    """
    best, top = likeliest(logits)
    if not needs.noise:
        return best
    if needs.filters:
        keep = kept(scale(logits, top, temperature), top_k, top_p, min_p)
        logits = torch.where(keep, logits, float("-inf"))
    return draw(logits, best, top, temperature, seeds, positions)


def kept(
    scaled: Float32[Tensor, "B V"],
    top_k: Int32[Tensor, "B"],
    top_p: Float32[Tensor, "B"],
    min_p: Float32[Tensor, "B"],
) -> Bool[Tensor, "B V"]:
    """Returns True for the tokens that top-k, then top-p, then min-p leave; one or more."""
    ordered, index = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scaled.shape[-1], device=scaled.device)
    k = torch.where(top_k > 0, top_k, scaled.shape[-1])
    within_k = rank < k[:, None]
    probs = torch.where(within_k, ordered, float("-inf")).softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs
    within_p = (before < top_p[:, None]) | (top_p[:, None] >= 1)  # sums round up to 1
    keep = within_k & within_p & (probs >= min_p[:, None] * probs[:, :1])
    keep = keep | (rank == 0)
    return torch.zeros_like(keep).scatter(1, index, keep)


def gumbel_noise(
    seeds: Int64[Tensor, "B"], positions: Int[Tensor, "B"], vocab_size: int
) -> Float32[Tensor, "B V"]:
    """Returns standard Gumbel noise for each row and vocabulary index."""
    index = torch.arange(vocab_size, device=seeds.device, dtype=torch.int64)
    # two hashes of the same 96 bits: one alone would let the streams of many seeds overlap
    low = _mix(_mix(seeds) + positions)
    high = _mix(_mix((seeds >> 32) ^ _mix(seeds + 0x632BE5AB)) ^ positions)
    bits = _mix(_mix(index ^ low[:, None]) + high[:, None])
    uniform = (bits.float() + 0.5) * 2.0**-32
    # log1p keeps the relative precision of small exponentials, and they make the maxima
    return -torch.log(-torch.log1p(-uniform * (1 - 2.0**-24)))


_MASK = 0xFFFFFFFF


def _mix(bits: Tensor) -> Tensor:
    """Returns a bijective hash of the low 32 bits, in int64.

    Two rounds of xor-shift and multiply with the constants of Wellons' hash-prospector
    (github.com/skeeto/hash-prospector); the multipliers are below 2**31, so that the products of
    32-bit values stay positive in int64.
    """
    bits = bits & _MASK
    bits = bits ^ (bits >> 16)
    bits = (bits * 0x21F0AAAD) & _MASK
    bits = bits ^ (bits >> 15)
    bits = (bits * 0x735A2D97) & _MASK
    return bits ^ (bits >> 15)
