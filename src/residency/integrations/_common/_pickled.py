"""Takes a value apart as ``torch.save`` would, by pickle, with names in the place of its tensors.

So tensors are found inside of objects, too, and a copy of everything else is made at once.
Invariant, which ``tests/integrations/test_pickled.py`` tries to break: what is put together again
shares nothing mutable with the caller but what is put aside as it is.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from residency._checkpoint._document import Encoder
from residency._dtensor import is_sharded, local_of
from residency._storages import is_wrapper
from residency._transfer import Lent

_VALUES = (str, int, float, bool, type(None), dict, list, tuple)  # nearly all that there is
_BY_NAME = (FunctionType, BuiltinFunctionType, ModuleType, type)  # nothing in them changes


class Freezer(pickle.Pickler):
    """A pickler that puts tokens in the place of tensors and of what is put aside.

    Args:
        file: Where the pickle goes.
        lent: Loans, by the address of their bytes.
        has_attributes: Whether attributes of plain tensors and parameters are pickled with them,
            as ``torch.save`` does.

    Attributes:
        encoder: Has the tensors, by name.
        aside: What goes along as it is, or was copied to the host by torch's own means.
        lent: The addresses of the loans that were taken.
    """

    def __init__(
        self,
        file: io.BytesIO,
        lent: Mapping[int, Lent],
        *,
        has_attributes: bool = False,
    ) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.encoder = Encoder()
        self.aside: list[object] = []
        self.lent: set[int] = set()
        self._by_address = lent
        self._has_attributes = has_attributes
        self._tokens: dict[int, object] = {}
        self._alive: list[object] = []  # an identity is that of something living

    def persistent_id(self, value: object) -> Any:
        kind = type(value)
        if kind in _VALUES:
            return None
        if isinstance(value, _BY_NAME):
            return self._token(value, self._put_aside_by_name)
        if kind in (Tensor, torch.nn.Parameter) or is_sharded(value):
            return self._token(value, self._take)
        if _is_of_fsdp1(value):
            return self._token(value, self._clone)
        return None

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, Tensor) and not is_wrapper(value):
            with torch._C.DisableTorchFunctionSubclass():  # or a subclass's code runs
                plain = value.as_subclass(Tensor)
            return _as_subclass, (plain, type(value), dict(vars(value)))
        return NotImplemented

    def _token(self, value: Any, make: Any) -> Any:
        if id(value) not in self._tokens:
            self._alive.append(value)
            self._tokens[id(value)] = make(value)
        return self._tokens[id(value)]

    def _put_aside(self, value: object) -> int:
        self.aside.append(value)
        return len(self.aside) - 1

    def _put_aside_by_name(self, value: object) -> int:
        # Pickle writes these by their name alone, and would only say in the background that one
        # cannot be found by it.
        pickle.dumps(value)
        return self._put_aside(value)

    def _clone(self, value: Any) -> int:
        return self._put_aside(value.clone())

    def _take(self, value: Tensor) -> object:
        local = local_of(value).detach()
        if local.is_meta:
            return self._put_aside(value)
        name = str(len(self.encoder.leaves))
        if local.layout is not torch.strided or local.is_quantized or _is_lazy(local):
            # No plain bytes: copied now, by torch's own means.
            return self._put_aside(value.detach().to("cpu", copy=True))
        address = address_of(local)
        lent = self._by_address.get(address) if local.is_cpu else None
        if lent is not None and lent.value.shape == value.shape and address not in self.lent:
            self.lent.add(address)
            self.encoder.tensor(name, lent.value, is_early=False, lent=lent)
        else:
            self.encoder.tensor(name, value)
        is_plain = type(value) in (Tensor, torch.nn.Parameter)
        attributes = dict(vars(value)) if self._has_attributes and is_plain else {}
        return name, type(value) is torch.nn.Parameter, value.requires_grad, attributes or None


class Thawer:
    """An unpickler that puts host tensors, and what was put aside, into the place of the tokens."""

    def __init__(self, pickled: bytes, aside: list[Any]) -> None:
        self._pickled = pickled
        self._aside = aside

    def thaw(self, tensors: Mapping[str, Tensor]) -> Any:
        """Returns the value, with these tensors by name."""
        return _ThawingUnpickler(self._pickled, self._aside, tensors).load()


class _ThawingUnpickler(pickle.Unpickler):
    def __init__(self, pickled: bytes, aside: list[Any], tensors: Mapping[str, Tensor]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._aside = aside
        self._tensors = tensors
        self._parameters: dict[str, torch.nn.Parameter] = {}

    def persistent_load(self, token: Any) -> Any:
        if isinstance(token, int):
            return self._aside[token]
        name, is_parameter, requires_grad, attributes = token
        value = self._tensors[name]
        if is_parameter and name not in self._parameters:
            self._parameters[name] = torch.nn.Parameter(value, requires_grad)
        elif requires_grad and not is_parameter:
            value.requires_grad_()
        value = self._parameters[name] if is_parameter else value
        vars(value).update(attributes or {})
        return value


def address_of(tensor: Tensor) -> int:
    """Returns where a tensor's storage begins, or 0 for one without plain bytes."""
    local = local_of(tensor)
    return local.untyped_storage().data_ptr() if local.layout is torch.strided else 0


def _is_of_fsdp1(value: Any) -> bool:
    """Returns whether a value is a ``ShardedTensor``: what FSDP1 copies to the host itself."""
    module: Any = sys.modules.get("torch.distributed._shard.sharded_tensor")
    return module is not None and isinstance(value, module.ShardedTensor)


def _is_lazy(tensor: Tensor) -> bool:
    return tensor.is_conj() or tensor.is_neg()


def _as_subclass(plain: Tensor, kind: type[Tensor], attributes: dict[str, object]) -> Tensor:
    value = plain.as_subclass(kind)
    vars(value).update(attributes)
    return value
