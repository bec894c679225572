"""Which way a program goes by what a dry run does not compute: random programs, known idioms."""

import random
from pathlib import Path
from typing import Any

import pytest
from tests.dryrun.processes import judged_by

HEAD = (
    "import torch, types\nlimits = types.SimpleNamespace(most=1)\nrounds = 0\n"
    "x = torch.randn(128, device='cuda')[:64]\n"
)
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
    # Of numbers that Python compares: the usual 1 answers some of them otherwise.
    "x.argmax().item() == 1",
    "x.argmax().item() != 1",
    "x.argmax().item() == 2",
    "x.sum().item() > 1.5 * 0.01",
    "float(x.sum()) <= -3",
    "0.5 >= x[3].item()",
    "int(x.argmax()) < limits.most",
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
NAMED = (  # the number has a name before it is compared
    "for _ in range(8):\n    rounds += 1\n    kl = x.mean().item()\n"
    "    if kl > 0.015:\n        break",
    "def decode(end):\n    for n in range(1, 9):\n        token = int(x.argmax())\n"
    "        if token == end:\n            break\n    return n\nrounds = decode(1)",
    "def decode(end=2):\n    for n in range(1, 9):\n        token = x.argmax().item()\n"
    "        if token != end:\n            return n\n    return n\nrounds = decode()",
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


def test_a_branch_of_a_library_is_said_where_the_library_asks(tmp_path: Path) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    library = "def count(ids):\n    if (ids[:, -1] == 0).all():\n        return 1\n    return 2\n"
    (folder / "packed.py").write_text(library)
    call = f"import sys\nsys.path.insert(0, {str(folder)!r})\nimport packed\nrounds = packed.count"
    programs = {
        "known": f"{call}(torch.arange(4096, device='cuda').expand(2, -1))\n",
        "unknown": f"{call}(x.long().expand(2, -1))\n",
    }
    found = ran(tmp_path, {name: HEAD + text for name, text in programs.items()})
    assert {name: each["lines"] for name, each in found.items()} == {"known": [], "unknown": [2]}


def test_a_number_that_has_a_name_is_compared_so_that_a_loop_goes_to_its_bound(
    tmp_path: Path,
) -> None:
    programs = {str(number): HEAD + text + "\n" for number, text in enumerate(NAMED)}
    found = ran(tmp_path, programs)
    assert {name: (each["error"], each["rounds"]) for name, each in found.items()} == dict.fromkeys(
        programs, ("", 8)
    )


DRAWS = {  # each is so on every card
    "whole": "n = torch.randint(12, 17, (1,), device='cuda').item()\nassert 12 <= n <= 16, n",
    "only": "assert torch.randint(0, 1, (1,), device='cuda').item() == 0",
    "share": "skipped = sum(torch.rand(1, device='cuda').item() > 0.9 for _ in range(200))\n"
    "assert 2 < skipped < 60, skipped",
    "uniform": "s = int(torch.empty(1, device='cuda').uniform_(96, 160).item())\n"
    "assert 96 <= s < 160, s",
    "coin": "while torch.randint(0, 2, (), device='cuda').item():\n    pass",
    "order": "for n in (3, 1000, 5000):\n    p = torch.randperm(n, device='cuda')\n"
    "    assert sorted(p.tolist()) == list(range(n))",
    "generator": "g = torch.Generator('cuda').manual_seed(3)\n"
    "a = torch.randint(0, 10**6, (3,), device='cuda', generator=g).tolist()\n"
    "g.manual_seed(3)\n"
    "assert a == torch.randint(0, 10**6, (3,), device='cuda', generator=g).tolist()",
    "host": "torch.manual_seed(1)\na = torch.rand(1).item()\ntorch.manual_seed(1)\n"
    "torch.randint(0, 9, (4,), device='cuda').tolist()\nassert a == torch.rand(1).item()",
}
SHARES = (
    "x.softmax(-1)",
    "x.softmax(-1).double()",
    "torch.log_softmax(x, -1).exp()",
    "x.exp() / x.exp().sum(-1, keepdim=True)",
    "x / x.sum()",
    "torch.nn.functional.normalize(x.abs(), p=1, dim=-1)",
    "x.expand(3, 64).softmax(-1).mean(0)",
    "x.softmax(-1) * 0.5 + x.softmax(-1) / 2",
)
COUNTS = (
    "(ids != 0).sum()",
    "(ids != 7).sum(1).max()",
    "(x.expand(4, 64) > 0).sum(1).max()",
    "(x > 0).count_nonzero()",
    "(ids != 0).long().sum(-1).max()",
    "(ids != 0).sum(1).amax()",
)


def test_draws_shares_and_counts_are_such_as_a_card_may_have(tmp_path: Path) -> None:
    programs = {f"draw_{name}": HEAD + text + "\n" for name, text in DRAWS.items()}
    for number, share in enumerate(SHARES):
        programs[f"share_{number}"] = (
            f"{HEAD}import numpy\nrounds = {number}\n"
            f"numpy.random.choice(64, p=({share}).cpu().numpy().astype('f8'))\n"
        )
    for number, count in enumerate(COUNTS):
        programs[f"count_{number}"] = (
            f"{HEAD}ids = x.expand(4, 64).argsort(-1)\nn = {count}.item()\n"
            "assert n == 64 or (ids != 0).sum().item() == n == 256, n\n"
        )
    found = ran(tmp_path, programs)
    assert {name: each["error"] for name, each in found.items() if each["error"]} == {}
    for name, each in found.items():
        if name.startswith("count"):
            assert any("mask" in guess for guess in each["guesses"]), name
    assert any("drawn" in guess for guess in found["draw_only"]["guesses"])
