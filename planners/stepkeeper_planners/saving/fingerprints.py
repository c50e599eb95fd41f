"""Digest a state, so that ranks can compare their states before a save. Pure."""

import marshal
from array import array
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final

import numpy as np
import torch

from stepkeeper_planners.errors import RanksDifferError
from stepkeeper_planners.geometry.layout import Owner, TensorLayout
from stepkeeper_planners.state.values import encode_value

__all__ = [
    "are_mergeable",
    "build_ranks_differ_error",
    "digest_layouts",
    "digest_names",
    "digest_value",
    "fingerprint",
]

_DIGEST_BYTES: Final = 16
_NO_CONTENT: Final = bytes(_DIGEST_BYTES)
"""Stands for the part of a digest that an entry of its kind doesn't have."""
_NUMBERS: Final = frozenset({type(None), bool, int, float, complex})
# The first byte of a digest: the kind of its entry.
_TENSOR, _VALUE, _PER_RANK, _ALIAS = b"t", b"v", b"p", b"a"
_KINDS: Final = {_TENSOR: "a tensor", _VALUE: "a value", _PER_RANK: "a PerRank", _ALIAS: "a tied tensor"}


def digest_layouts(layouts: Sequence[TensorLayout]) -> dict[str, bytes]:
    """Digest each tensor's layout. This is the costly part of `digest_names`; states of one structure have the same."""
    known: dict[int, bytes] = {}
    return {layout.fqn: _digest_layout(layout, known) for layout in layouts}


def digest_names(
    layouts: Sequence[TensorLayout],
    *,
    layout_digests: Mapping[str, bytes] | None = None,
    values: Mapping[str, bytes] | None = None,
    aliases: Mapping[str, str] | None = None,
    per_rank_keys: Collection[str] = (),
) -> dict[str, bytes]:
    """Digest each name's entry, as far as it must be equal on all ranks.

    A digest is one byte for the kind, a digest of the layout, and a digest of the content. An alias has its tensor's
    name in place of a layout. The chunks of an incomplete layout are left out: they differ between ranks by design.

    Args:
        layouts: the layouts of all tensors.
        layout_digests: the result of `digest_layouts` for `layouts`, if it is known already.
        values: the digest of each value.
        aliases: the other names of tied tensors, with the name under which each is saved.
        per_rank_keys: the names of `PerRank` entries.
    """
    digests: dict[str, bytes] = {}
    for name, form in (digest_layouts(layouts) if layout_digests is None else layout_digests).items():
        digests[name] = _TENSOR + form + _NO_CONTENT
    for name, digest in (values or {}).items():
        digests[name] = _VALUE + _NO_CONTENT + digest
    for name in per_rank_keys:
        digests[name] = _PER_RANK + _NO_CONTENT + _NO_CONTENT
    for name, first in (aliases or {}).items():
        digests[name] = _ALIAS + _hash(first.encode("utf-8", "surrogatepass")) + _NO_CONTENT
    return digests


def fingerprint(digests: Mapping[str, bytes]) -> bytes:
    """Hash all digests into one, for ranks to exchange. It doesn't depend on the order of names."""
    whole = blake2b(digest_size=_DIGEST_BYTES)
    for name in sorted(digests):
        encoded = name.encode("utf-8", "surrogatepass")
        whole.update(len(encoded).to_bytes(4, "big") + encoded + digests[name])
    return whole.digest()


def digest_value(fqn: str, value: object) -> bytes:
    """Digest a value. Values of the same types and content have equal digests; the order of dicts doesn't count.

    Raises:
        UnsupportedValueError: the value, or something in it, is of a type that isn't stored.
    """
    kind = type(value)
    if kind in (dict, OrderedDict):
        assert isinstance(value, dict)
        items = [
            digest_value(f"{fqn} (a key)", k) + digest_value(f"{fqn}[{k!r}]", v) for k, v in value.items()
        ]
        return _hash(b"dict" + b"".join(sorted(items)))
    if kind in (list, tuple):
        assert isinstance(value, list | tuple)
        if _NUMBERS.issuperset(map(type, value)):
            # Digested at once: data loaders keep long lists of numbers. Version 2 depends on nothing but the numbers.
            content = b"numbers" + marshal.dumps(value, 2)
        else:
            content = b"".join(digest_value(f"{fqn}[{index}]", item) for index, item in enumerate(value))
        return _hash(kind.__name__.encode() + content)
    if kind is np.ndarray or isinstance(value, np.generic):
        return _digest_array(fqn, value)
    if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.layout is torch.strided:
        return _digest_tensor(value)
    if kind in (bool, int, float, complex, str, bytes, type(None)):
        # Python refuses to format very long integers as decimals.
        text = f"{value:x}" if kind is int else repr(value)
        return _hash(f"{kind.__name__} {text}".encode("utf-8", "surrogatepass"))
    # The rest are rare types, and types that are refused.
    return _hash(encode_value(fqn, value))


def build_ranks_differ_error(
    reports: Sequence[tuple[Sequence[int], Mapping[str, bytes]]], n_unseen: int = 0
) -> RanksDifferError:
    """Build the error that names the entries that differ, and the ranks.

    Args:
        reports: groups of ranks with equal digests, and those digests.
        n_unseen: the number of ranks that differ from all reports, and whose digests aren't known.
    """
    reasons: dict[str, str] = {}
    ranks_that_differ: dict[str, tuple[int, ...]] = {}
    for name in sorted({name for _, digests in reports for name in digests}):
        ranks_of: dict[bytes | None, list[int]] = {}
        for ranks, digests in reports:
            ranks_of.setdefault(digests.get(name), []).extend(ranks)
        if len(ranks_of) == 1:
            continue
        # What most ranks have; if two are as frequent, that of the lowest rank.
        usual = min(ranks_of, key=lambda digest: (-len(ranks_of[digest]), min(ranks_of[digest])))
        ranks_that_differ[name] = tuple(
            sorted(r for digest in ranks_of if digest != usual for r in ranks_of[digest])
        )
        reasons[name] = _describe_difference(usual, [digest for digest in ranks_of if digest != usual])
    return RanksDifferError(reasons=reasons, ranks=ranks_that_differ, n_unseen=n_unseen)


def are_mergeable(digests: Collection[bytes]) -> bool:
    """Return whether digests of one name, from different ranks, can be of one entry. Some ranks may not have the entry.

    The layout of a tensor may differ: pipeline stages and groups of tensor-parallel ranks know their own part only.
    """
    kinds = {digest[:1] for digest in digests}
    if kinds == {_TENSOR}:
        return True
    return kinds <= {_VALUE, _ALIAS} and len(set(digests)) == 1


def _describe_difference(usual: bytes | None, others: Sequence[bytes | None]) -> str:
    if usual is None:
        return "the other ranks have no such name"
    if None in others:
        return "missing"
    found = [other for other in others if other is not None]
    kinds = {other[:1] for other in found if other[:1] != usual[:1]}
    if kinds:  # of several, always the same one
        return f"{_KINDS[min(kinds)]}, but {_KINDS[usual[:1]]} on the other ranks"
    if any(other[1 : 1 + _DIGEST_BYTES] != usual[1 : 1 + _DIGEST_BYTES] for other in found):
        if usual[:1] == _ALIAS:
            return "tied to another tensor than on the other ranks"
        return "of another dtype, shape or placement than on the other ranks"
    return "another value than on the other ranks; if each rank has its own, save it as PerRank(value)"


def _digest_layout(layout: TensorLayout, known: dict[int, bytes]) -> bytes:
    form = blake2b(digest_size=_DIGEST_BYTES)
    form.update(repr((layout.dtype, layout.global_shape, layout.complete)).encode())
    if layout.complete:
        if layout.mesh_slices:
            slices = known.get(id(layout.mesh_slices))
            if slices is None:
                slices = known[id(layout.mesh_slices)] = _hash(repr(layout.mesh_slices).encode())
            form.update(slices)
        for chunk in layout.chunks:
            owners = known.get(id(chunk.owners))
            if owners is None:
                owners = known[id(chunk.owners)] = _digest_owners(chunk.owners)
            form.update(repr((chunk.box.offsets, chunk.box.sizes)).encode() + owners)
    return form.digest()


def _digest_owners(owners: Sequence[Owner]) -> bytes:
    numbers = array("q")
    for owner in owners:
        numbers.append(owner.rank)
        numbers.append(owner.local_index)
    return _hash(numbers.tobytes())


def _hash(data: bytes) -> bytes:
    return blake2b(data, digest_size=_DIGEST_BYTES).digest()


def _digest_array(fqn: str, value: Any) -> bytes:
    if value.dtype.hasobject:
        return _hash(encode_value(fqn, value))
    form = (type(value).__name__, value.dtype.descr if value.dtype.names else value.dtype.str, value.shape)
    return _hash(repr(form).encode() + value.tobytes())


def _digest_tensor(value: torch.Tensor) -> bytes:
    plain = value.detach().resolve_conj().resolve_neg().contiguous()
    form = (type(value).__name__, str(value.dtype), tuple(value.shape), value.requires_grad)
    digest = blake2b(repr(form).encode(), digest_size=_DIGEST_BYTES)
    if plain.numel():
        # Hashed in place: there may be gigabytes.
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()
