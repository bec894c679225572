"""Finds a framework when one of its integrations is used, and speaks of it with its version."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from residency._errors import RefusedError


def load_framework(*modules: str, extra: str = "", install: str = "") -> ModuleType:
    """Imports the first of some modules that is installed.

    Args:
        modules: Names of modules that do the same job, the preferred one first.
        extra: The extra of this package that brings the framework.
        install: What installs it, where no extra does.

    Raises:
        ImportError: None of them is installed; the message gives the line that installs one.
    """
    for name in modules:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # it is there, and something that it needs is not
    command = install or f"pip install 'residency[{extra}]'"
    raise ImportError(f"{' or '.join(modules)} is not installed; run: {command}")


def named_with_version(distribution: str) -> str:
    """Returns a distribution's name and the version that is installed, for messages."""
    try:
        return f"{distribution} {importlib.metadata.version(distribution)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{distribution} (of unknown version)"


def missing_in(distribution: str, what: str, remedy: str) -> RefusedError:
    """Returns the error for a framework whose version lacks what an integration hooks into."""
    return RefusedError(
        f"{named_with_version(distribution)} has no {what}, which this integration needs. "
        f"Nothing was changed; {remedy}."
    )


def hook_in(module: ModuleType, name: str, *, distribution: str, remedy: str) -> Any:
    """Returns what a framework's module has under a name, which an integration hooks into.

    Raises:
        RefusedError: This version has no such name; the message gives both.
    """
    try:
        return getattr(module, name)  # some frameworks import it only now
    except AttributeError as error:
        raise missing_in(distribution, f"{module.__name__}.{name}", remedy) from error


@contextlib.contextmanager
def names_of(distribution: str, *, remedy: str) -> Iterator[None]:
    """Makes an import within it that fails for want of a name say which version lacks it.

    Raises:
        ImportError: A name is not there; the message gives it and the version.
    """
    try:
        yield
    except ModuleNotFoundError:
        raise  # a module says itself what it is
    except ImportError as error:
        raise ImportError(
            f"{named_with_version(distribution)} lacks a part that this integration needs: "
            f"{error}. Nothing was changed; {remedy}.",
            name=error.name,
            path=error.path,
        ) from error
