"""Random programs over whole numbers and truth values, as a batch has them, and what they read.

A program is a list of lines, each ``v3 = torch.cat([v1, v2], 0)``, a write to a part of a tensor,
or ``say(v3.tolist())``. Stock torch runs each line while the program is drawn: a line that it
refuses is dropped. ``D`` is the device.
"""

from __future__ import annotations

import hashlib
import random
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

# The documented limits of values that dry mode knows.
MOST_BYTES = 4 << 20
MOST_FRACTIONS = 1024
# Of a tensor of a program here: the places of all its numbers, in four dimensions, are known, too.
MOST_NUMBERS = 130_000
MOST_VALUE = 1 << 40  # far from where kernels disagree about conversions

# A line may make fractions on its way, of which dry mode knows few.
FRACTIONS = re.compile(r"float\(\)|double|isclose|logsumexp| / |mean")
NAME = re.compile(r"\bv\d+\b")
KINDS = {torch.bool: "b", torch.int64: "i", torch.int32: "i", torch.uint8: "i", torch.int16: "i"}


# Why no program has a line with a pattern: a dry run answers it wrong, and does not say so.
LEFT_OUT = [("a shift of truth values is an error that stock torch does not have", ">> 1|<< 1")]


def short(value: Any) -> str:
    """Writes what a program read, a long text by its beginning and its hash."""
    text = repr(value)
    if len(text) <= 160:
        return text
    return f"{text[:100]}... {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@dataclass
class Read:
    """One value that a program read, and the lines that it follows from."""

    line: int
    value: str
    is_known: bool
    lines: set[int]


@dataclass
class Stock:
    """Runs lines with stock torch and follows what each value depends on."""

    space: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    _from: dict[str, set[int]] = field(default_factory=dict)
    _unknown: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._said: list[str] = []
        self.space |= {"torch": torch, "D": "cpu", "seeded": seeded}
        self.space["say"] = lambda value: self._said.append(short(value))

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: each for name, each in self.space.items() if NAME.fullmatch(name)}

    def run(self, line: str) -> bool:
        """Runs one line; says no, and forgets it, if stock torch refuses it or it is too large."""
        target = line.split(" = ")[0] if re.match(r"v\d+ = ", line) else ""
        used = [name for name in NAME.findall(line) if name != target]
        if any(name not in self.space for name in used):
            return False
        if any(re.search(pattern, line) for _, pattern in LEFT_OUT):
            return False
        said = len(self._said)
        try:
            with warnings.catch_warnings(action="ignore"):
                exec(line, self.space)
            assert not target or is_small(self.space[target])
        except (RuntimeError, IndexError, ValueError, TypeError, AssertionError):
            self.space.pop(target, None)
            del self._said[said:]
            return False
        number = len(self.lines)
        self.lines.append(line)
        origin = {number}.union(*(self._from[name] for name in used))
        unknown = any(name in self._unknown for name in used)
        if FRACTIONS.search(line):
            unknown |= any(self.space[name].numel() > MOST_FRACTIONS for name in used)
        if len(self._said) > said:
            self.reads.append(Read(number, self._said[-1], not unknown, origin))
        elif target:
            self._note(target, origin, unknown)
        elif used:
            changed = self.space[used[0]].untyped_storage().data_ptr()
            for name, each in self.tensors().items():
                if each.untyped_storage().data_ptr() == changed:
                    self._note(name, origin | self._from[name], unknown or name in self._unknown)
        return True

    def _note(self, name: str, origin: set[int], unknown: bool) -> None:
        each = self.space[name]
        self._from[name] = origin
        fractions = each.is_floating_point() and each.numel() > MOST_FRACTIONS
        if unknown or fractions or each.numel() * each.itemsize > MOST_BYTES:
            self._unknown.add(name)


def is_small(made: Any) -> bool:
    """Whether a tensor is small, and its numbers are such that all kernels agree about them."""
    if not isinstance(made, torch.Tensor) or made.numel() > MOST_NUMBERS:
        return False
    if made.dtype == torch.bool or not made.numel():
        return True
    return bool(made.isfinite().all()) and bool((made.double().abs() <= MOST_VALUE).all())


class Draw:
    """Draws lines of one program: the operands are values that it has already."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.stock = Stock()
        self.batch = chance.choice([1, 2, 3, 4, 8])
        self.length = chance.choice([1, 2, 5, 16, 33, 77, 128, 333, 512])

    def of(self, kinds: str = "ib", dims: int = 0, most: int = MOST_NUMBERS) -> str:
        """Draws a tensor of some kinds; raises ``IndexError`` if there is none."""
        fitting = [
            name
            for name, each in self.stock.tensors().items()
            if KINDS.get(each.dtype, "f") in kinds and each.dim() >= dims and each.numel() <= most
        ]
        late = fitting[-6:]
        return self.chance.choice(late if self.chance.random() < 0.7 else fitting)

    def tensor(self, name: str) -> torch.Tensor:
        found: torch.Tensor = self.stock.space[name]
        return found

    def like(self, name: str, kinds: str = "ib") -> str:
        """Draws a tensor that may stand beside another one, or a number."""
        shape = self.tensor(name).shape
        same = [
            other
            for other, each in self.stock.tensors().items()
            if each.shape == shape and KINDS.get(each.dtype, "f") in kinds
        ]
        pick = self.chance.random()
        if same and pick < 0.6:
            return self.chance.choice(same)
        return self.of(kinds) if pick < 0.8 else str(self.number())

    def number(self) -> int:
        return self.chance.choice([0, 1, 1, 2, 3, 5, 7, -1, -100, self.length, self.length // 2])

    def dim(self, name: str) -> int:
        dims = self.tensor(name).dim()
        return self.chance.randrange(-dims, dims)

    def part(self, name: str) -> str:
        """Draws an index: numbers, slices with steps, ``None`` and an ellipsis."""
        words = []
        for size in self.tensor(name).shape[: self.chance.randint(1, 3)]:
            start = self.chance.randint(0, size)
            forms = [":", f"{start}:", f":{start}", f"{start}:{self.chance.randint(start, size)}"]
            forms += ["::2", f"-{start + 1}:", "None, :", *([str(self.chance.randrange(size))] * 2)]
            words.append(self.chance.choice(forms if size else [":"]))
        if self.chance.random() < 0.15:
            words.insert(0, "...")
        return ", ".join(words) or "..."

    def shape(self) -> str:
        b, t = self.batch, self.length
        forms = [f"({b},)", f"({t},)", f"({b}, {t})", f"({b}, {t})", f"({b}, 1, {t})"]
        forms += [f"({t}, {t})", f"({b}, {t}, 3)", f"({b}, 2, {t})", "()", f"({b * t},)"]
        return self.chance.choice(forms)

    def kind(self, kinds: str = "ib") -> str:
        names = {"i": ["int64", "int64", "int32"], "b": ["bool"], "f": ["float32"]}
        return "torch." + self.chance.choice(names[self.chance.choice(kinds)])

    def indices(self, size: int, most: int = 4096) -> str:
        """Draws an expression of a tensor with valid places of a dimension."""
        return f"({self.of('i', dims=1, most=most)}.flatten() % {max(size, 1)}).long()"


@dataclass(frozen=True)
class Operator:
    name: str
    write: Callable[[Draw], str]


def program(chance: random.Random, operators: list[Operator], reads: list[Operator]) -> Stock:
    """Draws a program: sources, then operators, and a read after each few of them."""
    draw = Draw(chance)
    wanted = chance.randint(3, 14)
    sources = [each for each in operators if each.name == "source"]
    for tried in range(20 * wanted):
        if len(draw.stock.lines) - len(draw.stock.reads) >= wanted:
            break
        few = len(draw.stock.tensors()) < 3
        try:
            text = chance.choice(sources if few else operators).write(draw)
        except (IndexError, ValueError):  # it needs a tensor that the program does not have
            continue
        writes = text.startswith("!")
        if not draw.stock.run(text[1:] if writes else f"v{tried} = {text}"):
            continue
        if chance.random() < 0.4:
            read(draw, reads)
    for _ in range(3):
        read(draw, reads)
    return draw.stock


def read(draw: Draw, reads: list[Operator]) -> None:
    try:
        text = draw.chance.choice(reads).write(draw)
    except (IndexError, ValueError):
        return
    draw.stock.run(f"say({text})")
