"""Offloads the optimizer that prime-rl's ``setup_optimizer`` builds.

Prime-rl has no registry of optimizers: its trainers import one function by name, so its place is
taken there, by the script that starts the trainer. Nothing of prime-rl is imported here. Invariant,
which ``tests/integrations/test_prime_rl.py`` tries to break: if prime-rl keeps optimizer state
on the host itself, nothing is offloaded a second time.

Source: PrimeIntellect-ai/prime-rl 559b4477 (2026-08-21), ``src/prime_rl/trainer/optim``,
``trainer/ckpt.py``, and the calls in ``trainer/rl/train.py`` and ``trainer/sft/train.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

from torch.optim import Optimizer

from residency._errors import InvalidArgumentError, RefusedError
from residency._optim import OffloadedOptimizer, offload_optimizer, parse_bucket
from residency._units import parse_bytes
from residency.integrations._common._framework import missing_in, named_with_version

__all__ = ["offload_built_by"]

_Arguments = ParamSpec("_Arguments")
_Built = TypeVar("_Built")

# The arguments with which the trainers hand on what the configuration says.
_OWN_OFFLOADS = {
    "cpu_offload": "model.optim_cpu_offload",
    "full_offload_config": "model.full_offload",
}


def offload_built_by(
    setup_optimizer: Callable[_Arguments, _Built],
    *,
    resident: int | str = 0,
    bucket: int | str | None = None,
    slots: int = 3,
    master_weights: bool = False,
) -> Callable[_Arguments, _Built]:
    """Wraps prime-rl's ``setup_optimizer`` so that its optimizer is offloaded and primed.

    Primed, so that neither a save nor a resume takes a step with zero gradients to find out the
    form of the state. Both forms of the function are known: a pair of the optimizer and a
    manager of gradients (since 2026-08-15, #3234), and the optimizer alone.

    Args:
        setup_optimizer: The function, as the trainer's module has it.
        resident: As in ``residency.offload_optimizer``.
        bucket: As there.
        slots: As there.
        master_weights: As there.

    Returns:
        A function with the same arguments and the same result as prime-rl's: the optimizer
        is the same object. It raises ``RefusedError``, before anything is built, if the
        configuration asks for an offload of prime-rl's own, and the errors of
        ``offload_optimizer``.

    Raises:
        InvalidArgumentError: It is no function, or a size does not parse.
    """
    if not callable(setup_optimizer):
        raise InvalidArgumentError(
            f"offload_built_by got {setup_optimizer!r}; expected prime-rl's function: "
            "trainer.setup_optimizer = offload_built_by(trainer.setup_optimizer)."
        )
    parse_bytes(resident, name="resident")  # now, and not after minutes of loading a model
    parse_bucket(bucket)

    @functools.wraps(setup_optimizer)
    def setup_offloaded(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Built:
        _refuse_own_offloads(kwargs)
        built = setup_optimizer(*args, **kwargs)
        optimizer = offload_optimizer(
            _optimizer_in(built),
            resident=resident,
            bucket=bucket,
            slots=slots,
            master_weights=master_weights,
        )
        cast(OffloadedOptimizer, optimizer).prime()
        return built

    return setup_offloaded


def _refuse_own_offloads(given: dict[str, object]) -> None:
    for argument, setting in _OWN_OFFLOADS.items():
        if given.get(argument) not in (None, False):
            raise RefusedError(
                f"prime-rl's {setting} is on, with which it keeps optimizer state on the host "
                f"itself. Nothing was built: set {setting} = false in the trainer's "
                "configuration, or leave its setup_optimizer as it is."
            )


def _optimizer_in(built: object) -> Optimizer:
    """Returns the optimizer that is to be offloaded.

    Raises:
        RefusedError: Prime-rl has offloaded it, or this is another prime-rl.
    """
    optimizer, manager = built if isinstance(built, tuple) and len(built) == 2 else (built, None)
    if isinstance(optimizer, Optimizer) and manager is None:
        return optimizer
    if isinstance(getattr(optimizer, "base_optimizer", None), Optimizer) or manager is not None:
        raise RefusedError(
            f"{named_with_version('prime-rl')} built a {type(optimizer).__name__}, which keeps "
            "optimizer state or gradients on the host itself. It was left alone: set "
            f"{' and '.join(_OWN_OFFLOADS.values())} to false."
        )
    raise missing_in(
        "prime-rl",
        "setup_optimizer that returns a torch.optim.Optimizer, alone or with a manager of "
        f"gradients, but one that returns a {type(built).__name__}",
        "use a prime-rl of 2026-04 to 2026-08, or offload the optimizer once it is built",
    )
