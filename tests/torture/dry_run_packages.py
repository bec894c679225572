"""Writes random packages with a trainer, installs them in a folder, and scripts that call them.

The loop of the training is the package's alone. What follows it, in the package and in the script,
must still run: a script writes marks, and in a dry run they must be those that it writes with the
numbers of epochs, batches and steps that make as many optimizer steps as were asked for.
"""

from __future__ import annotations

import random
import re
from pathlib import Path

from tests.torture.dry_run_load_scripts import inside
from tests.torture.dry_run_package_forms import (
    BACKWARDS,
    BASE,
    CALLBACKS,
    HEAD,
    SHAPES,
    STEP,
    STRATEGY,
    UPDATES,
)  # fmt: skip
from training_programs import some

METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"


def filled(text: str, parts: dict[str, list[str]]) -> str:
    """Puts lines in the place of the words that stand for them, at their depth."""
    lines = []
    for line in text.split("\n"):
        key = line.strip()
        if key in parts:
            depth = (len(line) - len(line.lstrip())) // 4
            lines += inside(parts[key] or ["pass"], depth)
        else:
            lines.append(line)
    return "\n".join(lines)


class Package:
    """A random package that trains, and a script that calls it."""

    def __init__(self, chance: random.Random, name: str) -> None:
        self.chance, self.name = chance, name
        self.steps = chance.choice([2, 2, 2, 1, 3])
        self.every = chance.choice([1, 1, 2, 3])
        self.shape = chance.choice(list(SHAPES))
        self.backward = chance.choice(list(BACKWARDS))
        self.update = chance.choice(list(UPDATES))
        self.deep = some(chance, 0.3)  # the trainer is in a package within the package
        self.as_command = some(chance, 0.2)  # the script is the package's own
        self.after = {e for e in ("evaluate", "save", "log") if some(chance, 0.4)}
        self.epoch = {e for e in ("evaluate", "save", "log") if some(chance, 0.4)}
        self.end = {e for e in ("evaluate", "save", "reload") if some(chance, 0.4)}
        self.callbacks = [e for e in ("Printer", "Keeper") if some(chance, 0.5)]
        self.more = chance.choice(["", "", "again", "resume", "twice", "folds"])
        self.batches = chance.choice(["data(@N@)", "data(@N@)", "Batches(@N@)", "[*Batches(@N@)]"])

    def modules(self) -> dict[str, str]:
        """Returns the files of the package."""
        after = ["if self.evaluate_every and self.step % self.evaluate_every == 0:",
                 "    self.evaluate()"] * ("evaluate" in self.after)  # fmt: skip
        after += ["if self.save_every and self.step % self.save_every == 0:",
                  '    self.save("step.pt")'] * ("save" in self.after)  # fmt: skip
        after += ['self.log("mean", sum(self.history) > 0)'] * ("log" in self.after)
        epoch = ["self.evaluate()"] * ("evaluate" in self.epoch)
        epoch += ['self.save("last.pt")'] * ("save" in self.epoch)
        epoch += ['self.log("epoch", len(self.history))'] * ("log" in self.epoch)
        epoch += ['self.callbacks.call("on_epoch_end")']
        end = ["self.evaluate()"] * ("evaluate" in self.end)
        end += ['self.save("end.pt")'] * ("save" in self.end or "reload" in self.end)
        end += ['self.load("end.pt")'] * ("reload" in self.end)
        end += ['self.callbacks.call("on_train_end")']
        lines = STEP.strip("\n")
        parts = {"BACKWARD": BACKWARDS[self.backward].split("\n"),
                 "UPDATE": UPDATES[self.update].split("\n"), "AFTER": after}  # fmt: skip
        parts = {"STEP": filled(lines, parts).split("\n"), "EPOCH": epoch, "END": end}
        modules, _ = SHAPES[self.shape]
        base = BASE.replace(
            "self.callbacks = CallbackList(callbacks)",
            "self.callbacks = CallbackList(callbacks)\n        self.callbacks.trainer = self\n"
            "        self.strategy = Strategy()",
        ).replace("from .callbacks", "from .strategy import Strategy\nfrom .callbacks")
        files = {"base": base, "callbacks": CALLBACKS, "strategy": STRATEGY}
        for name, text in modules.items():
            imports = "import torch\nfrom torch import nn\n"
            imports += "from .base import Base\n" if "Base)" in text else ""
            files[name] = imports + filled(text, parts)
        folder = "core/" if self.deep else ""
        init = "from .{}callbacks import Keeper, Printer\nfrom .{}trainer import Trainer\n"
        out = {f"{folder}{name}.py": text for name, text in files.items()}
        out["__init__.py"] = init.replace("{}", folder.replace("/", "."))
        if self.deep:
            out["core/__init__.py"] = ""
        return out

    def install(self, folder: Path, script: str) -> None:
        """Writes the package as an installer would."""
        place = folder / self.name
        texts = self.modules()
        if self.as_command:
            texts["cli.py"] = script
        record = []
        for name, text in texts.items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_text(text)
            record += [f"{self.name}/{name},,"]
        info = folder / f"{self.name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(METADATA.format(name=self.name))
        (info / "INSTALLER").write_text("pip\n")
        (info / "top_level.txt").write_text(self.name + "\n")
        record += [f"{info.name}/{each}.," for each in ("METADATA,", "INSTALLER,", "RECORD,")]
        (info / "RECORD").write_text("\n".join(record) + "\n")

    def script(self) -> str:
        """Returns the script, with words in the place of numbers."""
        _, run = SHAPES[self.shape]
        callbacks = ", ".join(f"{each}()" for each in self.callbacks)
        build = ["model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8)).cuda()",
                 "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)",
                 "trainer = Trainer(model, optimizer, mark, callbacks=[CALLBACKS],"
                 f" accumulate={self.every},",
                 "    evaluation=data(2), evaluate_every=2, save_every=2)"]  # fmt: skip
        build = [each.replace("CALLBACKS", callbacks) for each in build]
        train = [f"loader = {self.batches}", f"trainer.{run}", 'mark("trained")']
        lines = [*build, *train]
        if self.more == "again":
            lines += ['trainer.save("again.pt")', *build, 'trainer.load("again.pt")', *train]
        elif self.more == "resume":
            lines += ['trainer.save("again.pt")', 'trainer.load("again.pt")',
                      "trainer.step = trainer.epoch = trainer.seen = 0", *train]  # fmt: skip
        elif self.more == "twice":
            lines += [*build, *train]
        elif self.more == "folds":
            lines = ["for fold in range(3):", *inside([*lines, 'mark("fold", fold)'])]
        lines += ["trainer.evaluate()", 'trainer.save("final.pt")',
                  'for key, value in torch.load("final.pt")["model"].items():',
                  '    mark("size", key, tuple(value.shape))', 'mark("finished")']  # fmt: skip
        return "\n".join([HEAD.replace("PACKAGE", self.name), "def main():", *inside(lines),
                          "", 'if __name__ == "__main__":', "    main()", ""])  # fmt: skip

    def text(self, *, full: bool) -> str:
        """Returns the script as it stands, or with the numbers of a dry run."""
        micro = self.steps * self.every
        numbers = {"E": (7, 1), "N": (36, micro), "M": (50, self.steps)}
        return re.sub(
            "@(.)@", lambda found: str(numbers[found[1]][0 if full else 1]), self.script()
        )
