"""What the bodies of blocks do, in both runs alike: see ``parking_program.py``."""

from __future__ import annotations

import copy
import io
import random
from abc import ABC, abstractmethod
from typing import Any

import torch
from parking_worlds import World, tensors_of
from random_states import digest

import residency


class Bodies(ABC):
    """A run whose interludes do what their plan says.

    Attributes:
        away: Who is on the host, by name; in stock's run who would be.
        kept_away: Those of them that were parked before a block.
        snapshots: Each with the truth of its moment.
        saves: The truth of each save, by its number.
        dicts: The optimizers' states of a moment before, to go back to.
        is_lazy: Whether a loaded state may wait on the host for its first use.
        has_graph: Whether a backward pass is still to come.
        has_grown: Whether an optimizer has got a parameter more.
    """

    def __init__(self, plan: dict[str, Any], *, is_ours: bool) -> None:
        self.world, self.is_ours = World(plan), is_ours
        self.is_offloaded = self.is_lazy = self.has_graph = self.has_grown = False
        self.away: list[str] = []
        self.kept_away: list[str] = []
        self.snapshots: list[tuple[Any, dict[str, Any]]] = []
        self.saves: dict[int, dict[str, Any]] = {}
        self.dicts: list[Any] = []
        self.checkpointer: residency.Checkpointer | None = None

    @abstractmethod
    def interlude(self, interlude: dict[str, Any]) -> None:
        """Runs a block within this one."""

    def body(self, interlude: dict[str, Any]) -> None:
        chance = random.Random(interlude["seed"])
        for each in interlude["body"]:
            seed = chance.randrange(1 << 30)
            if isinstance(each, dict):
                self.interlude(each)
            else:
                getattr(self, "do_" + each.replace(" ", "_"))(random.Random(seed))
        ending = interlude["ending"]
        if ending is torch.OutOfMemoryError:
            self.too_much()
        if ending is not None:
            scratch = torch.ones(3000, device="cuda")
            raise ending(f"a preview of {len(scratch)} failed")

    def too_much(self) -> None:
        """Makes tensors until there is no room, as a preview that does not fit."""
        images = []
        while True:
            images.append(torch.empty(1 << 20, dtype=torch.uint8, device="cuda"))

    def come_back(self, name: str) -> None:
        if name in self.away:
            self.away.remove(name)

    def is_here(self, *names: str) -> bool:
        return not any(name in self.away for name in names)

    @torch.no_grad()
    def do_preview(self, chance: random.Random, *, is_training: bool = False) -> None:
        for name in ("model", "average", "reference"):
            if self.is_here(name) and chance.random() < 0.7:
                model = self.world.owners()[name]
                if self.has_graph and is_training:
                    continue  # the buffers belong to the pass that is under way
                model.train(is_training)
                noise = torch.randn(4, 24, device="cuda").to(next(model.parameters()).dtype)
                self.world.log.append(self.world.out(noise, model).clone())
                model.train()

    def do_noisy(self, chance: random.Random) -> None:
        self.do_preview(chance, is_training=True)

    @torch.no_grad()
    def do_generate(self, chance: random.Random) -> None:
        if not self.is_here("model"):
            return
        self.world.model.eval()
        x = self.world.batch(chance)
        for _ in range(chance.randint(1, 4)):
            odds = self.world.out(x).float().softmax(-1)
            drawn = torch.multinomial(odds.nan_to_num(0.5), 1)
            x = torch.cat([x[:, 1:], drawn.to(x.dtype) / 40], 1)
        self.world.log.append(x)
        self.world.model.train()

    def do_sensitivity(self, chance: random.Random) -> None:
        if not self.is_here("model"):
            return
        self.world.model.eval()
        x = self.world.batch(chance).requires_grad_()
        loss = self.world.out(x).float().square().mean()
        if loss.requires_grad and self.world.plan["model"] != "words":
            self.world.log.append(torch.autograd.grad(loss, x)[0])
        self.world.model.train()

    def do_make(self, chance: random.Random) -> None:
        """Makes a tensor that the loop keeps."""
        self.world.kept.append(torch.randn(chance.choice([3, 700, 90_000]), device="cuda"))

    def do_average(self, chance: random.Random) -> None:
        if self.is_here("model", "average"):
            self.update()

    def update(self) -> None:
        """Updates the average, as the docs ask for while a save may be on its way."""
        with residency.mutating(*self.world.average.parameters(), *self.world.average.buffers()):
            self.world.average.update_parameters(self.world.model)

    @torch.no_grad()
    def do_swap(self, chance: random.Random) -> None:
        """Evaluates with the average's weights in the model, as EMA callbacks do."""
        if not self.is_here("model", "average") or self.has_graph:
            return
        model = self.world.model
        stored = [p.clone() for p in model.parameters()]
        with residency.mutating(*model.parameters()):
            torch._foreach_copy_(list(model.parameters()), list(self.world.average.parameters()))
        self.do_preview(chance)
        with residency.mutating(*model.parameters()):
            torch._foreach_copy_(list(model.parameters()), stored)

    def do_save(self, chance: random.Random) -> None:
        if self.has_grown:
            return  # it would go on in another training than the one that is made for it
        number = len(self.saves)
        self.saves[number] = self.world.saved_picture()
        if self.checkpointer is not None:
            self.checkpointer.save(number, self.world.state(), rng=False)

    def do_torch_save(self, chance: random.Random) -> None:
        file = io.BytesIO()
        torch.save({name: each.state_dict() for name, each in self.world.state().items()}, file)
        file.seek(0)
        self.world.log.append(digest(torch.load(file, map_location="cpu")))

    def do_snapshot(self, chance: random.Random) -> None:
        truth = digest({"model": self.world.model})
        if self.is_ours:
            taken = residency.snapshot({"model": self.world.model}, pin=chance.random() < 0.7)
            self.snapshots.append((taken, truth))

    def look(self) -> None:
        while self.snapshots:
            taken, truth = self.snapshots.pop()
            found = digest({"model": dict(taken.tree["model"])})
            assert sorted(found.values()) == sorted(truth.values()), "a snapshot"

    def do_load(self, chance: random.Random) -> None:
        """Loads an optimizer's state of before, as a loop that goes back to its best."""
        if self.world.plan["optimizer"] == "LBFGS" or self.world.plan["dtype"] == "bfloat16":
            return
        if self.dicts and chance.random() < 0.6:
            for optimizer, saved in zip(self.world.optimizers, self.dicts, strict=True):
                optimizer.load_state_dict(copy.deepcopy(saved))
            self.is_lazy = True
        file = io.BytesIO()
        torch.save([each.state_dict() for each in self.world.optimizers], file)
        file.seek(0)
        self.dicts = torch.load(file, map_location="cpu")

    def do_zero(self, chance: random.Random) -> None:
        if not self.has_graph:
            self.world.zero()

    def do_refused(self, chance: random.Random) -> None:
        """Steps an optimizer whose state is parked, which is refused."""
        for index, optimizer in enumerate(self.world.optimizers):
            state = [t for t in tensors_of(optimizer) if t.numel() > 1]
            has_grads = any(p.grad is not None for g in optimizer.param_groups for p in g["params"])
            is_away = f"optimizer {index}" in self.away and state and not self.is_offloaded
            if self.is_ours and has_grads and is_away and self.world.plan["optimizer"] != "LBFGS":
                try:
                    optimizer.step()
                except residency.RefusedError as error:
                    if "unpark" not in str(error):
                        raise
                else:
                    raise AssertionError("a step of a parked optimizer was not refused")

    def do_copy(self, chance: random.Random) -> None:
        self.world.log.append(digest(copy.deepcopy(self.world.model).state_dict()))

    def do_schedule(self, chance: random.Random) -> None:
        self.world.schedule(chance.random())

    def do_reclaim(self, chance: random.Random) -> None:
        if self.is_ours:
            residency.reclaim()

    def do_unpark(self, chance: random.Random) -> None:
        """Brings one owner back before the block ends, and uses it."""
        names = [name for name in self.away if name not in (*self.kept_away, "host")]
        if not names:
            return
        name = chance.choice(names)
        self.away.remove(name)
        if self.is_ours:
            residency.unpark(self.world.owners()[name])

    def do_grow(self, chance: random.Random) -> None:
        """Adds a parameter to the last optimizer."""
        if self.world.plan["optimizer"] in ("LBFGS", "Muon") or self.has_graph or self.dicts:
            return
        if (
            self.world.schedules[-1] is None
            and self.is_here("model", "reference")
            and not self.saves
        ):
            used = {id(p) for g in self.world.optimizers[-1].param_groups for p in g["params"]}
            for parameter in self.world.reference.parameters():
                if id(parameter) not in used and parameter.ndim == 1:
                    self.world.optimizers[-1].add_param_group({"params": [parameter]})
                    self.has_grown = True
                    return

    def do_large(self, chance: random.Random) -> None:
        """Takes a good part of the device for a moment."""
        torch.empty(chance.choice([1, 3, 5]) << 20, dtype=torch.uint8, device="cuda")
