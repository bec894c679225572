"""The changes of a dry run in how a script resumes: by way of the host, and with an optimizer's
state that stays there until the first step.

In every run it is noted whether torch made the state of an optimizer by a step, for a load of
``torch.distributed.checkpoint`` to fill; that step is a phase of its own.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

import residency
from residency._dryrun._methods import Function, around, put_around
from residency._dtensor import is_sharded, local_of, moved
from residency._memory import ImportWatch
from residency._optim import record_of

TEMPLATE = "template step"  # the phase


class Loads:
    """The watch over files that are read.

    Attributes:
        are_on_device: Whether one was, or would have been, read to the device.
        have_state: Whether an optimizer was given a state, with tensors of a parameter in it.
    """

    def __init__(self, *, on_host: bool) -> None:
        """Prepares; nothing is changed until `start`.

        Args:
            on_host: Whether files are read to the host, wherever the script wants them.
        """
        self.are_on_device = False
        self.have_state = False
        self._on_host = on_host

    def start(self) -> None:
        """Watches from now on, also where safetensors is imported later."""

        @put_around(torch, "load")
        def loaded(
            load: Function, f: Any, map_location: Any = None, *args: object, **options: object
        ) -> Any:
            # Of bytes in memory it is a small value of a checkpoint that others read.
            place = map_location if isinstance(f, io.BytesIO) else self._place(map_location)
            return load(f, place, *args, **options)

        ImportWatch({"safetensors.torch": self._watch}).start()

        @put_around(Optimizer, "load_state_dict")
        def taken(take: Function, optimizer: Any, state_dict: Any) -> None:
            take(optimizer, state_dict)
            # Accelerate gives each optimizer that it prepares its own state, which is empty.
            self.have_state = self.have_state or bool(state_dict["state"])

    def _watch(self, module: ModuleType) -> None:
        @put_around(module, "load_file")
        def load_file(read: Function, filename: Any, device: Any = "cpu", **options: object) -> Any:
            return read(filename, device=self._place(device), **options)

    def _place(self, asked: Any) -> Any:
        """Returns where to read to; who gives a function or a mapping has a place for each part."""
        is_one = asked is None or isinstance(asked, str | int | torch.device)
        if is_one and str(asked) == "cpu":
            return asked
        self.are_on_device = True
        return "cpu" if is_one and self._on_host else asked


def defer_state() -> None:
    """Keeps what is loaded on the host until the first step, as `Checkpointer.restore` does."""
    optimizers: Any = Optimizer
    place = Optimizer._process_value_according_to_param_policy  # torch asks it where a value goes

    @around(place)
    def placed(
        param: Tensor, value: Tensor, param_id: int, param_groups: Any, key: Any = None
    ) -> Tensor:
        if key == "step":
            return place(param, value, param_id, param_groups, key)
        on_host = moved(value, torch.device("cpu")) if is_sharded(value) else value.cpu()
        return on_host.to(param.dtype) if param.is_floating_point() else on_host

    def before_step(optimizer: Optimizer, *_: object) -> None:
        for parameter, values in optimizer.state.items():
            for key, value in values.items() if parameter.is_cuda else ():
                if key != "step" and isinstance(value, Tensor) and local_of(value).is_cpu:
                    values[key] = moved(value, local_of(parameter).device)

    optimizers._process_value_according_to_param_policy = staticmethod(placed)
    register_optimizer_step_pre_hook(before_step)


class Templates:
    """The watch over the states that torch makes for a load to fill.

    Attributes:
        are_made: Whether one was made, or would have been.
    """

    def __init__(self, before: Callable[[], None] | None, *, on_host: bool) -> None:
        """Prepares; nothing is changed until `start`.

        Args:
            before: What is called before a state is made.
            on_host: Whether it is made on the host and without a step, as `TrainState` does.
        """
        self.are_made = False
        self._before = before
        self._on_host = on_host

    def start(self) -> None:
        """Watches from now on, also where the module is imported later."""
        ImportWatch({"torch.distributed.checkpoint.state_dict": self._watch}).start()

    def _watch(self, module: ModuleType) -> None:
        # `get_state_dict` and `set_state_dict` make a state in this private function alone, and
        # have no hook for it.
        @put_around(module, "_init_optim_state")
        def made(make: Function, optim: Any, *args: object, **options: object) -> None:
            if self._before is not None:
                self._before()
            if optim.state:
                return
            if not (self._on_host and _make_on_host(optim)):
                with residency.phase(TEMPLATE):
                    make(optim, *args, **options)
            self.are_made = self.are_made or bool(optim.state)  # of plain SGD there is none


def _make_on_host(optimizer: Optimizer) -> bool:
    """Gives an optimizer the state on the host that `TrainState` loads into; says whether it has.

    `TrainState` names states by a module's parameters: here one that has only those.
    """
    from residency.integrations.dcp import TrainState

    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    if not all(isinstance(each, nn.Parameter) for each in parameters):
        return False
    module = nn.Module()
    for number, parameter in enumerate(parameters):
        module.register_parameter(f"p{number}", parameter)
    states = TrainState(module, optimizer).state_dict()["optimizer"]["state"]
    if record_of(optimizer) is None:  # an offloaded one has its own by now
        for number, parameter in enumerate(parameters):
            if f"p{number}" in states:
                optimizer.state[parameter] = states[f"p{number}"]
    return True
