"""What takes the memory of a device."""

from __future__ import annotations

from dataclasses import dataclass

# what is in the host's memory, or is no part but the bound of all parts
_NO_PARTS = ("limit", "host")


@dataclass(frozen=True, slots=True)
class MemoryBreakdown:
    """What an engine takes of its device at most, in bytes, by what takes it.

    `str` gives a line for each part.

    Arguments:
        limit: what `total` may come to.
        weights: parameters and buffers of the model.
        other: on the device beside them before the engine was there: the CUDA context, tensors of
            the caller, other processes.
        kv_cache: all chunks, the null chunks included.
        activations: what the layers compute in the largest step.
        logits: of the largest step's rows, in the model's dtype.
        sampling: what is computed of these logits.
        io_buffers: inputs and outputs of both slots, block tables included.
        graphs: captured launches, without the pool that they compute in.
        libraries: kernels and workspaces that are loaded when they are first used.
        host: in host memory, and so not in `total`: the KV of preempted requests and the host's
            side of the slots; pinned where the device is a GPU.
    """

    limit: int = 0
    weights: int = 0
    other: int = 0
    kv_cache: int = 0
    activations: int = 0
    logits: int = 0
    sampling: int = 0
    io_buffers: int = 0
    graphs: int = 0
    libraries: int = 0
    host: int = 0

    @property
    def parts(self) -> dict[str, int]:
        """The parts of `total`, by name."""
        names = (name for name in self.__dataclass_fields__ if name not in _NO_PARTS)
        return {name: getattr(self, name) for name in names}

    @property
    def total(self) -> int:
        """Bytes on the device at most, with what was there before."""
        return sum(self.parts.values())

    @property
    def graph_pool(self) -> int:
        """Bytes of a step's intermediate results; captured steps share one pool for them."""
        return self.activations + self.logits + self.sampling

    def __str__(self) -> str:
        sizes = {**self.parts, "total": self.total, "limit": self.limit, "host": self.host}
        return "\n".join(f"{name:<12}{readable(size):>12}" for name, size in sizes.items())


def readable(num_bytes: int) -> str:
    """Returns a size in the largest binary unit of which there is one or more.

    >>> readable(3 * 2**29), readable(2**20), readable(1000)
    ('1.50 GiB', '1.00 MiB', '1000 B')
    """
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} B"
