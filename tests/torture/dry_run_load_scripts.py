"""Writes random scripts that train, save and load, and says what each of them does in a dry run.

How many optimizer steps there are follows from the documentation: as many as ``--steps`` says, as
many again in each training that comes after, and three times more in a loop whose round loads a
checkpoint into what the script trains. A load into anything else (a teacher, averaged weights, a
copy that is evaluated, data) changes nothing. The script with the numbers of rounds that make these
steps runs with stock torch on the CPU, and the dry run must write what that one writes.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any

import torch
from tests.torture.dry_run_load_forms import (
    ADAPTED,
    HEAD,
    MODEL,
    PLACES,
    PUTS,
    READS,
    TENSORS_ALONE,
)  # fmt: skip
from training_programs import some

LINE = 512  # bytes that torch's allocator rounds to
SPLIT = 1 << 20  # what is larger may get a block with so much more
AGAIN = 4  # rounds of a loop that loads what it trains: one, and three times more

# text, states of a parameter's size, and where the counters of steps are.
OPTIMIZERS = [
    ("SGD(ARGS, lr=1e-3)", 0, ""),
    ("SGD(ARGS, lr=1e-3, momentum=0.9)", 1, ""),
    ("Adam(ARGS, lr=1e-3)", 2, "host"),
    ("AdamW(ARGS, lr=1e-3, foreach=False)", 2, "host"),
    ("AdamW(ARGS, lr=1e-3, fused=True)", 2, "device"),
]
OTHERS = ["teacher", "average", "shards", "probe", "host probe", "peek"]
WRAPPERS = ["", "", "", "DDP", "DataParallel", "compile"]
FORMS = ["loader", "epochs", "range", "while"]


def rounded(num_bytes: int) -> int:
    return -(-num_bytes // LINE) * LINE


def inside(lines: list[str], times: int = 1) -> list[str]:
    return ["    " * times + each for line in lines for each in line.split("\n")]


@dataclass
class Bytes:
    """What the script holds on the device, by owner."""

    model: int
    trained: int
    count: int  # tensors that are trained
    slack: int  # by which blocks may be larger than their tensors, for one copy of the model

    @classmethod
    def of(cls, model: torch.nn.Module) -> Bytes:
        own = [*model.parameters(), *model.buffers()]
        trained = [each for each in own if each.requires_grad]
        held, gradients = (sum(rounded(each.nbytes) for each in of) for of in (own, trained))
        return cls(held, gradients, len(trained), sum(SPLIT for e in own if e.nbytes > SPLIT))


class Script:
    """A random script, and what is known of it."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.steps = chance.choice([2, 2, 2, 1, 3])
        self.width = chance.choice([64, 200, 512, 724])
        self.depth = chance.randint(1, 3)
        self.adapted = some(chance, 0.3)
        self.optimizer, self.states, self.counters = chance.choice(OPTIMIZERS)
        self.wrapper = chance.choice(WRAPPERS)
        self.through = "model" if some(chance, 0.5) else "core"
        self.reload = chance.choice(["", "others", "others", "first", "round", "round", "middle"])
        self.other = chance.choice(OTHERS)
        self.form = chance.choice(FORMS)
        if self.reload == "middle" and self.form == "epochs":
            self.form = "loader"
        if self.reload in ("first", "round"):
            self.form = "epochs"
        self.every = chance.choice([1, 1, 2])
        self.extras = {e for e in ("teacher", "ema", "scheduler", "scaler") if some(chance, 0.35)}
        self.extras |= {"teacher"} if self.other == "teacher" else set()
        self.extras |= {"ema"} if self.other == "average" else set()
        self.keeps = some(chance, 0.5)
        self.before = chance.choice(["", "", "absent", "pretrained", "backbone"])
        acts = ["evaluate", "resume", "resume", "fresh", "fresh", "other", "each", "mean"]
        self.after = [chance.choice(acts) for _ in range(chance.choice([1, 1, 2]))]
        self.in_main = some(chance, 0.4)
        self.bytes = self._counted()
        self.held: list[tuple[int, int]] = []  # least and most, each time the script asks
        self.loaded = 0  # the most that a load brings to the device
        self.functions: list[str] = []
        self.are_counters_here = self.counters == "device"
        self.gradients = False
        self._text = self._written()

    def _counted(self) -> Bytes:
        names: dict[str, Any] = {"torch": torch, "nn": torch.nn, "F": torch.nn.functional}
        names["__name__"] = "script"
        exec(self.model(), names)
        with torch.device("meta"):
            return Bytes.of(names["Net"]())

    def model(self) -> str:
        block = f"Adapted({self.width})" if self.adapted else f"nn.Linear({self.width}, width)"
        text = MODEL.format(width=self.width, depth=self.depth, block="BLOCK")
        return (ADAPTED if self.adapted else "") + text.replace("BLOCK", block)

    @property
    def modules(self) -> int:
        return self.bytes.model * (1 + ("teacher" in self.extras) + ("ema" in self.extras))

    @property
    def state(self) -> int:
        counters = LINE * self.bytes.count if self.counters else 0
        return self.states * self.bytes.trained + counters * self.are_counters_here

    def text(self, *, full: bool) -> str:
        """Returns the script as it stands, or with the numbers of a dry run."""
        micro = self.steps * self.every
        again = AGAIN if self.reload in ("first", "round") else 1
        numbers = {"E": (7, again), "N": (40, micro), "A": (40, micro), "M": (90, AGAIN * micro)}
        return re.sub("@(.)@", lambda f: str(numbers[f[1]][0 if full else 1]), self._text)

    # Loads.

    def _read(self, file: str, bring: int) -> str:
        """Returns the expression that reads a file, and counts what it brings to the device."""
        of = TENSORS_ALONE if file.endswith(".safetensors") else READS
        # The host's state of an optimizer stays in a mapped file, which the next save writes over.
        usable = [each for each in of if each != "mapped" or file != "last.pt"]
        text, is_here = of[self.chance.choice(usable)]
        self.is_here = is_here
        self.is_moved = "device" in text or '"cuda")' in text
        self.loaded = max(self.loaded, bring * is_here)
        return text.replace("PATH", repr(file))

    def _put(self, into: str) -> list[str]:
        usable = [each for each in PUTS if into != "model" or each not in ("part", "renamed")]
        if self.wrapper and into == "model":
            usable.remove("checkpoint")
        return PUTS[self.chance.choice(usable)].strip("\n").replace("INTO", into).split("\n")

    def _placed(self, lines: list[str], *names: str) -> list[str]:
        """Puts the lines of a load where it stands, with the names that it needs."""
        definition, call = PLACES[self.chance.choice(list(PLACES))]
        if not definition:
            return [*lines, "state = own = part = p = None"]
        name = f"load_{len(self.functions)}"
        arguments = ", ".join(names)
        pairs = {"INNER": "\n".join(inside(lines, 2)), "BODY": "\n".join(inside(lines)),
                 "ARGS": arguments, "NAME": name}  # fmt: skip
        for key, value in pairs.items():
            definition, call = definition.replace(key, value), call.replace(key, value)
        self.functions.append(definition + "\n")
        return call.split("\n")

    def _load_weights(self, file: str, into: str) -> list[str]:
        lines = [f"state = {self._read(file, self.bytes.model)}", *self._put(into)]
        return self._placed([*lines, f'mark("loaded {file}")'], into)

    @property
    def best(self) -> str:
        return "best.safetensors" if self.has_tensors_alone else "best.pt"

    def _load_all(self, parts: set[str], into: str) -> list[str]:
        """Loads parts of the last checkpoint."""
        kept = self.bytes.model + self.states * self.bytes.trained
        kept += self.bytes.model if "ema" in self.extras else 0
        lines = [f"checkpoint = {self._read('last.pt', kept)}", 'state = checkpoint["model"]']
        lines += self._put(into) if "model" in parts else []
        names = [into]
        for name in ("optimizer", "ema", "scheduler", "scaler"):
            if name in parts:
                lines += [f'{name}.load_state_dict(checkpoint["{name}"])']
                names += [name]
        if "optimizer" in parts and self.counters == "host":
            self.are_counters_here = (self.are_counters_here and self.is_here) or self.is_moved
        lines += ['mark("loaded", *sorted(checkpoint), checkpoint["done"])', "checkpoint = None"]
        return self._placed([*lines, "own = part = state = None"], *names)

    # Parts of the script.

    def _build(self) -> list[str]:
        wrapped = {
            "": "core",
            "DDP": "nn.parallel.DistributedDataParallel(core)",
            "DataParallel": "nn.DataParallel(core)",
            "compile": "torch.compile(core)",
        }[self.wrapper]
        made = f"optimizer = torch.optim.{self.optimizer}".replace(
            "ARGS", "[p for p in core.parameters() if p.requires_grad]"
        )
        lines = ["core = Net().cuda()", f"model = {wrapped}", made]
        if "scheduler" in self.extras:
            lines += ["scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)"]
        return [*lines, "done = 0"]

    def _set_up(self) -> list[str]:
        lines = []
        if self.wrapper == "DDP":
            lines += ["torch.distributed.init_process_group('BACKEND', init_method='file://'",
                      "    + os.path.abspath('rendezvous'), rank=0, world_size=1)"]  # fmt: skip
        lines += ['torch.save(Net().state_dict(), "other.pt")',
                  'torch.save([*batches(40)], "shard.pt")']  # fmt: skip
        build = self._build()
        before: list[str] = []
        if self.before == "pretrained":
            before = self._load_weights("other.pt", "core")
        elif self.before == "backbone":
            before = [f"state = {self._read('other.pt', 0)}",
                      'state = {k: v for k, v in state.items() if not k.startswith("head")}',
                      "core.load_state_dict(state, strict=False)"]  # fmt: skip
            before = self._placed(before, "core")
        elif self.before == "absent":
            counters = self.are_counters_here
            before = self._load_all({"model", "optimizer"}, self.through)
            before = ['if os.path.exists("last.pt"):', *inside(before)]
            self.are_counters_here = counters
        if self.before in ("pretrained", "backbone") and some(self.chance, 0.5):
            build[1:1] = before
        else:
            build += before
        if "teacher" in self.extras:
            build += ["teacher = Net().cuda().eval().requires_grad_(False)"]
            build += self._load_weights("other.pt", "teacher")
        if "ema" in self.extras:
            build += ["ema = copy.deepcopy(core).requires_grad_(False)"]
        if "scaler" in self.extras:
            build += ['scaler = torch.amp.GradScaler("cuda")']
        return [*lines, *build]

    def _step(self) -> list[str]:
        lines = ["x, y = x.cuda(), y.cuda()", "seen += 1"]
        zero = "optimizer.zero_grad()"
        if self.keeps:
            lines += [f"if seen % {self.every} == {1 % self.every}:", "    " + zero]
        lines += [f"loss = F.mse_loss(model(x), y) / {self.every}"]
        if "teacher" in self.extras:
            lines += ["with torch.no_grad():", "    target = teacher(x)",
                      "loss = loss + F.mse_loss(model(x), target)"]  # fmt: skip
        lines += [("scaler.scale(loss)" if "scaler" in self.extras else "loss") + ".backward()"]
        update = ["optimizer.step()"]
        if "scaler" in self.extras:
            update = ["scaler.step(optimizer)", "scaler.update()"]
        update += [zero] if not self.keeps else []
        update += ["scheduler.step()"] if "scheduler" in self.extras else []
        update += ["done += 1", 'mark("step", done)']
        if "ema" in self.extras:
            update += ["with torch.no_grad():",
                       "    for a, b in zip(ema.parameters(), core.parameters()):",
                       "        a.lerp_(b, 0.01)"]  # fmt: skip
        if self.every > 1:
            return [*lines, f"if seen % {self.every} == 0:", *inside(update)]
        return [*lines, *update]

    def _save(self) -> list[str]:
        whole = ["'done': done"]
        whole += [f"'model': {self.through}.state_dict()", "'optimizer': optimizer.state_dict()"]
        whole += [f"'{e}': {e}.state_dict()" for e in ("ema", "scheduler", "scaler")
                  if e in self.extras]  # fmt: skip
        weights = f'torch.save({self.through}.state_dict(), "best.pt")'
        if self.has_tensors_alone:
            weights = f'safetensors.torch.save_file({self.through}.state_dict(), "{self.best}")'
        return [f"torch.save({{{', '.join(whole)}}}, 'last.pt')", weights, 'mark("saved")']

    def _other(self) -> list[str]:
        """Loads, in a round, something that is not trained."""
        if self.other == "teacher":
            return self._load_weights("other.pt", "teacher")
        if self.other == "average":
            return self._load_weights("other.pt", "ema")
        if self.other == "shards":
            return ['shard = torch.load("shard.pt")', 'mark("rows", len(shard))', "shard = None"]
        if self.other == "peek":
            return ['seen_before = torch.load("other.pt", map_location=device)',
                    "seen_before = None", 'mark("peeked")']  # fmt: skip
        where = "" if self.other == "host probe" else ".cuda()"
        lines = [f"probe = Net(){where}", *self._load_weights("other.pt", "probe")]
        lines += ["evaluate(probe)"] if where else ["probe.eval()"]
        return [*lines, "probe = None"]

    def _training(self, *, reload: str, count: str) -> list[str]:
        step, end = self._step(), self._save()
        if reload == "others":
            at = self.chance.choice(["step", "end"])
            other = self._other()
            if at == "step":
                step += [f"if seen % {2 * self.every} == {self.every % (2 * self.every)}:",
                         *inside(other)]  # fmt: skip
            else:
                end += other
        if reload == "middle":
            step += [f"if done and seen % {self.steps * self.every} == 0:",
                     *inside([*self._save(), *self._again()])]  # fmt: skip
        if reload == "round":
            end += self._again()
        end += ['mark("end of an epoch")']
        begin = self._load_weights("other.pt", "core") if reload == "first" else []
        form = self.form
        if form == "epochs" and not reload and count == "A":
            form = "loader"
        lines = {
            "loader": [f"for x, y in batches(@{count}@):", *inside(step), *end],
            "epochs": ["for epoch in range(@E@):", "    seen = 0", *inside(begin),
                       f"    for x, y in batches(@{count}@):", *inside(step, 2), *inside(end)],
            "range": ["stream = iter(batches(1000))", f"for i in range(@{count}@):",
                      "    x, y = next(stream)", *inside(step), *end],
            "while": ["stream = iter(batches(1000))", f"while seen < @{count}@:",
                      "    x, y = next(stream)", *inside(step), *end],
        }[form]  # fmt: skip
        self.gradients = self.keeps
        return ["seen = 0", *lines, *self._asked()]

    def _asked(self) -> list[str]:
        least = self.modules + self.state + self.bytes.trained * self.gradients
        most = least + self.bytes.slack * 8
        if self.wrapper == "DDP":  # buckets
            most += self.bytes.trained + SPLIT * 2
        if "scaler" in self.extras:
            most += 8 * LINE
        self.held.append((least, most))
        return ["x = y = loss = target = None", "held()"]

    def _again(self) -> list[str]:
        """Loads what is trained, weights alone or more."""
        kind = self.chance.choice(["best", "model", "optimizer", "both", "all"])
        if kind == "best":
            return self._load_weights(self.best, self.through)
        of = {"model": {"model"}, "optimizer": {"optimizer"}, "both": {"model", "optimizer"}}
        parts = of.get(kind, {"model", "optimizer", "ema", "scheduler", "scaler"})
        parts &= self.extras | {"model", "optimizer"}
        return self._load_all(parts, self.through)

    def _act(self, act: str) -> list[str]:
        if act == "evaluate":
            return [*self._load_weights(self.best, self.through), "evaluate(model)"]
        if act == "resume":
            return [*self._again(), "seen = 0", *self._training(reload="", count="A")]
        if act == "fresh":
            build = self._build()
            if some(self.chance, 0.3):
                build[1:1] = [
                    'state = torch.load("last.pt", map_location=device)["model"]',
                    "bare = re.compile('^(module|_orig_mod)[.]')",
                    "state = {bare.sub('', k): v for k, v in state.items()}",
                    "core.load_state_dict(state, assign=True)", "state = None"]  # fmt: skip
            self.are_counters_here = self.counters == "device"
            lines = ["core = model = optimizer = scheduler = None", "gc.collect()", *build]
            self.gradients = False
            lines += self._load_all({"model", "optimizer"}, self.through)
            return [*lines, *self._training(reload="", count="A")]
        if act == "other":
            return [*self._other(), *self._training(reload="", count="A")]
        if act == "each":
            return ['for file in ("best", "again"):',
                    *inside(self._load_weights(self.best, self.through)),
                    "    evaluate(model)", "    mark(file)"]  # fmt: skip
        path = repr(self.best)
        read = f"safetensors.torch.load_file({path})"
        if not self.has_tensors_alone:
            read = f'torch.load({path}, map_location="cpu")'
        return [f"states = [{read} for _ in range(2)]",
                f"{self.through}.load_state_dict({{k: (states[0][k] + states[1][k]) / 2",
                "                       for k in states[0]})",
                "states = None", "evaluate(model)"]  # fmt: skip

    def _written(self) -> str:
        self.has_tensors_alone = some(self.chance, 0.4)
        lines = self._set_up()
        count = {"middle": "M"}.get(self.reload, "N")
        lines += [*self._training(reload=self.reload, count=count), 'mark("trained")']
        for act in self.after:
            lines += [*self._act(act), f'mark("after", "{act}")']
        lines += [*self._asked(), 'mark("finished")']
        lines += ["torch.distributed.destroy_process_group()"] * (self.wrapper == "DDP")
        if self.in_main:
            lines = ["def main():", *inside(lines), "", 'if __name__ == "__main__":', "    main()"]
        return "\n".join([HEAD, self.model(), *self.functions, *lines]) + "\n"
