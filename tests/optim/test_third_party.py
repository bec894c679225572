"""Classes of optimizers, of torch and of other packages: what docs/reference/optimizers.md says of
each is tried again, with a save and a restore in the middle, and with `eval()` and `train()`."""

import functools
import importlib
import importlib.metadata
import importlib.util
import re
from pathlib import Path

import pytest
import torch

import residency

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "optimizers.md"
LARGE = ((96, 64), (33,), (128, 40), (5000,), (16, 16))
# The first tier tries these of each package, `make test-all` all that the page names.
FIRST = {
    "torch.optim": {"AdamW", "Adafactor"},
    "pytorch_optimizer": {
        *("ADOPT", "AdamP", "CAME", "Lion", "MARS", "SM3", "Adan", "StableAdamW", "Tiger"),
        *("ScheduleFreeAdamW", "ScheduleFreeRAdam", "ScheduleFreeSGD", "Amos", "AggMo"),
        *("AdamS", "Prodigy", "Ranger21", "Gravity", "MADGRAD", "SPAM"),
    },
    "lion_pytorch": {"Lion"},
    "schedulefree": {"AdamWScheduleFree", "RAdamScheduleFree", "SGDScheduleFree"},
    "bitsandbytes": {"AdamW", "AdamW8bit", "PagedAdamW"},
    "torchao": {"_AdamW", "AdamW8bit"},
}


def rows():
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 3 and cells[0] not in ("package", "---"):
            package, _, version = cells[0].partition(" ")
            for name in re.findall(r"`(\w+)`", cells[2]):
                yield package, version, name, cells[1]


def cases(*outcomes):
    """Returns the classes of the page whose package is here, those of these outcomes."""
    return [
        pytest.param(
            package,
            name,
            outcome,
            marks=[] if name in FIRST.get(package, ()) else pytest.mark.whole,
            id=f"{package}-{name}",
        )
        for package, _, name, outcome in rows()
        if outcome.startswith(outcomes) and importlib.util.find_spec(package.split(".")[0])
    ]


WORDS = {
    "refused: couples the parameters": "so it cannot be stepped in parts|couples the parameters",
    "refused: keeps state for other parameters": "keeps state for other parameters",
    "refused: its state is a tensor subclass": "a subclass of torch.Tensor",
    "refused: paged": "it is paged",
    "refused: is no torch.optim.Optimizer": "expected a torch.optim.Optimizer.*pass its .base",
    "refused": "cannot be offloaded: it ",
}
MODULES = {"bitsandbytes": "bitsandbytes.optim", "torchao": "torchao.optim"}
SETTINGS = {
    "LARS": {"lr": 1e-2, "momentum": 0.9},
    "Ranger21": {"num_iterations": 100},
    "SGD": {"lr": 0.01, "momentum": 0.9},
    "SpectralSphere": {"solver_max_iterations": 2, "power_iteration_steps": 2},
}
ONLY_MATRICES = {
    ("torch.optim", "Muon"),
    ("pytorch_optimizer", "Shampoo"),  # the root of a matrix as wide as a vector is long
}
SMALL = ((16, 8), (8, 8), (7, 5), (12, 6))  # for who searches each matrix for its factor, minutes
ONLY_SMALL = {("pytorch_optimizer", "SpectralSphere")}
HAVE_ANOTHER = {"Lookahead", "Magma", "ScheduleFreeWrapper"}
NAMES_MATRICES = {"AdaGO", "AdaMuon", "Muon", "MuonClip", "NorMuon"}  # of pytorch_optimizer


@pytest.fixture(autouse=True)
def eager():
    """Runs what torchao compiles as it is written: the compiler takes a quarter of a minute."""
    with torch.compiler.set_stance("force_eager"):
        yield


def build(lab, package, name):
    shapes = lab.matrices if (package, name) in ONLY_MATRICES else LARGE
    parameters = lab.parameters(shapes=SMALL if (package, name) in ONLY_SMALL else shapes)
    groups = [{"params": parameters[:3]}, {"params": parameters[3:]}]
    if package == "pytorch_optimizer" and name in NAMES_MATRICES:
        matrices = [p for p in parameters if p.dim() == 2]
        others = [p for p in parameters if p.dim() != 2]
        groups = [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]
    if name in HAVE_ANOTHER:
        groups = torch.optim.AdamW(groups)
    if name == "LBFGS":
        groups = parameters
    cls = getattr(importlib.import_module(MODULES.get(package, package)), name)
    return functools.partial(cls, **SETTINGS.get(name, {}))(groups), parameters


def call(optimizer, method):
    if callable(getattr(optimizer, method, None)):
        getattr(optimizer, method)()


def trained(lab, package, name, *, offload=False, folder=None):
    """Returns the ends of a run, which is saved and resumed with fresh objects where the class'
    state can be saved."""
    optimizer, parameters = build(lab, package, name)
    if offload:
        residency.offload_optimizer(optimizer, bucket=20_000, slots=2)
    call(optimizer, "train")
    lab.take_steps(optimizer, parameters, range(4))
    call(optimizer, "eval")
    state = {"model": torch.nn.ParameterList(parameters), "optimizer": optimizer}
    if folder is not None and is_saved(folder, state):
        optimizer, parameters = build(lab, package, name)
        if offload:
            residency.offload_optimizer(optimizer, bucket=20_000, slots=2)
        state = {"model": torch.nn.ParameterList(parameters), "optimizer": optimizer}
        with residency.Checkpointer(folder) as checkpointer:
            checkpointer.restore(state)
    call(optimizer, "train")
    lab.take_steps(optimizer, parameters, range(4, 7))
    call(optimizer, "eval")
    return lab.read(optimizer, parameters)


def is_saved(folder, state):
    with residency.Checkpointer(folder) as checkpointer:
        try:
            checkpointer.save(1, state).wait()
        except residency.RefusedError:  # objects that some classes keep in their state or groups
            return False
    return True


@pytest.mark.parametrize(("package", "name", "outcome"), cases("cut", "whole"))
def test_a_class_that_streams_has_the_plain_ones_bits_saved_and_resumed(
    lab, tmp_path, package, name, outcome
):
    stock = trained(lab, package, name)
    lab.assert_equal(stock, trained(lab, package, name, folder=tmp_path / "plain"))
    lab.assert_equal(stock, trained(lab, package, name, offload=True, folder=tmp_path / "offload"))


@pytest.mark.parametrize(("package", "name", "outcome"), cases("refused"))
def test_a_class_that_is_refused_says_why_and_is_as_before(lab, package, name, outcome):
    reason = next((w for o, w in WORDS.items() if outcome.startswith(o) and o != "refused"), None)
    words = reason or WORDS.get(outcome, outcome.removeprefix("refused: "))
    optimizer, _ = build(lab, package, name)
    cls, before = type(optimizer), dict(vars(optimizer))
    with pytest.raises((residency.RefusedError, residency.InvalidArgumentError), match=words):
        residency.offload_optimizer(optimizer)
    assert type(optimizer) is cls
    assert vars(optimizer).keys() == before.keys()
    assert all(vars(optimizer)[key] is value for key, value in before.items())


def test_the_page_names_the_versions_that_are_tried_here():
    for package, version, _, _ in rows():
        if package != "torch.optim" and importlib.util.find_spec(package):
            assert importlib.metadata.version(package) == version
