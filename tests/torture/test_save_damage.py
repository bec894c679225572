"""Random bytes of published saves are changed: each change is found, and an older save restored."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from random_states import Bag, bits, digest
from torch import nn

import residency

KNOWN = {
    "unnamed": True,  # a damaged header's warning and error name the file, but not the save
}

Judge = Callable[[random.Random], None]
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")


@pytest.fixture(params=["disk", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "disk":
        yield tmp_path
        return
    shared = Path("/dev/shm") / f"residency-damage-{os.getpid()}"
    shared.mkdir()
    yield shared
    shutil.rmtree(shared)


def damage(chance: random.Random, save: Path) -> str:
    """Changes one file of a save; says how."""
    file = chance.choice(sorted(save.iterdir()))
    content = bytearray(file.read_bytes())
    kind = chance.choice(["flip", "flip", "flip", "cut", "extend", "zeros", "remove", "swap"])
    if kind == "remove" and file.name == "manifest.json":
        kind = "flip"  # without it the directory is no save, as the format says
    at = chance.randrange(len(content))
    if chance.random() < 0.3:
        at = chance.choice([0, 1, 7, 8, len(content) - 1, min(4096, len(content) - 1)])
    said = f"{kind} at {at} of {len(content)} bytes of {file.name}"
    if kind == "flip":
        content[at] ^= 1 << chance.randrange(8)
    elif kind == "cut":
        del content[at:]
    elif kind == "extend":
        content += bytes(chance.randint(1, 5000))
    elif kind == "zeros":
        before = bytes(content)
        content[at : at + 512] = bytes(len(content[at : at + 512]))
        if before == bytes(content):
            content[at] ^= 255
            said = "flipped " + said
    elif kind == "swap":
        other = min(at + 512, len(content) - 1)
        before = bytes(content)
        content[at], content[other] = content[other], content[at]
        if before == bytes(content):
            content[at] ^= 255
            said = "flipped " + said
    if kind == "remove":
        file.unlink()
    else:
        file.write_bytes(content)
    return said


def verify(folder: Path, *words: str) -> tuple[int, dict[str, Any]]:
    ran = subprocess.run(
        [sys.executable, "-m", "residency", "checkpoint", "verify", str(folder), "--json", *words],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.stdout, ran
    return ran.returncode, json.loads(ran.stdout)


class Work:
    """What is saved: a module, its optimizer and tensors."""

    def __init__(self, seed: int, device: torch.device) -> None:
        chance = random.Random(seed)
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)).to(device)
        self.optimizer = torch.optim.AdamW(self.net.parameters())
        if chance.random() < 0.5:
            residency.offload_optimizer(self.optimizer, bucket="64KiB")
        self.bag = Bag(seed, device, chance.choice([0, 3, 30]), large=chance.choice([0, 0, 2]))
        self.progress = {"step": 0, "text": "x" * chance.choice([0, 9, 5000])}
        self.state = {
            "model": self.net,
            "optimizer": self.optimizer,
            "bag": self.bag.nested(chance),
            "progress": self.progress,
        }
        self.device = device

    def step(self, chance: random.Random) -> None:
        self.net(torch.randn(2, 7).to(self.device)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.progress["step"] += 1
        with residency.mutating(*(f for f in self.bag.flats if f.device.type != "cpu")):
            self.bag.scramble(chance)


def judge_damage(chance: random.Random, folder: Path, device: torch.device) -> None:
    work = Work(chance.randrange(1 << 30), device)
    moments: dict[int, dict[str, Any]] = {}
    with residency.Checkpointer(folder) as checkpointer:
        for step in range(3):
            work.step(chance)
            moments[step] = digest(work.state)
            checkpointer.save(step, work.state)
    hurt = chance.choice([[2], [2], [1, 2], [1], [0, 1, 2]])
    said = {step: damage(chance, folder / f"step-{step:08d}") for step in hurt}
    whole = [step for step in range(3) if step not in hurt]

    if chance.random() < 0.5:
        status, found = verify(folder)
        assert status == 1, said
        assert found["whole"] is False, said
        named = {save["step"] for save in found["saves"] if save["damages"]}
        assert named == set(hurt), (said, found)
    with residency.Checkpointer(folder) as checkpointer:
        for step in hurt:
            with pytest.raises(residency.CorruptSaveError) as raised:
                checkpointer.restore(work.state, step=step)
            name = said[step].split()[-1]
            assert name in f"{raised.value} {raised.value.file}", said
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if whole:
                assert checkpointer.restore(work.state) == whole[-1], said
            else:
                with pytest.raises(residency.CorruptSaveError):
                    checkpointer.restore(work.state)
        above = [step for step in hurt if not whole or step > whole[-1]]
        if whole:
            texts = [str(warning.message) for warning in caught]
            assert len(above) == len(texts), (said, texts)
            for step in above:
                named = any(f"step-{step:08d}" in text for text in texts)
                assert named or KNOWN["unnamed"], (said, texts)
            assert digest(work.state) == moments[whole[-1]], said
        for step in whole:
            assert checkpointer.restore(work.state, step=step) == step
            assert digest(work.state) == moments[step], said
        other = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)).to(device)
        check_load_into(other, folder, said, moments)
        # A later save is made whatever is damaged, and is whole.
        work.step(chance)
        now = digest(work.state)
        checkpointer.save(hurt[-1] if chance.random() < 0.5 else 9, work.state).wait()
        work.step(chance)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            checkpointer.restore(work.state, step=checkpointer.steps()[-1])
        if checkpointer.steps()[-1] == 9 or hurt[-1] == 2:
            assert digest(work.state) == now, said


def check_load_into(
    other: nn.Module, folder: Path, said: dict[int, str], moments: dict[int, dict[str, Any]]
) -> None:
    """A damaged save is refused; weights are filled from one whose damage lies elsewhere."""
    for step in range(3):
        save = folder / f"step-{step:08d}"
        try:
            left_out = residency.load_into(other, save)
        except residency.CorruptSaveError:
            problem = "corrupt"
        except residency.RefusedError as error:
            problem = f"refused: {error}"
        else:
            problem = ""
        if problem:
            assert step in said, problem
            assert problem == "corrupt" or "manifest.json" in said[step], (said, problem)
            continue
        assert not left_out
        for name, tensor in other.state_dict().items():
            kind = (str(tensor.dtype), tuple(tensor.shape), bits(tensor))
            assert kind == moments[step][f"['model']:['{name}']"], said


def test_damage_is_found_and_an_older_save_restored(
    torture: Callable[[Judge], None], device: torch.device, root: Path
) -> None:
    def judge(chance: random.Random) -> None:
        place = root / "round"
        try:
            judge_damage(chance, place, device)
        finally:
            shutil.rmtree(place)

    torture(judge)
