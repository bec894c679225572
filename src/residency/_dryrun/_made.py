"""The paths that a dry run has made, as it moves them about: what is none of them is the user's.

Loaded by its path in processes that may never import torch: nothing but the standard library.
"""

from __future__ import annotations

import os


class MadePaths:
    """The paths that a run has made, and those of its saves.

    Attributes:
        saves: Where saves are.
    """

    def __init__(self) -> None:
        """Begins with none."""
        self.saves: set[str] = set()
        self._made: set[str] = set()
        self._older: set[str] = set()  # what the run has moved into folders that it has made

    def __contains__(self, path: str) -> bool:
        """Returns whether the run has made what is there, or the folder that it is in."""
        while True:
            if path in self._older:
                return False
            if path in self._made:
                return True
            path, below = os.path.dirname(path), path
            if path == below:
                return False

    def is_itself_made(self, path: str) -> bool:
        """Returns whether the run has made what is there, by its own name."""
        return path in self._made and path not in self._older

    def add(self, path: str) -> None:
        """Takes a path as made."""
        self._older.discard(path)
        self._made.add(path)

    def put_back(self, path: str) -> None:
        """Takes what is at a path as older than the run, though not what is below."""
        self.saves.discard(path)
        self._made.discard(path)
        self._older.add(path)

    def forget(self, path: str) -> None:
        """Knows nothing any more of a path, and of those below."""
        for paths in (self.saves, self._made, self._older):
            paths -= {each for each in paths if moved(each, path, path)}

    def has_older_in(self, path: str) -> bool:
        """Returns whether the run has moved something older below a path."""
        return any(moved(each, path, path) for each in self._older)

    def all(self) -> list[str]:
        """Returns the paths by whose own names something was made."""
        return sorted(self._made - self._older)

    def move(self, source: str, target: str, *, is_folder: bool) -> bool:
        """Follows a move; a path that was left stays: no other process makes anything there.

        Returns:
            Whether the run has made what was moved.
        """
        is_made = source in self
        if is_folder:
            self.forget(target)  # what was below is gone
        for paths in (self.saves, self._made, self._older):
            if is_folder:
                paths |= {moved(each, source, target) for each in paths} - {""}
            elif source in paths:
                paths.add(target)
        if is_made:
            self.add(target)
        else:
            self._older.add(target)
        return is_made


def moved(path: str, source: str, target: str) -> str:
    """Returns where a path is after a folder's move; nothing for one outside the folder."""
    return target + path[len(source) :] if f"{path}/".startswith(f"{source}/") else ""
