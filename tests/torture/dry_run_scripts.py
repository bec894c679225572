"""Writes random training scripts that say ``cuda``, in the style that people write them.

A script knows nothing of residency. It keeps its own record with torch's own figures
(``max_memory_allocated``, ``max_memory_reserved``) and appends it to ``record.jsonl``. What its
tensors take follows from shapes: ``Bytes`` counts them on the meta device.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from training_programs import some

LINE = 512  # bytes that torch's allocator rounds to
SPLIT = 1 << 20  # what is larger may get a block with so much more, which is not split

MODELS = {
    "mlp": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear({width}, {width}), nn.GELU(), nn.LayerNorm({width}))
            for _ in range({depth}))
        self.head = nn.Linear({width}, {classes})

    def forward(self, x):
        for block in self.blocks:
            x = CALL(block, x)
        return self.head(x)
""",
    "convolutions": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, {channels}, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d({channels}, {channels}, 3, padding=1, bias=False),
                          nn.BatchNorm2d({channels}), nn.ReLU(inplace=True))
            for _ in range({depth}))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Dropout(0.1),
                                  nn.Linear(16 * {channels}, {classes}))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = CALL(block, x)
        return self.head(x)
""",
    "transformer": """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm({width}), nn.LayerNorm({width})
        self.qkv, self.out = nn.Linear({width}, 3 * {width}), nn.Linear({width}, {width})
        self.mlp = nn.Sequential(nn.Linear({width}, 4 * {width}), nn.GELU(),
                                 nn.Linear(4 * {width}, {width}))

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(self.ln_1(x)).split(C, dim=2)
        q, k, v = (t.view(B, T, 4, C // 4).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp(self.ln_2(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Embedding({classes}, {width})
        self.blocks = nn.ModuleList(Block() for _ in range({depth}))
        self.head = nn.Linear({width}, {classes}, bias=False)
        self.register_buffer("positions", torch.arange({length}))
        if {tied}:
            self.head.weight = self.stem.weight

    def forward(self, x):
        x = self.stem(x)
        x = x + (self.positions / {length}).unsqueeze(-1).to(x.dtype)
        for block in self.blocks:
            x = CALL(block, x)
        return self.head(x)
""",
}

# name: its settings, and the states of a parameter's size that it keeps on the device.
OPTIMIZERS: dict[str, list[tuple[dict[str, Any], int]]] = {
    "SGD": [({}, 0), ({"momentum": 0.9}, 1), ({"momentum": 0.9, "nesterov": True}, 1)],
    "Adam": [({}, 2), ({"amsgrad": True}, 3), ({"foreach": False}, 2)],
    "AdamW": [({}, 2), ({"weight_decay": 0.1}, 2), ({"fused": True}, 2)],
    "RMSprop": [({}, 1), ({"momentum": 0.9, "centered": True}, 3)],
    "Adagrad": [({}, 1)],
    "Adamax": [({}, 2)],
    "NAdam": [({}, 2)],
    "RAdam": [({}, 2)],
    "Adadelta": [({}, 2)],
}


def slack(tensors: list[torch.Tensor]) -> int:
    """Returns the most by which the blocks of tensors are larger than the tensors."""
    return sum(SPLIT for each in tensors if each.nbytes > SPLIT)


def rounded(num_bytes: int) -> int:
    return -(-num_bytes // LINE) * LINE


@dataclass(frozen=True)
class Bytes:
    """What a script's owners take on the device, by arithmetic from shapes."""

    parameters: int
    trained: int
    counts: int
    slack: int

    @classmethod
    def of(cls, model: torch.nn.Module) -> Bytes:
        own = [*model.parameters(), *model.buffers()]
        trained = [each for each in own if each.requires_grad]
        held, gradients = (sum(rounded(each.nbytes) for each in of) for of in (own, trained))
        return cls(held, gradients, len(trained), slack(own))


class Script:
    """A random script: its text, and what is known of it."""

    def __init__(self, chance: random.Random) -> None:
        self.kind = chance.choice(list(MODELS))
        self.width = chance.choice([96, 128, 200, 256])
        self.sizes = {
            "width": self.width,
            "depth": chance.randint(1, 5),
            "classes": chance.choice([10, 77, 1000]),
            "channels": chance.choice([8, 24, 33]),
            "length": 64,
            "tied": some(chance, 0.5),
        }
        self.batch = chance.choice([2, 3, 8])
        self.precision = chance.choice(["fp32", "fp32", "bf16", "fp16", "pure"])
        self.optimizer = chance.choice(list(OPTIMIZERS))
        self.settings, self.states = chance.choice(OPTIMIZERS[self.optimizer])
        self.accumulation = chance.choice([1, 1, 2, 3])
        self.frozen = some(chance, 0.3)
        self.ema = some(chance, 0.25)
        self.clips = some(chance, 0.4)
        self.is_checkpointed = some(chance, 0.3)
        self.evaluates = some(chance, 0.5)
        self.collects = some(chance, 0.3)
        self.to_none = some(chance, 0.7)
        self.compiles = some(chance, 0.2)
        self.loop = chance.choice(["range", "loader", "epochs", "while"])
        self.saves = some(chance, 0.6)
        self.clones = self.saves and some(chance, 0.3)
        self.resume = chance.choice(["", "same", "fresh", "host"]) if self.saves else ""
        self.in_main = some(chance, 0.5)
        self.steps = chance.choice([2, 2, 2, 1, 3])

    def model_text(self) -> str:
        call = "lambda block, x: block(x)"
        if self.is_checkpointed:
            call = "lambda block, x: checkpoint(block, x, use_reentrant=False)"
        return f"CALL = {call}\n" + MODELS[self.kind].format(**self.sizes)

    def bytes(self) -> Bytes:
        """Builds the model on the meta device and counts."""
        names: dict[str, Any] = {"torch": torch, "nn": torch.nn, "F": torch.nn.functional}
        names |= {"checkpoint": None, "__name__": "script"}
        exec(self.model_text(), names)
        with torch.device("meta"):
            model = names["Net"]()
        if self.precision == "pure":
            model = model.bfloat16()
        if self.frozen:
            model.stem.requires_grad_(False) if self.kind != "mlp" else model.head.requires_grad_(
                False
            )
        return Bytes.of(model)

    def state_bytes(self, counted: Bytes) -> int:
        state = self.states * counted.trained
        if self.settings.get("fused"):
            state += counted.counts * LINE  # the counters of fused steps are on the device
        return state

    def text(self) -> str:
        lines = [*self._head(), self.model_text(), *self._tools()]
        body = [*self._set_up(), *self._training(), *self._after()]
        if self.in_main:
            lines += ["def main():", *("    " + each for each in body), "", "guarded(main)"]
        else:
            lines += ["with Guard():", *("    " + each for each in body)]
        return "\n".join(lines) + "\n"

    def _head(self) -> Iterator[str]:
        yield "import argparse, copy, json, os, sys, traceback"
        yield "import torch, torch.nn as nn, torch.nn.functional as F"
        yield "from torch.utils.checkpoint import checkpoint"
        yield "parser = argparse.ArgumentParser()"
        yield f'parser.add_argument("--batch-size", type=int, default={self.batch})'
        yield "args = parser.parse_args()"
        yield 'device = torch.device("cuda")'
        yield "torch.manual_seed(0)"

    def _tools(self) -> list[str]:
        return RECORD.strip("\n").split("\n")

    def _data(self, where: str) -> tuple[str, str]:
        classes, length = self.sizes["classes"], self.sizes["length"]
        if self.kind == "transformer":
            x = f"torch.randint({classes}, (args.batch_size, {length}){where})"
            return x, f"torch.randint({classes}, (args.batch_size, {length}){where})"
        shape = f"{self.width}" if self.kind == "mlp" else "3, 20, 20"
        x = f"torch.randn(args.batch_size, {shape}{where})"
        return x, f"torch.randint({classes}, (args.batch_size,){where})"

    def _set_up(self) -> Iterator[str]:
        yield "model = Net()"
        if self.precision == "pure":
            yield "model = model.bfloat16()"
        yield "model.to(device)" if self.batch != 3 else "model = model.cuda()"
        if self.frozen:
            yield f"model.{'head' if self.kind == 'mlp' else 'stem'}.requires_grad_(False)"
        if self.ema:
            yield "ema = copy.deepcopy(model)"
            yield "ema.requires_grad_(False)"
        if self.compiles:
            yield "model = torch.compile(model)"
        settings = "".join(f", {name}={value!r}" for name, value in self.settings.items())
        yield "trained = [p for p in model.parameters() if p.requires_grad]"
        yield f"optimizer = torch.optim.{self.optimizer}(trained, lr=1e-3{settings})"
        if self.precision == "fp16":
            yield "scaler = torch.amp.GradScaler('cuda', init_scale=16.0)"
        if self.loop in ("loader", "epochs"):
            x, y = (
                each.replace("args.batch_size", "12 * args.batch_size") for each in self._data("")
            )
            yield f"dataset = torch.utils.data.TensorDataset({x}, {y})"
            yield "loader = torch.utils.data.DataLoader(dataset, args.batch_size, shuffle=True,"
            yield f"    drop_last=True, pin_memory={self.accumulation == 1})"
        yield "kept, done = [], 0"

    def _batch(self) -> Iterator[str]:
        if self.loop in ("loader", "epochs"):
            yield "x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)"
        else:
            x, y = self._data(", device=device")
            yield f"x, y = {x}, {y}"
        if self.precision == "pure" and self.kind != "transformer":
            yield "x = x.bfloat16()"

    def _loss(self, scale: int) -> Iterator[str]:
        yield "out = model(x)"
        yield "loss = F.cross_entropy(out.flatten(0, -2), y.flatten())" + (
            f" / {scale}" if scale > 1 else ""
        )

    def _step(self) -> Iterator[str]:
        yield "mark()"
        wrapped = self.precision in ("bf16", "fp16")
        if wrapped:
            kind = "bfloat16" if self.precision == "bf16" else "float16"
            yield f"with torch.autocast('cuda', dtype=torch.{kind}):"
        yield from (("    " if wrapped else "") + each for each in self._loss(self.accumulation))
        yield "mark('forward')"
        yield ("scaler.scale(loss)" if self.precision == "fp16" else "loss") + ".backward()"
        yield "mark('backward')"
        if self.collects:
            yield "kept.append(out.detach())"

    def _update(self) -> Iterator[str]:
        if self.clips:
            if self.precision == "fp16":
                yield "scaler.unscale_(optimizer)"
            yield "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
        yield "mark()"
        if self.precision == "fp16":
            yield "scaler.step(optimizer)"
            yield "scaler.update()"
        else:
            yield "optimizer.step()"
        yield "mark('optimizer step')"
        yield f"optimizer.zero_grad(set_to_none={self.to_none})"
        yield "done += 1"
        if self.ema:
            yield "with torch.no_grad():"
            yield "    for a, b in zip(ema.parameters(), model.parameters()):"
            yield "        a.lerp_(b, 0.01)"
        yield "print('step', done, 'loss', round(loss.item(), 3))"

    def _training(self) -> Iterator[str]:
        heads = {
            "range": ["for i in range(30):"],
            "loader": ["for i, (x, y) in enumerate(loader):"],
            "epochs": ["for epoch in range(3):", "    for i, (x, y) in enumerate(loader):"],
            "while": ["i = -1", "while i < 40:"],
        }[self.loop]
        yield from heads
        pad = "    " * (2 if self.loop == "epochs" else 1)
        if self.loop == "while":
            yield pad + "i += 1"
        yield from (pad + each for each in (*self._batch(), *self._step()))
        if self.accumulation > 1:
            yield f"{pad}if (i + 1) % {self.accumulation} == 0:"
            yield from (pad + "    " + each for each in self._update())
        else:
            yield from (pad + each for each in self._update())
        yield "x = y = out = loss = None"

    def _after(self) -> Iterator[str]:
        yield "mark()"
        if self.evaluates:
            yield "model.eval()"
            yield "with torch.no_grad():"
            yield "    for _ in range(2):"
            yield from ("        " + each for each in (*self._batch_of_its_own(), "out = model(x)"))
            yield "model.train()"
        if self.saves:
            state = "{'model': model.state_dict(), 'optimizer': optimizer.state_dict()}"
            yield f"state = {'copy.deepcopy(' + state + ')' if self.clones else state}"
            yield "torch.save(state, 'last.pt')"
            yield "RECORD['size'] = os.path.getsize('last.pt')"
            yield "del state"
        if self.resume:
            where = "'cpu'" if self.resume == "host" else "device"
            yield f"state = torch.load('last.pt', map_location={where})"
            if self.resume == "fresh":
                yield "del model, optimizer, trained"
                yield from (each for each in self._set_up_again())
            yield "model.load_state_dict(state['model'])"
            yield "optimizer.load_state_dict(state['optimizer'])"
            yield "del state"
        yield "RECORD['done'] = done"

    def _set_up_again(self) -> Iterator[str]:
        lines = list(self._set_up())
        end = next(i for i, each in enumerate(lines) if each.startswith("optimizer ="))
        yield from lines[: end + 1]

    def _batch_of_its_own(self) -> Iterator[str]:
        x, _ = self._data(", device=device")
        yield f"x = {x}"
        if self.precision == "pure" and self.kind != "transformer":
            yield "x = x.bfloat16()"


RECORD = """
RECORD = {"phases": {}, "peak": 0, "reserved": 0, "line": None, "size": 0}


def mark(name=None):
    peak = torch.cuda.max_memory_allocated()
    RECORD["peak"] = max(RECORD["peak"], peak)
    RECORD["reserved"] = max(RECORD["reserved"], torch.cuda.max_memory_reserved())
    if name:
        RECORD["phases"][name] = max(RECORD["phases"].get(name, 0), peak)
    torch.cuda.reset_peak_memory_stats()


class Guard:
    def __enter__(self):
        pass

    def __exit__(self, kind, error, trace):
        if isinstance(error, torch.OutOfMemoryError):
            own = [e.lineno for e in traceback.extract_tb(trace) if e.filename.endswith("train.py")]
            RECORD["line"] = own[-1]
        mark()
        with open("record.jsonl", "a") as file:
            file.write(json.dumps(RECORD) + "\\n")


def guarded(main):
    with Guard():
        main()


"""
