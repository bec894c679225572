"""The tree of errors is what its docstring draws."""

import re

import pytest

from residency import _errors
from residency._errors import ResidencyError

_DRAWN = re.compile(r"^( *(?:│ +)*(?:[├└]── )?)(\w+)(?: \((\w+)\))?(?:  .*)?$")


def drawn_tree(text: str) -> dict[str, tuple[str | None, str | None]]:
    """Returns, for each class that the text draws, its parent and its builtin."""
    tree: dict[str, tuple[str | None, str | None]] = {}
    path: list[tuple[int, str]] = []
    for line in text.splitlines():
        match = _DRAWN.match(line)
        if match is None or not match[2].endswith("Error"):
            continue
        depth = len(match[1])
        path = [(other, name) for other, name in path if other < depth]
        tree[match[2]] = (path[-1][1] if path else None, match[3])
        path.append((depth, match[2]))
    return tree


def real_tree() -> dict[str, tuple[str | None, str | None]]:
    tree: dict[str, tuple[str | None, str | None]] = {}
    for name, value in vars(_errors).items():
        if not (isinstance(value, type) and issubclass(value, ResidencyError)):
            continue
        ours = [base.__name__ for base in value.__bases__ if issubclass(base, ResidencyError)]
        builtins = [base.__name__ for base in value.__bases__ if base.__module__ == "builtins"]
        builtin = builtins[0] if ours and builtins else None
        tree[name] = (ours[0] if ours else None, builtin)
    return tree


def test_the_drawn_tree_is_the_tree_of_classes() -> None:
    assert drawn_tree(_errors.__doc__ or "") == real_tree()


def test_a_tree_that_is_drawn_wrongly_is_noticed() -> None:
    text = (_errors.__doc__ or "").replace("InvalidArgumentError (ValueError)", "OtherError")
    assert drawn_tree(text) != real_tree()


@pytest.mark.parametrize("name", sorted(real_tree()))
def test_every_error_is_a_residency_error_with_a_docstring(name: str) -> None:
    error = getattr(_errors, name)
    assert issubclass(error, ResidencyError)
    assert error.__doc__


def test_a_warning_points_at_the_line_that_called_into_the_package() -> None:
    names = {"__name__": "residency._inner._module", "warn": _errors.warn}
    exec(compile("def inner(): warn('found')\ndef outer(): inner()", "module.py", "exec"), names)
    with pytest.warns(UserWarning, match="found") as caught:
        names["outer"]()
    (warning,) = caught
    assert warning.filename == __file__
