"""The texts that stand in the sources."""

import ast


def literal_text(node: ast.AST, gap: str) -> str | None:
    """Returns the text of a literal, with ``gap`` for each value that is put into it; None for
    anything else.
    """
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(literal_text(each, gap) or gap for each in values)
    return None
