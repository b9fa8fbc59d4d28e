"""Programmatic dependent launch: a kernel starts while the one before it ends.

A kernel that is launched so may begin once all programs of the kernel before it have said
`gdc_launch_dependents` (or ended); `gdc_wait` holds it until that kernel has ended and what it
wrote is seen (CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization"). The
rule that inductor's kernels follow, and ours with them: wait first, then let the next one begin.
So when a kernel starts, all kernels but the one before it have ended. (The exception are inductor's
kernels that load nothing; `cbfn.compiling` keeps layers that may have such ones out.)
"""

from __future__ import annotations

from typing import Any

import torch

LAUNCH: dict[str, Any] = {"launch_pdl": True}
# with more tokens the matrix products of the vendor's library are faster than ours, and as those
# are no dependents, steps are slightly slower with others that are
MAX_TOKENS = 64


def are_known(device: torch.device) -> bool:
    """Returns whether the device can start kernels so, and ours fit it: Hopper and its successor
    for data centres. (Blackwell cards for desktops have less shared memory.)"""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


def pay_off(device: torch.device, num_tokens: int, decodes: bool) -> bool:
    """Returns whether a step of that many tokens, one for each row if it decodes, is faster so."""
    return decodes and num_tokens <= MAX_TOKENS and are_known(device)
