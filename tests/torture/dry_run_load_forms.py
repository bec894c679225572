"""Forms in which people read a checkpoint and put it into what they have, as templates.

``PATH`` is the file's name, ``INTO`` the module that takes a state, ``state`` the state itself.
"""

from __future__ import annotations

# How a file is read: an expression, and whether its tensors come to the device where they were.
READS = {
    "plain": ("torch.load(PATH)", True),
    "host": ('torch.load(PATH, map_location="cpu")', False),
    "device": ('torch.load(PATH, map_location="cuda")', True),
    "object": ("torch.load(PATH, map_location=device)", True),
    "weights": ("torch.load(PATH, map_location=device, weights_only=True)", True),
    "unsafe": ('torch.load(PATH, map_location="cpu", weights_only=False)', False),
    "function": ("torch.load(PATH, map_location=lambda storage, place: storage)", False),
    "dictionary": ('torch.load(PATH, map_location={"cuda:0": "cpu"})', False),
    "mapped": ('torch.load(PATH, map_location="cpu", mmap=True)', False),
    "memory": ('torch.load(io.BytesIO(open(PATH, "rb").read()), map_location="cpu")', False),
    "opened": ('torch.load(open(PATH, "rb"), map_location="cuda")', True),
}
TENSORS_ALONE = {
    "file": ('safetensors.torch.load_file(PATH, device="cuda")', True),
    "host file": ("safetensors.torch.load_file(PATH)", False),
    "opened": ("read_tensors(PATH)", False),
}

# How a model takes the state that was read.
PUTS = {
    "plain": "INTO.load_state_dict(state)",
    "loose": "INTO.load_state_dict(state, strict=False)",
    "moved": "INTO.load_state_dict({k: v.to(device) for k, v in state.items()})",
    "renamed": 'INTO.load_state_dict({k.removeprefix("module."): v for k, v in state.items()})',
    "cast": "INTO.load_state_dict({k: v.double() for k, v in state.items()})",
    "filtered": """
own = INTO.state_dict()
own.update({k: v for k, v in state.items() if k in own and own[k].shape == v.shape})
INTO.load_state_dict(own)
del own
""",
    "part": """
for name in ("stem", "head"):
    part = {k[len(name) + 1:]: v for k, v in state.items() if k.startswith(name + ".")}
    getattr(INTO, name).load_state_dict(part)
del part
""",
    "copied": """
with torch.no_grad():
    for name, p in INTO.named_parameters():
        p.copy_(state[name])
""",
    "data": """
for name, p in INTO.named_parameters():
    p.data.copy_(state[name])
""",
    "ordered": """
INTO.load_state_dict(OrderedDict((k, v) for k, v in state.items()), strict=True)
""",
    "checkpoint": "set_model_state_dict(INTO, state)",
}

# Where the lines of a load stand.
PLACES = {
    "inline": ("", ""),
    "function": ("def NAME(ARGS):\nBODY", "NAME(ARGS)"),
    "class": (
        "class As_NAME:\n    def __init__(self, *given):\n        self.given = given\n\n"
        "    def load(self):\n        ARGS, = self.given\nINNER",
        "As_NAME(ARGS).load()",
    ),
    "thread": (
        "def NAME(ARGS):\nBODY",
        "worker = threading.Thread(target=NAME, args=(ARGS,))\nworker.start()\nworker.join()\n"
        "del worker",
    ),
    "pool": (
        "def NAME(ARGS):\nBODY",
        "with ThreadPoolExecutor(1) as pool:\n    pool.submit(NAME, ARGS).result()\ndel pool",
    ),
}

HEAD = '''"""A training script."""
import copy, gc, io, os, re, threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
import safetensors.torch
import torch, torch.nn as nn, torch.nn.functional as F
from safetensors import safe_open
from torch.distributed.checkpoint.state_dict import set_model_state_dict

device = torch.device("cuda")
open("marks.txt", "a").close()  # a dry run removes files made after a save
if torch.cuda.is_available():
    open("held.txt", "a").close()


def mark(*words):
    with open("marks.txt", "a") as file:
        print(*words, file=file)


def held():
    gc.collect()
    if torch.cuda.is_available():
        with open("held.txt", "a") as file:
            print(torch.cuda.memory_allocated(), file=file)


def read_tensors(path):
    with safe_open(path, framework="pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}


def batches(count):
    for _ in range(count):
        yield torch.randn(4, 16), torch.randn(4, 8)


def evaluate(model):
    model.eval()
    with torch.no_grad():
        for x, y in batches(3):
            model(x.cuda())
    model.train()
    mark("evaluated")
'''

MODEL = """
class Net(nn.Module):
    def __init__(self, width={width}):
        super().__init__()
        self.stem = nn.Linear(16, width)
        self.norm = nn.BatchNorm1d(width)
        self.blocks = nn.ModuleList({block} for _ in range({depth}))
        self.head = nn.Linear(width, 8)

    def forward(self, x):
        x = self.norm(self.stem(x))
        for block in self.blocks:
            x = F.gelu(block(x))
        return self.head(x)
"""

ADAPTED = """
class Adapted(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.base = nn.Linear(width, width)
        self.base.requires_grad_(False)
        self.lora_a = nn.Linear(width, 4, bias=False)
        self.lora_b = nn.Linear(4, width, bias=False)

    def forward(self, x):
        return self.base(x) + self.lora_b(self.lora_a(x))
"""
