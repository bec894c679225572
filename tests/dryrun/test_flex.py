"""FlexAttention takes what its compiled kernel takes, where a script compiles it."""

import json

import pytest

MIB = 2**20

ATTENDING = """
import json, torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
if COMPILES:
    flex_attention = torch.compile(flex_attention)
def made(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
query = made(2, 2048, 8, 64).transpose(1, 2)  # as projections give it
key, value = (made(2, 4, 2048, 64) for _ in range(2))
slopes = torch.randn(8, device="cuda")
def score(score, b, h, q, k):
    return score + slopes[h] * (k - q)
mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 2048, 2048)
torch.cuda.reset_peak_memory_stats()
before = torch.cuda.memory_allocated()
out = flex_attention(query, key, value, score_mod=score, block_mask=mask, enable_gqa=True)
assert out.shape == query.shape and out.stride() == query.stride()
seen = [torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before]
out.sum().backward()
assert key.grad.shape == key.shape
seen.append(torch.cuda.max_memory_allocated() - before)
json.dump(seen, open("seen.json", "w"))
"""

MASKED = """
import json, torch
from torch.nn.attention.flex_attention import create_block_mask
documents = torch.zeros(1 << 16, dtype=torch.int32, device="cuda")
def is_seen(b, h, q, k):
    return (q >= k) & (documents[q] == documents[k])
plain = create_block_mask(is_seen, None, 2, 2000, 1000, BLOCK_SIZE=(128, 64))
lengths = None, 2, 2000, 1000
for fused in (
    torch.compile(create_block_mask)(is_seen, *lengths, BLOCK_SIZE=(128, 64)),
    create_block_mask(is_seen, *lengths, BLOCK_SIZE=(128, 64), _compile=True),
):
    for each in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_q_indices"):
        one, other = getattr(plain, each), getattr(fused, each)
        assert one.shape == other.shape and one.dtype == other.dtype, each
    assert fused.shape == plain.shape and fused.mask_mod is is_seen
torch.cuda.reset_peak_memory_stats()  # plain masks sum truth values as 64-bit whole numbers
large = torch.compile(create_block_mask, dynamic=False)(is_seen, None, None, 1 << 16, 1 << 16)
json.dump(torch.cuda.max_memory_allocated(), open("seen.json", "w"))
"""


def test_a_compiled_mask_is_made_of_its_blocks(dry_run, tmp_path) -> None:
    outcome = dry_run(MASKED)
    assert outcome.has_run, outcome.errors
    num_blocks = (2**16 // 128) ** 2
    assert json.loads((tmp_path / "seen.json").read_text()) < 128 * num_blocks


@pytest.mark.parametrize("compiles", [True, pytest.param(False, marks=pytest.mark.whole)])
def test_compiled_attention_takes_no_matrix(compiles, dry_run, tmp_path) -> None:
    outcome = dry_run(f"COMPILES = {compiles}\n" + ATTENDING)
    assert outcome.has_run, outcome.errors
    held, peak, peak_of_all = json.loads((tmp_path / "seen.json").read_text())
    out, rows = 2 * 8 * 2048 * 64 * 2, 2 * 8 * 2048 * 4
    matrix = 2 * 8 * 2048 * 2048 * 4
    # Of the greatest scores no gradient is asked.
    if compiles:
        assert out + rows <= held <= peak <= out + 2 * rows + MIB
        assert peak_of_all < 4 * out + 8 * rows + MIB
        assert outcome.phase("backward")["visits"] == 1
    else:
        assert peak > matrix


CALLING = """
import json, torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint
seen, LENGTH = {}, 1024

class Layer(nn.Module):
    def __init__(self, makes_mask=False, keeps=True):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(4, 2 * LENGTH, device="cuda", dtype=torch.bfloat16))
        self.makes_mask, self.keeps = makes_mask, keeps
    def attend(self, x):
        def score(score, b, h, q, k):
            return score + self.bias[h, q - k]
        mask = None
        if self.makes_mask:
            mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, LENGTH, LENGTH)
        return flex_attention(x, x, x, score_mod=score, block_mask=mask)
    def forward(self, x):
        return self.attend(x) if self.keeps else checkpoint(self.attend, x, use_reentrant=False)

def run(name, layer, call=None):
    x = torch.zeros(1, 4, LENGTH, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    (layer if call is None else call)(x).sum().backward()
    seen[name] = torch.cuda.max_memory_allocated() - before
    assert layer.bias.grad.shape == layer.bias.shape, name
    assert layer.bias.grad.dtype == layer.bias.dtype, name

compiled = torch.compile(Layer())
run("module", compiled._orig_mod, compiled)
run("plain", Layer())
own = Layer()
own.compile()
run("own", own)
within = Layer()
run("decorated", within, torch.compile(dynamic=False)(lambda x: within(x)))
mask = Layer(makes_mask=True)
run("mask", mask, torch.compile(mask))
run("plain mask", mask)
again = Layer(keeps=False)
run("again", again, torch.compile(again))
run("plain again", again)
graph = Layer()
run("graph", graph, torch.compile(graph, backend="aot_eager"))

def fails(x):
    raise ValueError
try:
    torch.compile(fails)(1)
except ValueError:
    run("plain after an error", Layer())
json.dump(seen, open("seen.json", "w"))
"""


def test_attention_is_fused_within_what_is_compiled_and_nowhere_else(dry_run, tmp_path) -> None:
    outcome = dry_run(CALLING)
    assert outcome.has_run, outcome.errors
    seen = json.loads((tmp_path / "seen.json").read_text())
    matrix = 4 * 1024 * 1024 * 4
    fused = {name for name, peak in seen.items() if peak < matrix}
    assert fused == {"module", "own", "decorated", "mask", "again"}, seen
    for name in seen.keys() - fused:
        assert seen[name] > 3 * matrix, name


FEW_QUERIES = """
import json, torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
fused = torch.compile(flex_attention)
query = torch.zeros(1, 8, 1, 128, device="cuda", dtype=torch.bfloat16)
key = torch.zeros(1, 2, 4096, 128, device="cuda", dtype=torch.bfloat16)
seen = []
for options in ({}, {"FORCE_USE_FLEX_ATTENTION": True}, {"BACKEND": "TRITON"}):
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    fused(query, key, key, enable_gqa=True, kernel_options=options)
    seen.append(torch.cuda.memory_stats()["requested_bytes.all.peak"] - before)
json.dump(seen, open("seen.json", "w"))
"""


def test_the_keys_of_a_few_queries_are_split(dry_run, tmp_path) -> None:
    outcome = dry_run(FEW_QUERIES, options=("--device", "l4"))
    assert outcome.has_run, outcome.errors
    split, *whole = json.loads((tmp_path / "seen.json").read_text())
    num_splits = 58 // 2 * 2  # multiprocessors, over heads of keys; two for each
    parts = num_splits * 8 * (128 + 2) * 4
    assert parts <= split < parts + 8 * 128 * 4
    assert max(whole) < 8 * 128 * 4


LEARNING = """
import json, math, torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
torch.manual_seed(0)
query, key, value = (torch.randn(2, 2, 16, 16, device="cuda") for _ in range(3))
tables = torch.randn(2, 16, 16, device="cuda").requires_grad_(), torch.randn(31, device="cuda")
tables[1].requires_grad_()
def score(score, b, h, q, k):
    return score + tables[0][h, q, k] * 2 + tables[1][q - k + 15]
mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 16, 16)
def learn(attend):
    out = attend(query, key, value, score_mod=score, block_mask=mask)
    return torch.autograd.grad((out * value).sum(), tables)
seen = [learn(flex_attention), learn(torch.compile(flex_attention)), learn(flex_attention)]
places = torch.arange(16, device="cuda")
scores = query @ key.mT / 4 + tables[0] * 2 + tables[1][places[:, None] - places + 15]
scores = scores.masked_fill(places[:, None] < places, -math.inf)
out = scores.softmax(-1) @ value
true = torch.autograd.grad((out * value).sum(), tables)
for each in seen:
    for found, expected in zip(each, true):
        torch.testing.assert_close(found, expected)
"""


def test_captured_tensors_get_their_gradients_before_and_after_a_script_compiles(dry_run) -> None:
    outcome = dry_run(LEARNING, options=("--real", "--capacity", "1GiB", "--steps", "0"))
    assert outcome.has_run, outcome.errors
