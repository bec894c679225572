"""A checkpoint as it is at one call: tensors as copies on the host, everything else as a pickle.

What ``torch.save`` can write can be frozen, because it is taken apart in the same way: by pickle,
which also finds tensors inside of objects. Tensors go through the snapshot's pipeline; ties stay,
and no device memory is allocated.

[Note: what waits] The current stream waits for the copies of everything but optimizer state before
the call returns: Lightning's own callbacks write parameters between two steps without a step (the
averages that ``WeightAveraging`` swaps in for validation). Optimizer state is written by steps
alone, which pass the gate; it is most of the bytes.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from residency._checkpoint._capture import capture_described
from residency._checkpoint._encode import Encoder
from residency._checkpoint._snapshot import Snapshot
from residency._checkpoint._tree import Description
from residency._errors import RefusedError
from residency._transfer import (
    Lent,
    SlabArena,
    is_sharded,
    local_of,
    owned_optimizers,
    owner_of,
)

_VALUES = (str, int, float, bool, type(None), dict, list, tuple)  # nearly all that there is
_KEPT = (FunctionType, BuiltinFunctionType, ModuleType, type)  # nothing in them changes


class Frozen:
    """Is a checkpoint as it was when ``freeze`` was called."""

    def __init__(self, pickled: bytes, kept: list[Any], snapshot: Snapshot) -> None:
        self._pickled = pickled
        self._kept = kept
        self._snapshot = snapshot

    def thaw(self) -> Any:
        """Returns the checkpoint, with host tensors that keep their memory; waits for the copies.

        Raises:
            CheckpointError: A copy failed.
        """
        return _Thawer(self._pickled, self._kept, self._snapshot.tree).load()


def freeze(checkpoint: Mapping[str, Any], *, arena: SlabArena) -> Frozen:
    """Begins to copy a checkpoint to the host, and returns when the copies are queued.

    Args:
        checkpoint: What a strategy would have written.
        arena: Where the copies go.

    Raises:
        RefusedError: A part can be pickled neither here nor by ``torch.save``, or the host has no
            room. Nothing is held.

    Memory:
        Device: none. Host: the bytes of all tensors, each storage's overlapping ones once, rounded
        up to 512; state that an offloaded optimizer keeps on the host is lent, not copied.
    """
    loans = _Loans(checkpoint)
    file = io.BytesIO()
    freezer = _Freezer(file, loans.by_address, {id(value) for value in _states_of(checkpoint)})
    try:
        freezer.dump(checkpoint)
    except BaseException as error:
        loans.end()
        if not isinstance(error, Exception) or isinstance(error, RefusedError):
            raise
        raise RefusedError(
            f"{_culprit(checkpoint)} of the checkpoint cannot be pickled, so that no file could"
            f" hold it: {error}. Nothing was saved; take it out in on_save_checkpoint."
        ) from error
    loans.end(but=freezer.lent)
    names = {name: {"$": "tensor", "name": name} for name in freezer.encoder.leaves}
    captured = capture_described(Description(names, freezer.encoder.leaves), arena=arena)
    return Frozen(file.getvalue(), freezer.kept, Snapshot(captured, arena))


class _Freezer(pickle.Pickler):
    """Pickles with tokens in the place of tensors and of what is kept as it is."""

    def __init__(self, file: io.BytesIO, lent: Mapping[int, Lent], late: set[int]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.encoder = Encoder()
        self.kept: list[Any] = []
        self.lent: set[int] = set()
        self._by_address = lent
        self._late = late
        self._tokens: dict[int, Any] = {}
        self._alive: list[Any] = []  # an identity is that of something living

    def persistent_id(self, value: Any) -> Any:
        kind = type(value)
        if kind in _VALUES:
            return None
        if isinstance(value, _KEPT):
            return self._token(value, self._keep)
        if kind in (Tensor, torch.nn.Parameter) or is_sharded(value):
            return self._token(value, self._take)
        if _is_of_fsdp1(value):
            return self._token(value, self._clone)
        return None

    def reducer_override(self, value: Any) -> Any:
        if (
            isinstance(value, Tensor)
            and type(value).__torch_dispatch__ is Tensor.__torch_dispatch__
        ):
            with torch._C.DisableTorchFunctionSubclass():
                plain = value.as_subclass(Tensor)
            return _as_subclass, (plain, type(value), dict(vars(value)))
        return NotImplemented

    def _token(self, value: Any, make: Any) -> Any:
        if id(value) not in self._tokens:
            self._alive.append(value)
            self._tokens[id(value)] = make(value)
        return self._tokens[id(value)]

    def _keep(self, value: Any) -> int:
        self.kept.append(value)
        return len(self.kept) - 1

    def _clone(self, value: Any) -> int:
        return self._keep(value.clone())

    def _take(self, value: Tensor) -> Any:
        local = local_of(value).detach()
        if local.is_meta:
            return self._keep(value)
        name = str(len(self.encoder.leaves))
        if local.layout is not torch.strided or local.is_quantized or _is_lazy(local):
            # No plain bytes: copied now, by torch's own means.
            return self._keep(value.detach().to("cpu", copy=True))
        address = _address(local)
        lent = self._by_address.get(address) if local.is_cpu else None
        if lent is not None and lent.value.shape == value.shape and address not in self.lent:
            self.lent.add(address)
            self.encoder.tensor(name, lent.value, is_early=False, lent=lent)
        else:
            self.encoder.tensor(name, value, is_early=id(value) not in self._late)
        return name, type(value) is torch.nn.Parameter, value.requires_grad


class _Thawer(pickle.Unpickler):
    """Puts host tensors, and what was kept, into the place of the tokens."""

    def __init__(self, pickled: bytes, kept: list[Any], tensors: Mapping[str, Tensor]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._kept = kept
        self._tensors = tensors

    def persistent_load(self, token: Any) -> Any:
        if isinstance(token, int):
            return self._kept[token]
        name, is_parameter, requires_grad = token
        value = self._tensors[name]
        if is_parameter:
            return torch.nn.Parameter(value, requires_grad)
        return value.requires_grad_() if requires_grad else value


class _Loans:
    """Borrows the state of the offloaded optimizers whose state the checkpoint has."""

    def __init__(self, checkpoint: Mapping[str, Any]) -> None:
        self.by_address: dict[int, Lent] = {}
        wanted = set(map(_address, _states_of(checkpoint)))
        for optimizer in owned_optimizers() if wanted else ():
            if wanted.isdisjoint(map(_address, _states_in(dict.values(optimizer.state)))):
                continue
            owner = owner_of(optimizer)
            lent = {} if owner is None else owner.lend(optimizer, keep=True)
            for values in lent.values():
                for value in values.values() if isinstance(values, Mapping) else ():
                    if isinstance(value, Lent):
                        self.by_address[_address(value.tensor)] = value

    def end(self, *, but: Collection[int] = ()) -> None:
        """Gives back what was not taken."""
        for address, lent in self.by_address.items():
            if address not in but:
                lent.give_back()


def _states_of(checkpoint: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yields the tensors that stand directly in optimizers' states: steps know of these."""
    optimizers = checkpoint.get("optimizer_states")
    for saved in optimizers if isinstance(optimizers, list) else ():
        states = saved.get("state") if isinstance(saved, Mapping) else None
        yield from _states_in(states.values() if isinstance(states, Mapping) else ())


def _states_in(states: Iterable[Any]) -> Iterator[Tensor]:
    for values in states:
        # Without the waits of an offloaded optimizer's own reading.
        found = dict.values(values) if isinstance(values, dict) else ()
        yield from (value for value in found if type(value) is Tensor or is_sharded(value))


def _address(tensor: Tensor) -> int:
    local = local_of(tensor)
    return local.untyped_storage().data_ptr() if local.layout is torch.strided else 0


def _is_of_fsdp1(value: Any) -> bool:
    """Says whether a value is a ``ShardedTensor``: what FSDP1 copies to the host itself."""
    module: Any = sys.modules.get("torch.distributed._shard.sharded_tensor")
    return module is not None and isinstance(value, module.ShardedTensor)


def _is_lazy(tensor: Tensor) -> bool:
    return tensor.is_conj() or tensor.is_neg()


def _as_subclass(plain: Tensor, kind: type[Tensor], attributes: dict[str, Any]) -> Tensor:
    value = plain.as_subclass(kind)
    vars(value).update(attributes)
    return value


def _culprit(checkpoint: Mapping[str, Any]) -> str:
    """Returns the name of the part that cannot be pickled."""
    for key, value in checkpoint.items():
        try:
            _Freezer(io.BytesIO(), {}, set()).dump(value)
        except Exception as error:  # the same that is being told
            return f"{key!r} ({type(error).__name__})"
    return "a part"
