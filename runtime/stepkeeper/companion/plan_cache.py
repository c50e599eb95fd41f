"""What a trainer's saves have in common, told to a companion process once: after that each save names it.

A name is a digest of all that it stands for, and a companion goes by its own digest of what it was told.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import TypeVar, final

from stepkeeper.checkpoint import SaveOrder, TensorOrder
from stepkeeper.companion.messages import Plan, Write
from stepkeeper.contract.wire import encode_json
from stepkeeper.errors import CompanionError

__all__ = ["Common", "Held", "Told", "Whole", "name_of", "plan_of"]

T = TypeVar("T")

KeyPaths = Mapping[str, tuple[str | int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """In the trainer: what a save may have in common with those before it."""

    tensors: tuple[TensorOrder, ...]
    aliases: Mapping[str, str]
    key_paths: KeyPaths


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What one companion process was told, and by which name it knows it."""

    common: Common
    name: str


def plan_of(common: Common) -> Plan:
    """As a companion is told it. Order by order: one call for all of them would hold the GIL for as long."""
    return Plan(
        tensors="\n".join(
            json.dumps([o.fqn, o.dtype, o.global_shape, o.offsets, o.sizes, o.start]) for o in common.tensors
        ),
        aliases=dict(common.aliases),
        key_paths=json.dumps(common.key_paths),
    )


def name_of(plan: Plan) -> str:
    return sha256(encode_json(plan)).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """In the companion: what is to be written, and all that is said of it."""

    order: SaveOrder
    aliases: Mapping[str, str] = field(default_factory=dict)
    key_paths: str = "{}"


@final
class Held:
    """In the companion: the plan that it was told last."""

    def __init__(self) -> None:
        self._name: str | None = None
        self._tensors: tuple[TensorOrder, ...] = ()
        self._aliases: Mapping[str, str] = {}
        self._key_paths = "{}"

    def whole(self, body: Write) -> Whole:
        """What is to be written, with what isn't told again. Raises CompanionError if that isn't held here."""
        if body.told is not None:
            self._take(body.told)
        if body.plan is None:
            return Whole(order=body.order)
        if body.plan != self._name:
            raise CompanionError(
                f"{body.order.folder} is to be written by a plan that wasn't told: nothing was"
            )
        order = replace(body.order, tensors=self._tensors)
        return Whole(order=order, aliases=self._aliases, key_paths=self._key_paths)

    def _take(self, plan: Plan) -> None:
        self._name = None
        self._tensors = _orders(plan.tensors.splitlines())
        self._aliases, self._key_paths = plan.aliases, plan.key_paths
        self._name = name_of(plan)


def _orders(lines: Iterable[str]) -> tuple[TensorOrder, ...]:
    """What is alike in them is one object: most tensors of a state have the shape of another."""
    alike: dict[object, object] = {}

    def one(value: T) -> T:
        return alike.setdefault(value, value)  # type: ignore[return-value]  # each stands for itself

    orders = []
    for line in lines:
        fqn, dtype, global_shape, offsets, sizes, start = json.loads(line)
        order = TensorOrder(
            fqn=fqn,
            dtype=one(dtype),
            global_shape=one(tuple(global_shape)),
            offsets=one(tuple(offsets)),
            sizes=one(tuple(sizes)),
            start=start,
        )
        orders.append(order)
    return tuple(orders)
