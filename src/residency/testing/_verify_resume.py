"""Proves that a resumed run goes on exactly as an uninterrupted one does."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

import residency
from residency._checkpoint import random_states
from residency._checkpoint._capture import describe
from residency._checkpoint._document import TENSOR, Encoder, kind_of
from residency._dtensor import local_of
from residency._errors import InvalidArgumentError, ResidencyError
from residency._transfer import raw_bytes


class _TwoCallCheckpointer(Protocol):
    def save(self, step: int, state: Mapping[str, Any]) -> Any: ...
    def restore(self, state: Mapping[str, object]) -> object: ...
    def wait(self) -> object: ...
    def close(self) -> object: ...


MakeRun = Callable[[], tuple[Mapping[str, Any], Callable[[int], object]]]


class ResumeError(ResidencyError, AssertionError):
    """A resumed run that differs from an uninterrupted one; the message says where first."""


@dataclass(frozen=True, slots=True)
class ResumeProof:
    """The result of a comparison of two runs.

    Attributes:
        num_tensors: How many tensors were equal, bit for bit, states of generators among them.
        num_values: How many other values were equal.
        digest: A digest of all values; the same for two runs that end at the same bits.
    """

    num_tensors: int
    num_values: int
    digest: str


def verify_resume(
    make_run: MakeRun,
    *,
    steps: int = 4,
    save_after: int | None = None,
    directory: str | Path | None = None,
    make_checkpointer: Callable[[Path], _TwoCallCheckpointer] | None = None,
) -> ResumeProof:
    """Trains without an interruption and with one, and compares every bit of the state of both.

    The uninterrupted run takes all steps and saves on its way, as training does. The resumed one is
    made anew, with other random states, restores that save and takes the steps that are left.

    Args:
        make_run: Called twice. Returns the state, as ``Checkpointer.save`` takes it, and a function
            that takes one step; it is called with the step's number, from 0. The step must not seed
            the random generators, or a resume that forgets them goes unseen.
        steps: How many steps an uninterrupted run takes.
        save_after: After how many of them it saves; half of them if None.
        directory: The directory of the save; a temporary one if None.
        make_checkpointer: Returns an object that saves and restores, for a directory; a
            ``residency.Checkpointer`` if None.

    Returns:
        The counts of the compared values, and their digest.

    Raises:
        InvalidArgumentError: There is no step before the save, or none after it.
        ResumeError: The runs differ. The message names the first value that does: right after the
            restore, if it differs already then, else at the end.

    Memory:
        On the host, two copies of the state.
    """
    save_after = steps // 2 if save_after is None else save_after
    if not 0 < save_after < steps:
        raise InvalidArgumentError(
            f"save_after is {save_after} of {steps} steps; expected at least one step before the "
            "save and one after it."
        )
    make = _default_checkpointer if make_checkpointer is None else make_checkpointer
    with tempfile.TemporaryDirectory() as temporary:
        checkpointer = make(Path(temporary if directory is None else directory))
        try:
            return _verify(make_run, checkpointer, steps, save_after)
        finally:
            checkpointer.close()


def _verify(
    make_run: MakeRun, checkpointer: _TwoCallCheckpointer, steps: int, save_after: int
) -> ResumeProof:
    state, step = make_run()
    for index in range(save_after):
        step(index)
    at_save = _read(state)
    checkpointer.save(save_after, state)
    for index in range(save_after, steps):
        step(index)
    at_end = _read(state)
    checkpointer.wait()
    del state, step
    torch.manual_seed(save_after)  # a restore that forgets the generators shows
    state, step = make_run()
    checkpointer.restore(state)
    _compare(at_save, _read(state), f"right after the restore of step {save_after}")
    for index in range(save_after, steps):
        step(index)
    return _compare(at_end, _read(state), f"after step {steps}")


def _default_checkpointer(directory: Path) -> _TwoCallCheckpointer:
    made: _TwoCallCheckpointer = residency.Checkpointer(directory)
    return made


@dataclass(frozen=True, slots=True)
class _Seen:
    tensors: dict[str, Tensor]
    values: Any


def _read(state: Mapping[str, object]) -> _Seen:
    """Returns host copies of all tensors of a state and of the generators, and all other values."""
    found = describe(state)
    generators = Encoder()
    rng = generators.node("rng", random_states())
    tensors = {}
    for name, leaf in {**found.leaves, **generators.leaves}.items():
        local = local_of(leaf.value)
        if leaf.lent is not None:
            if leaf.lent.written is not None:
                leaf.lent.written.synchronize()  # the copy home writes what is read here
            local = leaf.lent.tensor
        tensors[name] = local.detach().cpu().clone()
    found.loans.end()
    return _Seen(tensors, {"state": found.tree, "rng": rng})


def _compare(expected: _Seen, found: _Seen, when: str) -> ResumeProof:
    for name in (*expected.tensors, *found.tensors):
        there, here = expected.tensors.get(name), found.tensors.get(name)
        if there is None or here is None:
            which = "resumed" if there is None else "uninterrupted"
            raise ResumeError(f"{when}, only the {which} run has {name}.")
        if (there.dtype, there.shape) != (here.dtype, here.shape):
            raise ResumeError(
                f"{when}, {name} is {there.dtype} of shape {tuple(there.shape)} in the "
                f"uninterrupted run and {here.dtype} of shape {tuple(here.shape)} in the resumed."
            )
        left, right = (raw_bytes(t.contiguous()) for t in (there, here))
        if not torch.equal(left, right):
            index = int((left != right).nonzero()[0]) // there.element_size()
            raise ResumeError(
                f"{when}, {name} differs first, at element {index} of {there.numel()}: "
                f"{there.reshape(-1)[index].item()} in the uninterrupted run, "
                f"{here.reshape(-1)[index].item()} in the resumed. Some of its causes are not "
                "restored, or the steps are not deterministic."
            )
    values = dict(_flat("", expected.values))
    others = dict(_flat("", found.values))
    for name in (*values, *others):
        if values.get(name) != others.get(name):
            raise ResumeError(
                f"{when}, {name} is {values.get(name)!r} in the uninterrupted run and "
                f"{others.get(name)!r} in the resumed."
            )
    digest = hashlib.sha256(repr(sorted(values.items())).encode())
    for name in sorted(expected.tensors):
        digest.update(name.encode())
        digest.update(raw_bytes(expected.tensors[name].contiguous()).numpy().tobytes())
    return ResumeProof(len(expected.tensors), len(values), digest.hexdigest())


def _flat(name: str, node: Any) -> list[tuple[str, Any]]:
    """Returns the values of a document's nodes with the paths to them; `index` of a tensor, which
    an offload changes and a resumed run need not have, is no value.
    """
    if isinstance(node, Mapping):
        if kind_of(node) == TENSOR:
            return [(name, node["name"])]
        items: Any = node.items()
    elif isinstance(node, list):
        items = enumerate(node)
    else:
        return [(name, node)]
    return [pair for key, each in items for pair in _flat(f"{name}.{key}" if name else key, each)]
