"""Whose doing an error is: planted cases, and random programs that no case names."""

import random
from typing import Any

import pytest
from tests.dryrun.processes import judged_by

SOURCES = (  # of one number: not computed, and known
    ("loss.item()", "known.item()"),
    ("float(loss)", "float(known)"),
    ("loss.cpu().numpy().item()", "known.cpu().numpy().item()"),
    ("loss.tolist()", "known.tolist()"),
    ("loss.detach().cpu().item()", "3.0"),
)
LINKS = (
    "{b} = {a} * 2",
    "{b} = max({a}, 0.0)",
    "{b} = [{a}, 5.0][0]",
    "rows = dict(x={a})\n{b} = rows['x']",
    "rows = {{}}\nrows['x'] = {a}\n{b} = rows['x']",
    "many = []\nmany.append({a})\n{b} = sum(many)",
    "{b} = (lambda q: q + 1)({a})",
    "def twice(q):\n    return q * 2\n{b} = twice({a})",
    "for q in [{a}]:\n    {b} = q",
    "{b}, other = {a}, 1.0",
    "{b} = 1.0\n{b} += {a}",
    "{b} = float(f'{{{a}}}')",
    "box = type('Box', (), {{}})()\nbox.kept = {a}\n{b} = box.kept",
    "print({b} := {a})",
    "{b} = sum(q for q in [{a}])",
    "{b} = 5.0\nif {a} > -1.0:\n    {b} = 6.0",
    "try:\n    {b} = {a}\nfinally:\n    print('done')",
)
ENDS = (
    "assert {a} > 1e9",
    "[][int({a})]",
    "{{}}[{a}]",
    "1 / ({a} - {a})",
    "if {a} < 1e9:\n    raise RuntimeError('too small')",
    "def check(q):\n    if q < 1e9:\n        raise ValueError('too small')\ncheck({a})",
    "with open(f'/nowhere/{{{a}}}'):\n    pass",
    "torch.save({{}}, f'/nowhere/{{{a}}}.pt')",
    "def write(path, q):\n    open(path, 'w').write(q)\nwrite(f'/nowhere/{{{a}}}', '')",
    "import pathlib\npathlib.Path(f'/nowhere/{{{a}}}').write_text('')",
)
OF_A_PATH = (  # that does not hang on the number
    "torch.save({{'q': {a}}}, '/nowhere/q.pt')",
    "def write(path, q):\n    open(path + '.txt', 'w').write(q)\nwrite('/nowhere/q', {a})",
    "import pathlib\npathlib.Path('/nowhere').joinpath('q').write_text(str({a}))",
    "import json\njson.dump({a}, open('/nowhere/q', 'w'))",
    "if {a} < 1e9:\n    name = '/nowhere/q'\n    open(name, 'w').write(str({a}))",
    "class Plot:\n    def __init__(self, q):\n        self.q = q\n    def save(self, fp, **kw):\n"
    "        open(fp, 'w').write(self.q)\nPlot({a}).save('/nowhere/q', level=1)",
)
NOISE = "noise = loss.item()\nprint(noise)\nhistory.append(noise)\n"
HEAD = (
    "import torch\nhistory = []\nknown = torch.tensor(3.0, device='cuda')\n"
    "loss = torch.randn(80, device='cuda').mean()\n"
)


def program(chance: random.Random, source: str, links: list[int], end: str) -> tuple[str, int]:
    """Returns a program that fails by a number, and the line that has read it."""
    text = HEAD + (NOISE if chance.random() < 0.5 else "")
    line = text.count("\n") + 1
    text += f"v0 = {source}\n"
    for number, link in enumerate(links):
        text += LINKS[link].format(a=f"v{number}", b=f"v{number + 1}") + "\n"
        text += NOISE if chance.random() < 0.3 else ""
    return text + end.format(a=f"v{len(links)}") + "\n", line


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, int]]:
    """Runs all cases and programs in one process; with it the lines of those not computed."""
    folder = tmp_path_factory.mktemp("programs")
    lines = {}
    for seed in range(40):
        chance = random.Random(seed)
        source = chance.choice(SOURCES)
        links = [chance.randrange(len(LINKS)) for _ in range(chance.randint(0, 5))]
        end, of_a_path = chance.choice(ENDS), chance.choice(OF_A_PATH)
        for kind, text, last in (
            ("unknown", source[0], end),
            ("known", source[1], end),
            ("path", source[0], of_a_path),
        ):
            name = f"{kind}_{seed}.py"
            written, line = program(random.Random(seed), text, links, last)
            (folder / name).write_text(written)
            lines[name] = line if kind == "unknown" else 0
    return judged_by("blame.py", folder)["cases"], lines


def test_what_the_dry_run_does_is_said_and_nothing_of_what_the_script_does(judged) -> None:
    cases = {name: found for name, found in judged[0].items() if name[:2] in ("d_", "s_")}
    wrong = {
        name: (error, said)
        for name, (error, said) in cases.items()
        if not error or bool(said) != name.startswith("d_")
    }
    assert not wrong
    assert len(cases) > 28


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("d_assert_on_the_line", "value that a dry run does not compute (1 stood for it)"),
        ("d_tensor_test", "value that a dry run does not compute (True stood for it)"),
        ("d_large_copy", "copied values to the host that a dry run does not compute, so that they"),
        ("d_simulators_object", "The dry run lacks this"),
        ("d_histc", "a kernel of the host's"),
        ("d_nvml", "A machine with a GPU has NVML"),
        ("d_nvidia_smi", "A dry run has no nvidia-smi"),
    ],
)
def test_each_kind_of_evidence_has_its_own_words(judged, name: str, said: str) -> None:
    assert said in judged[0][name][1]


def test_random_programs_that_fail_by_an_unknown_number_name_the_line_that_read_it(judged) -> None:
    cases, lines = judged
    wrong = {}
    for name, line in lines.items():
        error, said = cases[name]
        is_right = f"{name}:{line} read a value" in said if line else not said
        if not error or not is_right:
            wrong[name] = (error, said, line)
    assert not wrong


FAILING = """
import datetime, torch, torch.distributed as dist
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=60), None)
bag = torch.nn.EmbeddingBag(100_000, 64, sparse=True, padding_idx=0).cuda()
layer = torch.nn.Linear(64, 64).cuda()
optimizers = torch.optim.SparseAdam(list(bag.parameters())), torch.optim.SGD(layer.parameters())
for _ in range(3):
    x = layer(bag(torch.randint(100_000, (256, 8)).cuda()))
    loss = x[torch.rand(256, device="cuda") < 0.1].square().mean()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
assert 1 < loss.item() < 2
"""


def test_an_answer_names_masks_and_the_line_that_read_what_is_not_known(
    dry_run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    outcome = dry_run(FAILING)
    assert outcome.answer["steps"] == 2, outcome.errors
    assert outcome.phase("optimizer step")["visits"] == 2  # of both optimizers together
    assert outcome.phase("optimizer step")["at_peak"]["gradients"] >= 2048 * 64 * 4
    line = FAILING.splitlines().index("assert 1 < loss.item() < 2") + 1
    words = f"script.py:{line} read a value that a dry run does not compute (1 stood for it)"
    assert words in outcome.errors
    assert "CUDA_VISIBLE_DEVICES hides every GPU" in outcome.errors
    mask = {
        "line": "script.py:10",
        "what": "a mask was taken as all true; the figures from there are",
    }
    assert any(
        each["line"] == mask["line"] and each["what"].startswith(mask["what"])
        for each in outcome.answer["guesses"]
    )
