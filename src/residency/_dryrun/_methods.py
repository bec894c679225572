"""How a dry run puts functions of its own in the place of others."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

Function = Callable[..., Any]  # another's, of which a dry run knows no more
_Function = TypeVar("_Function", bound=Function)


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
    return lambda wrapper: _standing(function, wrapper, (), names)


def put_around(owner: Any, name: str) -> Callable[[_Function], _Function]:
    """Puts a function around another one and in its place: it gets the other one, and then what
    that takes, as with `around`.

    Args:
        owner: The module or the class that has the other one.
        name: Its name there.
    """

    def decorate(wrapper: _Function) -> _Function:
        inner = getattr(owner, name)
        setattr(owner, name, _standing(inner, wrapper, (inner,), ()))
        return wrapper

    return decorate


def _standing(function: Any, wrapper: Any, before: tuple[Any, ...], names: Sequence[str]) -> Any:
    """Returns a function as it stands around another, which is given what comes before."""
    firsts = _first_names(wrapper)[len(before) :]
    pairs = zip(names or _first_names(function), firsts, strict=False)
    # The object of a method comes first, and never by its name.
    renamed = {their: mine for their, mine in pairs if their not in (mine, "self", "cls", "")}
    if not renamed and not before:
        return functools.wraps(function)(wrapper)

    @functools.wraps(function)
    def called(*args: object, **options: object) -> object:
        for their, mine in renamed.items():
            if their in options:
                options[mine] = options.pop(their)
        return wrapper(*before, *args, **options)

    return called


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
