"""How a dry run puts functions of its own in the place of others."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


def around(
    function: Callable[..., Any], *, names: Sequence[str] = ()
) -> Callable[[_Function], _Function]:
    """Makes a function one that stands around another, and takes what that takes.

    It has names of its own for the other's first parameters: those that a caller gives by name
    arrive there.

    Args:
        function: The other one.
        names: Of its first parameters, where it is native and tells none.
    """

    def decorate(wrapper: Any) -> Any:
        pairs = zip(names or _first_names(function), _first_names(wrapper), strict=False)
        # The object of a method comes first, and never by its name.
        renamed = {their: mine for their, mine in pairs if their not in (mine, "self", "cls", "")}
        if not renamed:
            return functools.wraps(function)(wrapper)

        @functools.wraps(function)
        def called(*args: object, **options: object) -> object:
            for their, mine in renamed.items():
                if their in options:
                    options[mine] = options.pop(their)
            return wrapper(*args, **options)

        return called

    return decorate


def _first_names(function: Callable[..., Any]) -> list[str]:
    """Returns the names of the parameters that a function takes by position, "" for those that it
    takes by no name.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # it is native
        return []
    no_name, named = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    found = [each for each in parameters if each.kind in (no_name, named)]
    return [each.name if each.kind is named else "" for each in found]


def replace_method(name: str, method: Callable[..., Any]) -> None:
    """Puts a function in a method's place, for the parameters of lazy modules, too."""
    import torch  # which the command itself does without

    # Those let through only the methods in this list, which they compare by identity.
    lazy: Any = torch.nn.UninitializedParameter
    allowed = lazy._allowed_methods
    if getattr(torch.Tensor, name) in allowed:
        allowed.append(method)
    setattr(torch.Tensor, name, method)
