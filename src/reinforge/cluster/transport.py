"""How objects travel between the controller and its actors: pickle, between processes that this
program started itself.

Tensors travel as arrays: what pickle makes of a tensor by itself is a file of its own, a hundred
times slower for the small ones of which batches are made. Large ones stay outside of the pickle, so
that the object store keeps them once and readers on the same machine see them without a copy.
"""

from __future__ import annotations

import io
import pickle
import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reinforge.backends.distributed.wire import Pickler
from reinforge.core.errors import InputError

LARGE = 1 << 15  # bytes from which on a buffer stays outside
# numpy has no bfloat16: its bits are sent
_AS: dict[torch.dtype, torch.dtype] = {torch.bfloat16: torch.int16}


@dataclass(slots=True)
class Payload:
    """A pickled value, and the large buffers that stay outside of the pickle, so that Ray shares
    them without a copy. `pack` makes it, `unpack` opens it.
    """

    data: bytes
    buffers: list[Any] = field(default_factory=list)  # np.ndarray of uint8 each


class _Packer(Pickler):
    """Pickles tensors of whatever device as buffers in host memory."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Tensor and obj.layout is torch.strided:
            plain = obj.detach().cpu().contiguous()
            return _tensor, (
                plain.view(_AS.get(plain.dtype, plain.dtype)).numpy(),
                plain.dtype if plain.dtype in _AS else None,
            )
        return super().reducer_override(obj)


def pack(value: Any) -> Payload:
    """On the CPU, and without gradients, whatever it was."""
    buffers: list[Any] = []

    def outside(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < LARGE:
            return True
        buffers.append(np.frombuffer(raw, dtype=np.uint8))
        return False

    out = io.BytesIO()
    try:
        _Packer(out, protocol=5, buffer_callback=outside).dump(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise InputError(
            f"something cannot be sent to another process: {error}.",
            where="cluster.kind",
            fix="Define functions at the top level of a file, or use cluster.kind=local.",
        ) from error
    return Payload(out.getvalue(), buffers)


def unpack(payload: Payload, *, views: bool = False) -> Any:
    """`views`: large tensors are those of the object store, to be read and never written (that
    would end the process).
    """
    return pickle.loads(
        payload.data,
        buffers=payload.buffers if views else [buffer.copy() for buffer in payload.buffers],
    )


def _tensor(array: Any, dtype: torch.dtype | None) -> Tensor:
    with warnings.catch_warnings():
        # that the array must not be written: nobody does
        warnings.simplefilter("ignore", UserWarning)
        plain = torch.from_numpy(array)
    return plain if dtype is None else plain.view(dtype)
