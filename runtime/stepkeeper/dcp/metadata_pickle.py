"""Pickle torch's Metadata for `.metadata`, so that every torch since 2.9 reads it, whichever has made it."""

import io
import pickle
from typing import Any, Final

from torch.distributed.checkpoint.metadata import Metadata, TensorProperties
from typing_extensions import override

__all__ = ["pickle_metadata"]

_N_PROPERTIES: Final = 5
"""torch up to 2.14 takes so many properties of a tensor and no more. 2.15 adds the strides, which no reader uses: what
is stored lies row by row.
"""


def pickle_metadata(metadata: Metadata) -> bytes:
    """Pickle the description of a checkpoint."""
    out = io.BytesIO()
    _Pickler(out).dump(metadata)
    return out.getvalue()


class _Pickler(pickle.Pickler):
    @override
    def reducer_override(self, value: Any) -> Any:
        if type(value) is not TensorProperties:
            return NotImplemented
        reduced = value.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        assert not isinstance(reduced, str)
        made, arguments, state, *_ = reduced
        return made, arguments, state[:_N_PROPERTIES]
