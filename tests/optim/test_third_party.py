"""Optimizers of other packages: outcomes that docs/reference/optimizers.md names, tried again."""

import functools
import importlib
import importlib.metadata
import re
from pathlib import Path

import pytest
import torch

import residency

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "optimizers.md"
LARGE = ((96, 64), (33,), (128, 40), (5000,), (16, 16))
CASES = [
    *(("pytorch_optimizer", name, "whole") for name in ("ADOPT", "AdamP", "CAME", "Lion", "MARS")),
    *(("pytorch_optimizer", name, "whole") for name in ("SM3", "Adan", "StableAdamW", "Tiger")),
    ("pytorch_optimizer", "AdamS", "refused: couples the parameters"),
    ("pytorch_optimizer", "Prodigy", "refused: couples the parameters"),
    ("pytorch_optimizer", "Ranger21", "refused: couples the parameters"),
    ("pytorch_optimizer", "Gravity", "refused: draws random numbers"),
    ("pytorch_optimizer", "MADGRAD", "refused: keeps state for other parameters"),
    ("pytorch_optimizer", "SPAM", "refused: holds another optimizer"),
    ("lion_pytorch", "Lion", "whole"),
    ("schedulefree", "AdamWScheduleFree", "whole"),
    ("schedulefree", "RAdamScheduleFree", "whole"),
    ("schedulefree", "SGDScheduleFree", "whole"),
    ("bitsandbytes", "AdamW", "whole"),
    ("bitsandbytes", "AdamW8bit", "whole"),
    ("bitsandbytes", "PagedAdamW", "refused: paged"),
    ("torchao", "_AdamW", "whole"),
    ("torchao", "AdamW8bit", "refused: its state is a tensor subclass"),
]
WORDS = {
    "refused: couples the parameters": "so it cannot be stepped in parts|couples the parameters",
    "refused: keeps state for other parameters": "keeps state for other parameters",
    "refused: its state is a tensor subclass": "a subclass of torch.Tensor",
    "refused: paged": "it is paged",
}
MODULES = {"bitsandbytes": "bitsandbytes.optim", "torchao": "torchao.optim"}
SETTINGS = {"Ranger21": {"num_iterations": 100}}
whole = [case for case in CASES if case[2] == "whole"]
refused = [case for case in CASES if case[2] != "whole"]


@pytest.fixture(autouse=True)
def eager():
    """Runs what torchao compiles as it is written: the compiler takes a quarter of a minute."""
    with torch.compiler.set_stance("force_eager"):
        yield


def build(package, name, parameters):
    cls = getattr(importlib.import_module(MODULES.get(package, package)), name)
    make = functools.partial(cls, **SETTINGS.get(name, {}))
    optimizer = make([{"params": parameters[:3]}, {"params": parameters[3:]}])
    if package == "schedulefree":
        optimizer.train()
    return optimizer


def rows():
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 3:
            yield *cells[:2], re.findall(r"`(\w+)`", cells[2])


@pytest.mark.parametrize(("package", "name", "outcome"), whole)
def test_an_optimizer_that_streams_is_equal_bit_for_bit(lab, package, name, outcome):
    results = []
    for is_offloaded in (False, True):
        parameters = lab.parameters(shapes=LARGE)
        optimizer = build(package, name, parameters)
        if is_offloaded:
            residency.offload_optimizer(optimizer, bucket=20_000, slots=2)
        lab.take_steps(optimizer, parameters, range(7))
        if package == "schedulefree":
            optimizer.eval()
            optimizer.train()
            lab.take_steps(optimizer, parameters, range(7, 9))
            optimizer.eval()
        results.append(lab.read(optimizer, parameters))
    assert optimizer.statistics().home_bytes > 0
    lab.assert_equal(*results)


@pytest.mark.parametrize(("package", "name", "outcome"), refused)
def test_an_optimizer_that_is_refused_says_why_and_is_as_before(lab, package, name, outcome):
    words = WORDS.get(outcome, outcome.removeprefix("refused: "))
    parameters = lab.parameters(shapes=LARGE)
    optimizer = build(package, name, parameters)
    cls, before = type(optimizer), dict(vars(optimizer))
    with pytest.raises(residency.RefusedError, match=words):
        residency.offload_optimizer(optimizer)
    assert type(optimizer) is cls
    assert vars(optimizer).keys() == before.keys()
    assert all(vars(optimizer)[key] is value for key, value in before.items())


@pytest.mark.parametrize(("package", "name", "outcome"), CASES)
def test_the_page_says_what_is_tried_here(package, name, outcome):
    version = importlib.metadata.version(package)
    assert any(
        row == f"{package} {version}" and says.startswith(outcome) and name in names
        for row, says, names in rows()
    )
