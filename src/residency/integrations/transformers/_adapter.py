"""Loads PEFT's adapters host-first: a file's tensors go from the host into the parameters that are
there, and nothing of them is on the device twice.

PEFT reads an adapter onto the device that it infers, whole, beside the parameters that it is for.
Here its ``load_adapter`` is called as it is, with the host for a default; what it hands to
``load_state_dict`` in the end is compared with the model before the first byte is copied.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from residency._errors import RefusedError
from residency._memory import phase
from residency._transfer import before_write
from residency.integrations._common._framework import missing_in, named_with_version

_MOST_NAMED = 5


class HostFirst:
    """The ``load_adapter`` of one model, until `take_off`.

    It refers to the model weakly, so that it keeps nothing alive; a copy of the model gets one that
    loads into the copy.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._before: Callable[..., Any] | None = vars(model).get("load_adapter")

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self._model(), "before": self._before}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._model = weakref.ref(state["model"])
        self._before = state["before"]

    def __call__(
        self,
        model_id: Any,
        adapter_name: str,
        is_trainable: bool = False,
        torch_device: str | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Does what PEFT's method does, with the host as the device that a file is read to.

        Args:
            model_id: As PEFT's.
            adapter_name: As PEFT's.
            is_trainable: As PEFT's.
            torch_device: The device that the file is read to; the host when None.
            args: As PEFT's.
            kwargs: As PEFT's.

        Raises:
            RefusedError: The file's tensors are not those of the adapter. The model is as it was.

        Memory:
            Device: none for contiguous parameters, else one of them at a time.
        """
        model: Any = self._model()
        load = self._before or type(model).load_adapter.__get__(model)
        was_there = adapter_name in model.peft_config
        before_write(list(model.parameters()))  # a save may still be reading them
        try:
            with phase("load"), _checked(model, model_id, adapter_name):
                return load(
                    model_id, adapter_name, is_trainable, torch_device or "cpu", *args, **kwargs
                )
        except BaseException:
            if not was_there and adapter_name in model.peft_config:
                model.delete_adapter(adapter_name)  # what PEFT had made for the file
            raise

    def take_off(self) -> None:
        """Gives the model its own method back; does nothing where this is no longer on it."""
        model = self._model()
        if model is None or vars(model).get("load_adapter") is not self:
            return
        del vars(model)["load_adapter"]
        if self._before is not None:
            vars(model)["load_adapter"] = self._before


def put_on(model: Any) -> HostFirst | None:
    """Makes a PEFT model load its adapters host-first; any other model is left alone.

    Returns:
        What takes it off again; None where there is nothing to do, or nothing left to do.

    Raises:
        RefusedError: This PEFT takes no device to read to. Nothing was changed.
    """
    if not is_peft_model(model) or isinstance(vars(model).get("load_adapter"), HostFirst):
        return None
    peft: Any = sys.modules["peft"]
    if "torch_device" not in inspect.signature(peft.PeftModel.load_adapter).parameters:
        raise missing_in(
            "peft",
            "PeftModel.load_adapter(torch_device=...)",
            "install peft 0.15 or newer, or leave ResidencyCallback out",
        )
    put = HostFirst(model)
    vars(model)["load_adapter"] = put
    return put


def is_peft_model(model: object) -> bool:
    """Returns whether a model is PEFT's, without importing PEFT: then there is none."""
    return isinstance(model, peft_models())


def peft_models() -> tuple[type, ...]:
    """Returns PEFT's classes of models; none where PEFT was never imported."""
    peft: Any = sys.modules.get("peft")
    return () if peft is None else (peft.PeftModel, peft.PeftMixedModel)


@contextmanager
def _checked(model: Any, path: object, adapter: str) -> Iterator[None]:
    """Makes the model compare what it is given with what it has, for one load."""
    own: dict[str, Any] = vars(model)
    before = own.get("load_state_dict")
    load = model.load_state_dict
    is_loaded = False

    def compared(values: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal is_loaded
        # What is learned as a prompt is not in the module's state; PEFT loads it, and complains,
        # in its own way. Parameters without bytes are given some by `assign`.
        if not model.peft_config[adapter].is_prompt_learning and not kwargs.get("assign"):
            _compare(model, values, path, adapter)
        is_loaded = True
        return load(values, *args, **kwargs)

    own["load_state_dict"] = compared
    try:
        yield
    except KeyError as error:  # PEFT's, for a module of `modules_to_save` that a file lacks
        if is_loaded:
            raise
        raise _mismatch(path, adapter, [f"it lacks {error.args[0]!r}"]) from error
    finally:
        del own["load_state_dict"]
        if before is not None:
            own["load_state_dict"] = before


def _compare(model: Any, values: Mapping[str, Any], path: object, adapter: str) -> None:
    """Refuses values that have no place in the model, or another shape than it."""
    there = model.state_dict(keep_vars=True)
    problems = [
        f"{name!r} is {tuple(value.shape)} in it and {tuple(there[name].shape)} in the model"
        for name, value in values.items()
        if name in there and isinstance(value, Tensor) and value.shape != there[name].shape
    ]
    problems += [f"{name!r} is not in the model" for name in values if name not in there]
    if model.peft_config[adapter].peft_type == "LORA":
        # Of other kinds, some leave names out of their files, and PEFT knows which.
        problems += [
            f"it lacks {name!r}"
            for name in there
            if name not in values and ".lora_" in name and f".{adapter}." in f"{name}."
        ]
    if problems:
        raise _mismatch(path, adapter, problems)


def _mismatch(path: object, adapter: str, problems: list[str]) -> RefusedError:
    named = "; ".join(problems[:_MOST_NAMED])
    more = f"; and {len(problems) - _MOST_NAMED} more" * (len(problems) > _MOST_NAMED)
    return RefusedError(
        f"the adapter file in {path} does not fit the adapter {adapter!r} of the model: {named}"
        f"{more} ({named_with_version('peft')}). Nothing was changed; load it into a model with"
        " the configuration that it was saved with (adapter_config.json beside it)."
    )
