"""The calls of frameworks in which memory runs out, and the integration that is there for each.

Only what an integration does about the very call is said: most errors in a framework's frames are
those of the model that it runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

_TRANSFORMERS = "residency.integrations.transformers"
_LIGHTNING = "residency.integrations.lightning"
_DCP = "residency.integrations.dcp"
_OFFLOADS = "ResidencyCallback keeps the optimizer's state on the host"


@dataclass(frozen=True, slots=True)
class _FrameworkCall:
    """A function of a framework.

    Attributes:
        module: Its module.
        function: Its name; of all functions of the module where it is empty.
        what: What it does, in the framework's terms.
        integration: The module of this package that has something against it.
        remedy: What that does.
    """

    module: str
    function: str
    what: str
    integration: str
    remedy: str


_CALLS = (
    _FrameworkCall(
        "peft.peft_model",
        "load_adapter",
        "PEFT's load_adapter",
        _TRANSFORMERS,
        "ResidencyCallback reads adapters from the host into the parameters",
    ),
    _FrameworkCall(
        "transformers.trainer",
        "_load_optimizer_and_scheduler",
        "the resumption of a Trainer of transformers",
        _TRANSFORMERS,
        "ResidencyTrainerMixin reads the optimizer's state into host memory",
    ),
    _FrameworkCall(
        "transformers.trainer",
        "evaluation_loop",
        "an evaluation of a Trainer of transformers",
        _TRANSFORMERS,
        "ResidencyCallback keeps the outputs of an evaluation on the host",
    ),
    *(
        _FrameworkCall(
            f"{name}.plugins.io.async_plugin",
            "",
            "Lightning's AsyncCheckpointIO",
            _LIGHTNING,
            "ResidencyCheckpointIO copies no checkpoint on the device",
        )
        for name in ("lightning.pytorch", "pytorch_lightning")
    ),
    _FrameworkCall(
        "torch.distributed.checkpoint.state_dict",
        "_init_optim_state",
        "torch's template step for an optimizer's state",
        _DCP,
        "TrainState loads without it",
    ),
)
# Whose optimizer steps, where the step itself ran out: the module that is innermost.
_STEPS = (
    ("transformers.trainer", "a Trainer of transformers", _TRANSFORMERS, _OFFLOADS),
    ("lightning.pytorch.trainer.trainer", "a Trainer of Lightning", _LIGHTNING, _OFFLOADS),
    ("pytorch_lightning.trainer.trainer", "a Trainer of Lightning", _LIGHTNING, _OFFLOADS),
    (
        "accelerate.optimizer",
        "accelerate",
        "residency",
        "offload_optimizer takes the result of `prepare`",
    ),
)


def integration_lines(error: BaseException) -> Iterator[str]:
    """Yields a line where an error was raised in a call that an integration is for.

    None is yielded for an integration that the process has imported: what it does is done, or not
    wanted.
    """
    frames = list(frames_of(error))
    for module, function in frames:
        for call in _CALLS:
            if call.module == module and call.function in ("", function):
                yield from _line(call.what, call.integration, call.remedy)
                return
    is_step = bool(frames) and frames[0][0].startswith("torch.optim.")
    is_ours = any(module.startswith("residency._optim") for module, _ in frames)
    if not is_step or is_ours:
        return
    modules = {module for module, _ in frames}
    for name, owner, integration, remedy in _STEPS:
        if name in modules:
            yield from _line(f"the optimizer's step of {owner}", integration, remedy)
            return


def _line(what: str, integration: str, remedy: str) -> Iterator[str]:
    if integration == "residency" or integration not in sys.modules:
        yield f"it failed in {what}: {integration}: {remedy}."


def frames_of(error: BaseException) -> Iterator[tuple[str, str]]:
    """Yields module and function of the frames that an error left, the innermost first."""
    found = []
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        found.append((str(trace.tb_frame.f_globals.get("__name__")), code.co_name))
        trace = trace.tb_next
    return reversed(found)
