"""Which way a program goes by what a dry run does not compute: random programs, known idioms."""

import random
from pathlib import Path
from typing import Any

import pytest
from tests.dryrun.processes import judged_by

HEAD = "import torch\nrounds = 0\nx = torch.randn(64, device='cuda')\n"
# Expressions that are asked for their truth: not computed, and each is true on some GPU, false on
# another.
TRUTHS = (
    "(x < 0.5).any()",
    "(x < 0.5).all()",
    "(x < 0.5).any().item()",
    "bool((x < 0.5).all())",
    "x[0] < x[1]",
    "torch.equal(x, x.flip(0))",
    "(x < 0.5).byte().any()",
)
CHECKS = (
    "assert {t}",
    "assert not {t}, 'no'",
    "assert len(x) == 64 and {t}",
    "if {t}:\n    raise ValueError('no')",
    "if not {t}:\n    print('bad')\n    raise ValueError('no')",
    "if not {t}:\n    raise ValueError('no')\nelse:\n    rounds += 0",
    "if {t}:\n    pass\nelse:\n    raise ValueError('no')",
    "def check(x):\n    if not {t}:\n        raise ValueError('no')\n"
    "for _ in range(3):\n    check(x)",
)
BOUNDED = (  # eight rounds on the card that takes most
    "for _ in range(8):\n    rounds += 1\n    if {t}:\n        break",
    "for _ in range(8):\n    rounds += 1\n    if not {t}:\n        break",
    "while rounds < 8:\n    rounds += 1\n    if {t}:\n        break",
    "def decode(x):\n    n = 0\n    for _ in range(8):\n        n += 1\n        if {t}:\n"
    "            return n\n    return n\nrounds = decode(x)",
    "while {t} and rounds < 8:\n    rounds += 1",
    "while rounds < 8 and not {t}:\n    rounds += 1",
)
UNBOUNDED = (  # one round: no bound is known
    "while {t}:\n    rounds += 1",
    "while not {t}:\n    rounds += 1",
    "while True:\n    rounds += 1\n    if {t}:\n        break",
    "while True:\n    rounds += 1\n    if not {t}:\n        break",
)
KINDS = {"check": CHECKS, "bounded": BOUNDED, "unbounded": UNBOUNDED}


def ran(folder: Path, programs: dict[str, str]) -> dict[str, Any]:
    """Returns what became of programs, all in one process."""
    for name, text in programs.items():
        (folder / f"{name}.py").write_text(text)
    return judged_by("ways.py", folder)


def test_checks_hold_and_loops_go_to_their_bound_or_make_one_round(tmp_path: Path) -> None:
    chance = random.Random(7)
    programs = {}
    for kind, shapes in KINDS.items():
        for number, shape in enumerate(shapes):
            for truth in range(len(TRUTHS)):
                if truth and chance.random() < 0.5:
                    continue
                noise = "print(x.sum().item())\n" * chance.randrange(2)
                programs[f"{kind}_{number}_{truth}"] = (
                    HEAD + noise + shape.format(t=TRUTHS[truth]) + "\n"
                )
    found = ran(tmp_path, programs)
    wrong = {}
    for name, each in found.items():
        kind = name.partition("_")[0]
        expected = {"check": 0, "bounded": 8, "unbounded": 1}[kind]
        is_said = bool(each["lines"]) == (kind != "check")
        if each["error"] or each["rounds"] != expected or not is_said:
            wrong[name] = programs[name][len(HEAD) :], each
    assert not wrong
    assert len(found) > 60


IDIOMS = {
    "best": "best = float('inf')\nfor _ in range(6):\n    loss = x.square().mean()\n"
    "    if loss.item() < best:\n        best = loss.item()\n        rounds += 1\n",
    "split": "counts = torch.bincount((x > 0).long(), minlength=8)\n"
    "parts = x.split(counts.tolist())\nrounds = len(parts)\n",
    "experts": "counts = torch.bincount((x > 0).long(), minlength=6).cpu().numpy()\n"
    "rounds = int(counts.sum())\n",
    "bins": "rounds = int(torch.histc(x, 5).sum().item())\n",
    "choice": "import numpy as np\np = torch.softmax(x, -1).double().cpu().numpy()\n"
    "rounds = len([np.random.choice(64, p=p) for _ in range(3)])\n",
    "equal": "known = torch.linspace(0, 1, 4000).cuda()\n"
    "rounds = int(torch.equal(known, torch.linspace(0, 1, 4000).cuda()))\n",
    "halting": "h = torch.zeros(32, device='cuda')\nn = torch.zeros(32, device='cuda')\n"
    "while ((h < 0.9) & (n < 8)).any():\n    h = h + torch.rand_like(h)\n    n = n + 1\n"
    "    rounds += 1\n",
}
# Of "halting" the first round follows from zeros, and one more stands for those that do not.
ROUNDS = {
    "best": 6, "split": 8, "experts": 64, "bins": 64, "choice": 3, "equal": 1, "halting": 2
}  # fmt: skip


@pytest.fixture(scope="module")
def idioms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    programs = {name: HEAD + text for name, text in IDIOMS.items()}
    return ran(tmp_path_factory.mktemp("idioms"), programs)


@pytest.mark.parametrize("name", IDIOMS)
def test_what_is_known_of_a_value_holds(name: str, idioms: dict[str, Any]) -> None:
    assert (idioms[name]["error"], idioms[name]["rounds"]) == ("", ROUNDS[name])


def test_an_even_share_of_counts_is_said(idioms: dict[str, Any]) -> None:
    assert "counts were taken as equal" in idioms["split"]["guesses"][0]


SILENT = (
    "history = []\nfor step in range(3):\n    history.append(x.sum().item())\n"
    "    if step % 2 == 0:\n        print(history[-1])\n"
    "    if len(history) > 1:\n        rounds += 1",
    "loss = x.sum()\nif torch.isnan(loss):\n    rounds += 1",
    "value = x.sum().item()\nif value > 3:\n    print('large', value)",
    "model = torch.nn.Linear(8, 8).cuda()\nif model.bias is not None:\n    rounds += 1",
)


def test_of_a_branch_that_no_such_value_decides_nothing_is_said(tmp_path: Path) -> None:
    found = ran(tmp_path, {f"silent_{i}": HEAD + text for i, text in enumerate(SILENT)})
    assert {name: each["lines"] for name, each in found.items() if each["lines"]} == {}
