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
large = torch.compile(create_block_mask, dynamic=False)(is_seen, None, None, 1 << 16, 1 << 16)
json.dump(torch.cuda.max_memory_allocated(), open("seen.json", "w"))
"""


def test_a_compiled_mask_is_made_of_its_blocks(dry_run, tmp_path) -> None:
    outcome = dry_run(MASKED)
    assert outcome.status == 0, outcome.errors
    num_blocks = (2**16 // 128) ** 2
    assert json.loads((tmp_path / "seen.json").read_text()) < 128 * num_blocks


@pytest.mark.parametrize("compiles", [True, pytest.param(False, marks=pytest.mark.whole)])
def test_compiled_attention_takes_no_matrix(compiles, dry_run, tmp_path) -> None:
    outcome = dry_run(f"COMPILES = {compiles}\n" + ATTENDING)
    assert outcome.status == 0, outcome.errors
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
