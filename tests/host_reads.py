"""Finds out, without a GPU, whether code on tensors makes the host wait for the device.

Two ways. `no_host_reads` runs the code on real tensors and refuses every operation whose result the host must see.
On the device `meta` tensors have a shape and no contents: whatever would need these (`item`, `tolist`, `nonzero`,
`numpy`, a copy to the host) is torch's own error, so code that runs there asks for none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Results that have to be on the host before the next line of Python can run.
WAITING = {
    "aten::_local_scalar_dense",
    "aten::item",
    "aten::nonzero",
    "aten::nonzero_static",
    "aten::equal",
    "aten::is_nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_consecutive",
    "aten::unique_dim",
    "aten::bincount",
    "aten::repeat_interleave.Tensor",
}


class HostRead(AssertionError):
    """The host would wait for the device here."""


class _Refusing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name()
        if name in WAITING or name.split(".")[0] in WAITING:
            raise HostRead(f"{name} makes the host wait")
        index = args[1] if name.startswith(("aten::index.", "aten::index_put")) else ()
        if any(isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in index):
            raise HostRead(f"{name} by a mask makes the host wait")
        return func(*args, **kwargs)


@contextmanager
def no_host_reads() -> Iterator[None]:
    """Raise `HostRead` where the enclosed code asks for a value."""
    with _Refusing():
        yield
