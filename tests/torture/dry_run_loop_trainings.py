"""Writes one random training of a script: its loops, where they stand, and what a round does.

``Training.counts`` says, for each number in the text, how long the training is, and how long it is
where its data ends after as many optimizer steps as were asked for: plain arithmetic.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field

from tests.torture.dry_run_loop_forms import (
    EPOCHS,
    IN_EXPRESSIONS,
    OVER_DATA,
    OVER_STEPS,
    PHASES,
    RETURNING,
)
from training_programs import some

PLACES = ["here", "function", "function", "function that returns", "epoch", "epoch",
          "epoch that returns", "class", "class", "class that calls", "generator"]  # fmt: skip
AROUND = ["", "", "", "", "with", "with two", "finally", "interrupt", "stack", "if"]
KINDS = ["plain", "plain", "plain", "plain", "plain", "scaler", "closure", "critic", "every few",
         "both", "hooks", "by hand"]  # fmt: skip
EXTRAS = ["inner loop", "checks", "saves", "schedule", "long", "average", "last", "validation",
          "checkpoint", "continue", "autocast"]  # fmt: skip
OBJECTS = ["model", "optimizer", "critic", "judge", "scheduler", "scaler", "loader"]
ALL = ", ".join(OBJECTS)
FREE = 20  # backward passes of a script without an optimizer that come before those asked for


def inside(lines: list[str]) -> list[str]:
    return ["    " + each for each in lines]


def fill(template: str, parts: dict[str, list[str]]) -> list[str]:
    """Puts lines in the place of names, at their depth."""
    lines = []
    for line in template.strip("\n").split("\n"):
        depth = len(line) - len(line.lstrip())
        lines += [" " * depth + each for each in parts.get(line.strip(), [line.strip()])]
    return lines


@dataclass
class Training:
    """One training of a script: its loops, and how long they are."""

    chance: random.Random
    name: str
    asked: int  # optimizer steps
    may_be_bare: bool = True
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)  # full, and where data ends

    def __post_init__(self) -> None:
        chance = self.chance
        self.kind = chance.choice(KINDS if self.may_be_bare else KINDS[:-2])
        self.frame = chance.choice([*EPOCHS, "steps", "steps", "steps", "phases"])
        if self.frame in ("phases", "optimizers"):
            self.kind = "plain"
        self.every = chance.choice([1, 1, 2, 3]) if self.kind in ("plain", "scaler", "both") else 1
        self.place = chance.choice(PLACES)
        self.around = chance.choice(AROUND)
        self.extras = {each for each in EXTRAS if some(chance, 0.3)}
        self.calls = some(chance, 0.15) or self.place == "class that calls"
        self.form = chance.choice(list(OVER_STEPS if self.frame == "steps" else OVER_DATA))
        if self.frame == "steps" and (self.calls or self.kind == "every few"):
            self.form = chance.choice(["while", "cycle", "nested", "flag"])
        elif self.calls and some(chance, 0.6):
            self.form = chance.choice(list(IN_EXPRESSIONS))
        if self.frame == "phases":
            self.calls, self.every = False, 1
        if self.frame == "optimizers":
            self.extras -= {"schedule"}
        if self.frame == "steps" and self.place.startswith("function") and some(chance, 0.3):
            self.form, self.calls = chance.choice(list(RETURNING)), False
            self.extras -= {"average", "last", "validation", "checkpoint"}
        if self.place == "generator" and (self.calls or self.frame == "phases"):
            self.place = "epoch"
        self.count()

    @property
    def may_be_one_round(self) -> bool:
        """Whether an epoch can be one step."""
        return self.frame not in ("one", "optimizers", "restarts") and self.kind != "every few"

    def count(self, critics: int = 0) -> None:
        """Chooses how long the loops are, and how often a critic steps unless it is given."""
        chance, rounds = self.chance, self.asked
        self.critics = critics or 1
        if self.kind in ("critic", "every few") and not critics:
            self.critics = chance.choice([1, max(rounds, 2), 5])
        if self.kind == "every few":
            rounds *= self.critics
        if self.kind == "by hand":
            rounds += FREE
        steps = rounds // self.critics if self.kind == "every few" else rounds
        if self.frame == "steps":
            self.counts = {"M": (steps + 10, steps), "N": (4, 4)}
        elif 1 < rounds < FREE and self.may_be_one_round and some(chance, 0.2):
            # An epoch is one step.
            self.counts = {"E": (rounds + 2, rounds), "R": (1, 1), "N": (self.every, self.every)}
        else:
            batches = (rounds + chance.randint(1, 4)) * self.every + chance.randrange(self.every)
            most = 3 if self.frame == "restarts" else 50  # which has as many in each
            self.counts = {"E": (chance.choice([2, 3, most]), 1), "R": (2, 1), "O": (3, 3)}
            self.counts["N"] = batches, rounds * self.every

    @property
    def is_split(self) -> bool:
        """Whether the loop of an epoch stands in a function of its own."""
        return self.place[:5] in ("epoch", "class") and self.frame not in ("steps", "phases")

    def spelled(self, lines: list[str]) -> list[str]:
        """Writes names and numbers as the place of the loops has them."""
        of = "self." if self.place[:5] == "class" else ""
        names = {each: of + each for each in OBJECTS}
        own = "" if not (self.calls or self.is_split) else "run."
        steps = (of or own) + "steps"
        names |= {"steps": steps, "name": self.name, "every": str(self.every)}
        names["value"] = steps if self.place.endswith("returns") else ""
        lines = [re.sub(r"\$(\w+)", lambda found: names[found[1]], each) for each in lines]
        return [re.sub("@([EMNOR])@", f"@{self.name}\\1@", each) for each in lines]

    def set_up(self, *, model: bool = True) -> list[str]:
        lines = ["model = nn.Linear(8, 2).cuda()"] if model else []
        lines += ["optimizer = critic = judge = scheduler = scaler = None"]
        if self.kind == "hooks":
            lines += ["optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}",
                      "def step_in_backward(p):", "    optimizers[p].step()",
                      "    optimizers[p].zero_grad()", "for p in model.parameters():",
                      "    p.register_post_accumulate_grad_hook(step_in_backward)"]  # fmt: skip
        elif self.kind != "by hand" and self.frame != "optimizers":
            of = self.chance.choice(["SGD", "AdamW", "RMSprop"])
            lines += [f"optimizer = torch.optim.{of}(model.parameters(), lr=1e-3)"]
        if self.kind in ("critic", "every few", "both"):
            lines += ["judge = nn.Linear(2, 1).cuda()",
                      "critic = torch.optim.Adam(judge.parameters(), lr=1e-3)"]  # fmt: skip
        if self.is_scheduled:
            lines += ["scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)"]
        if self.kind == "scaler":
            lines += ['scaler = torch.amp.GradScaler("cuda")']
        return [*lines, f"loader = data(@{self.name}N@)"]

    @property
    def is_scheduled(self) -> bool:
        return "schedule" in self.extras and self.kind not in ("hooks", "by hand")

    def forward(self) -> list[str]:
        loss = [f"loss = F.mse_loss($model(x).float(), y) / {self.every}"]
        if "autocast" in self.extras:
            loss = ['with torch.autocast("cuda", dtype=torch.bfloat16):', *inside(loss)]
        lines = ["x, y = x.cuda(), y.cuda()", *loss]
        if self.kind == "critic":
            lines += [f"for turn in range({self.critics}):", *inside(self._critic())]
        if self.kind == "every few":
            lines += self._critic()
        if self.kind != "closure":
            lines += [("$scaler.scale(loss)" if self.kind == "scaler" else "loss") + ".backward()"]
        return [*lines, "last = loss.item()", "total += last", "losses.append(last)"]

    def _critic(self) -> list[str]:
        return ["$critic.zero_grad()", "$judge(y).mean().backward()", "$critic.step()",
                'mark("$name critic", seen)']  # fmt: skip

    def _step(self) -> list[str]:
        if self.kind == "scaler":
            return ["$scaler.step($optimizer)", "$scaler.update()", "$optimizer.zero_grad()"]
        if self.kind == "closure":
            return ["def closure():", "    $optimizer.zero_grad()",
                    "    again = F.mse_loss($model(x), y)", "    again.backward()",
                    "    return again", "$optimizer.step(closure)"]  # fmt: skip
        if self.kind == "both":
            return ["$judge(y).mean().backward()", "for each in ($optimizer, $critic):",
                    "    each.step()", "    each.zero_grad()",
                    '    mark("$name of both", $steps)']  # fmt: skip
        if self.kind == "by hand":
            return ["with torch.no_grad():", "    for p in $model.parameters():",
                    "        p -= 0.1 * p.grad", "        p.grad = None"]  # fmt: skip
        return ["$optimizer.step()", "$optimizer.zero_grad()"] if self.kind != "hooks" else []

    def update(self) -> list[str]:
        step = [*self._step(), "$steps += 1", 'mark("$name step", $steps)']
        if self.is_scheduled:
            step += ["$scheduler.step()"]
        if self.kind == "every few":
            step = [f"if seen % {self.critics} == 0:", *inside(step)]
        if "inner loop" in self.extras:
            step += ["for key, value in $model.state_dict().items():",
                     '    mark("$name wrote", key, tuple(value.shape))']  # fmt: skip
        if "checks" in self.extras:
            step += ["if $steps % 2 == 0:", "    evaluate($model, held_out)",
                     '    mark("$name checked")']  # fmt: skip
        if "saves" in self.extras:
            step += ["if $steps % 5 == 1:", '    torch.save($model.state_dict(), "step.pt")',
                     '    mark("$name saved in the loop")']  # fmt: skip
        if "long" in self.extras:
            step += [f"value_{i} = [last * {i}, last + {i}, {{'of': last, 'at': seen}}]"
                     for i in range(24)]  # fmt: skip
        return step

    def body(self) -> list[str]:
        loop = OVER_DATA.get(self.form, "")
        may_continue = self.frame != "steps" and loop.startswith("\nfor") and not self.calls
        lines = self.update()
        if self.every > 1 and may_continue and "continue" in self.extras:
            lines = [f"if seen % {self.every}:", "    continue", *lines]
        elif self.every > 1:
            lines = [f"if seen % {self.every} == 0:", *inside(lines)]
        return [*self.forward(), *lines, 'mark("$name round", seen)']

    def end(self) -> list[str]:
        lines = []
        if not self.is_split and "average" in self.extras:
            lines += ["average = sum(losses) / len(losses)"]
        if not self.is_split and "last" in self.extras:
            counted = self.form not in IN_EXPRESSIONS
            lines += ["average = total / seen, last" if counted else "average = losses[-1]"]
        if self.place.endswith("returns") and self.is_split:
            lines += ["average = average * 2"]
        if "validation" in self.extras:
            lines += ["for x, y in held_out:", "    with torch.no_grad():",
                      "        $model(x.cuda())", 'mark("$name validated")']  # fmt: skip
        if "checkpoint" in self.extras:
            lines += ['torch.save({"model": $model.state_dict()}, "last.pt")',
                      'mark("$name checkpoint")']  # fmt: skip
        if lines and self.frame not in ("one", "steps"):
            lines += ['mark("$name epoch")']
        return lines

    def _inner(self) -> list[str]:
        """Returns the loop over batches, and the function of a round where it is one."""
        body, call = self.body(), "training_step"
        before: list[str] = []
        if self.calls:
            given = "seen, x, y"
            step = ["total, losses = 0.0, []", *body, "return last"]
            before = [f"def training_step({given}):", *inside(step)]
            body = [f"last = {call}({given})", "total += last", "losses.append(last)"]
        if self.place == "generator":
            body = [*body, "yield seen"]
        whole = {**OVER_STEPS, **RETURNING}
        forms = whole if self.frame == "steps" else {**OVER_DATA, **IN_EXPRESSIONS}
        parts = {"BODY": body, "FORWARD": self.forward(), "UPDATE": self.update()}
        return [*before, "total, seen, losses = 0.0, 0, []",
                *fill(forms[self.form].replace("CALL", call), parts)]  # fmt: skip

    def _around(self, lines: list[str]) -> list[str]:
        body = inside(lines)
        return {
            "": lines,
            "with": ["with contextlib.nullcontext():", *body],
            "with two": ["with contextlib.nullcontext(), \\",
                         "        contextlib.suppress(KeyboardInterrupt):", *body],
            "finally": ["try:", *body, "finally:", '    mark("$name finally")'],
            "interrupt": ["try:", *body, "except KeyboardInterrupt:", '    mark("interrupted")'],
            "stack": ["with contextlib.ExitStack() as stack:",
                      '    stack.callback(mark, "$name closed")', *body],
            "if": ["if sys.flags.debug == 0:", *body, "else:", '    mark("never")'],
        }[self.around]  # fmt: skip

    def written(self) -> tuple[list[str], list[str]]:
        """Returns the definitions of the training, and the lines that run it."""
        inner, name = self._inner(), self.name
        definitions: list[str] = []
        if self.is_split:
            returns = self.place.endswith("returns")
            epoch = self._around(inner) + ["return sum(losses) / len(losses)"] * returns
            is_class = self.place[:5] == "class"
            given = "self" if is_class else ALL
            definitions = [f"def epoch_{name}({given}):", *inside(epoch)]
            call = f"self.epoch_{name}()" if is_class else f"epoch_{name}({ALL})"
            inner = ["average = " * returns + call]
        if self.frame == "phases":
            lines = fill(PHASES, {})
        elif self.frame == "steps":
            lines = [*inner, *self.end()]
        else:
            lines = fill(EPOCHS[self.frame], {"START": [], "INNER": inner, "END": self.end()})
        lines = ["$steps = 0", *(lines if self.is_split else self._around(lines))]
        if self.place[:5] == "class":
            fields = [f"self.{each} = {each}" for each in OBJECTS]
            definitions = [f"class Trainer_{name}:", *inside([
                f"def __init__(self, {ALL}):", *inside(fields), *definitions,
                "def fit(self):", *inside(lines)])]  # fmt: skip
            lines = [f"trainer = Trainer_{name}({ALL})", "trainer.fit()"]
        elif self.place[:5] in ("funct", "gener"):
            returns = self.place.endswith("returns")
            lines += ["return $steps"] * returns
            definitions = [f"def train_{name}({ALL}):", *inside(lines)]
            lines = [f"result = train_{name}({ALL})", "result += 1"]
            lines = lines if returns else [f"train_{name}({ALL})"]
        if self.place == "generator":
            lines = [f"for number in {lines[0]}:", '    mark("$name progress", number)']
        return self.spelled(definitions), self.spelled(lines)
