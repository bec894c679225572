"""The two class trees of Lightning, ``lightning`` and ``pytorch_lightning``.

A Trainer takes plugins and callbacks of its own tree only. What this integration offers becomes,
when it is made, an instance of the classes of every tree that is imported by then; where none is,
the first that is installed is imported.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
from dataclasses import dataclass
from typing import Any

from residency.integrations._common._framework import (
    hook_in,
    load_framework,
    missing_in,
    named_with_version,
)

_MADE_OF = "_residency_made_of"


@dataclass(frozen=True, slots=True)
class Tree:
    """The modules of one class tree.

    Attributes:
        distribution: What is installed.
        trainer: The module that has the Trainer; the tree is in use once it is imported.
        fabric: The package below it.
    """

    distribution: str
    trainer: str
    fabric: str

    @property
    def checkpoint_io(self) -> Any:
        """``CheckpointIO``."""
        return _class_of(self, f"{self.fabric}.plugins", "CheckpointIO")

    @property
    def torch_checkpoint_io(self) -> Any:
        """``TorchCheckpointIO``, what a Trainer writes with when nothing is asked for."""
        return _class_of(self, f"{self.fabric}.plugins", "TorchCheckpointIO")

    @property
    def callback(self) -> Any:
        """``Callback``."""
        return _class_of(self, f"{self.trainer}.callbacks", "Callback")


TREES = (
    Tree("lightning", "lightning.pytorch", "lightning.fabric"),
    Tree("pytorch-lightning", "pytorch_lightning", "lightning_fabric"),
)


def trees_in_use() -> list[Tree]:
    """Returns the trees that are imported; where none is, imports one.

    Raises:
        ImportError: None is installed.
    """
    found = [tree for tree in TREES if tree.trainer in sys.modules]
    if not found:
        module = load_framework(*(tree.trainer for tree in TREES), extra="lightning")
        found = [tree for tree in TREES if tree.trainer == module.__name__]
    return found


def version_of(value: object) -> str:
    """Returns the distribution that a Trainer, a strategy or a class comes from, with its version.

    Where it comes from neither, these are the trees in use.
    """
    classes = value.__mro__ if isinstance(value, type) else type(value).__mro__
    roots = {each.__module__.partition(".")[0] for each in classes}
    named = [tree for tree in TREES if tree.trainer.partition(".")[0] in roots]
    return " and ".join(named_with_version(tree.distribution) for tree in named or trees_in_use())


def error_of_training() -> BaseException | None:
    """Returns the error because of which a Trainer tears down, or None where it just ends.

    An error that the caller of the Trainer is handling is none: its traceback begins elsewhere.
    """
    error = sys.exc_info()[1]
    if error is None or error.__traceback__ is None:
        return None
    module = str(error.__traceback__.tb_frame.f_globals.get("__name__"))
    return error if any(module.startswith(f"{tree.trainer}.") for tree in TREES) else None


def in_trees(kind: type, base: str, *hooks: str) -> type:
    """Returns a class with the bases that the trees in use have for it.

    Args:
        kind: The class of ours, or of a user's below it.
        base: The property of ``Tree`` that has the base.
        hooks: Names that each base must have.

    Raises:
        ImportError: No tree is installed.
        RefusedError: A tree's version lacks a hook.
    """
    bases = []
    for tree in trees_in_use():
        found = getattr(tree, base)
        for hook in hooks:
            if not callable(getattr(found, hook, None)):
                raise missing_in(
                    tree.distribution, f"{found.__name__}.{hook}", "install lightning>=2.5"
                )
        if not issubclass(kind, found):
            bases.append(found)
    return _class_with(kind, tuple(bases)) if bases else kind


@functools.cache
def _class_with(kind: type, bases: tuple[type, ...]) -> type:
    names: dict[str, Any] = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        _MADE_OF: kind,
    }
    names["__doc__"] = kind.__doc__
    return types.new_class(kind.__name__, (kind, *bases), {}, lambda body: body.update(names))


def kind_of(value: object) -> Any:
    """Returns the class that an object was asked of, for those who make another one."""
    return vars(type(value)).get(_MADE_OF, type(value))


def made_again(kind: Any) -> Any:
    """Returns an object of a class without a call of ``__init__``: what pickle starts from."""
    return kind.__new__(kind)


def _class_of(tree: Tree, module: str, name: str) -> Any:
    return hook_in(
        importlib.import_module(module),
        name,
        distribution=tree.distribution,
        remedy="install lightning>=2.5",
    )
