"""A container of plain optimizers without state, as a load by way of the host sees it.

Torchtitan's own container takes a step with zero gradients before a load, so that there is
something to load into: as many bytes of gradients on the device as of parameters, and the state
beside them. Here the load goes into host tensors, which the first step moves. Invariant, which
``tests/integrations/test_torchtitan.py`` tries to break: names and group values are those of
torchtitan's own flat state dict.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from residency._optim import OffloadedOptimizer, plain_schema_of
from residency._optim._trial import Schemas
from residency.integrations.dcp._train_state import host_template, put_state

_NO_VALUES = ("params", "param_names")  # the keys of a group that torchtitan does not save


class PlainOptimizers(Stateful):
    """A container's optimizers, to be loaded before their first step."""

    def __init__(self, container: Any) -> None:
        self._optimizers: list[Optimizer] = list(container)
        self._keys: dict[Tensor, list[str]] = {}  # of each parameter's state

    @staticmethod
    def takes(container: Any) -> bool:
        """Returns whether there is something to gain, and a first step can be foreseen.

        A hook may make state in another way than the class does; torchtitan has one.
        """
        schemas = Schemas()
        return all(_is_foreseen(optimizer, schemas) for optimizer in container)

    def state_dict(self) -> dict[str, Any]:
        """Returns host tensors for what first steps would make, under torchtitan's names."""
        found: dict[str, Any] = {}
        schemas = Schemas()
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                values = {key: value for key, value in group.items() if key not in _NO_VALUES}
                for name, parameter in _named(group):
                    made = host_template(optimizer, group, parameter, name, schemas)
                    self._keys[parameter] = list(made)
                    found |= {f"state.{name}.{key}": value for key, value in made.items()}
                    found |= {f"param_groups.{name}.{key}": each for key, each in values.items()}
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Makes what was filled the optimizers' state and group values."""
        for optimizer in self._optimizers:
            filled: dict[Tensor, dict[str, Any]] = {}
            for group in optimizer.param_groups:
                for name, parameter in _named(group):
                    keys = self._keys[parameter]
                    filled[parameter] = {key: state_dict[f"state.{name}.{key}"] for key in keys}
                first = group["param_names"][0]  # as torchtitan: all of a group have the same
                for key in [key for key in group if key not in _NO_VALUES]:
                    group[key] = state_dict[f"param_groups.{first}.{key}"]
            put_state(optimizer, filled)


def _named(group: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    yield from zip(group["param_names"], group["params"], strict=True)


def _is_foreseen(optimizer: Optimizer, schemas: Schemas) -> bool:
    hooks: Any = optimizer._optimizer_step_pre_hooks  # torch has no public way to ask
    if isinstance(optimizer, OffloadedOptimizer) or optimizer.state or hooks:
        return False
    return all(
        parameter.requires_grad
        and plain_schema_of(optimizer, group, parameter, schemas) is not None
        for group in optimizer.param_groups
        for parameter in group["params"]
    )
