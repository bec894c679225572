"""The state of an optimizer that a script offloads: its resident part is optimizer state on the
device, and its homes are page-locked memory of the host, mapped ones, too. Memory of the host that
this machine does not have is asked for all the same.
"""

import json

SCRIPT = """
import json, torch, residency
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(24)]).cuda()
optimizer = torch.optim.AdamW(model.parameters())
residency.offload_optimizer(optimizer, bucket="4MiB", resident="40MiB")
for _ in range(2):
    model(torch.ones(8, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
figures = optimizer.statistics()
json.dump([figures.resident_bytes, figures.pinned_bytes], open("seen.json", "w"))
"""


def test_resident_state_is_optimizer_state_and_its_homes_are_page_locked(dry_run, tmp_path) -> None:
    outcome = dry_run(SCRIPT)
    assert outcome.has_run, outcome.errors
    resident, pinned = json.loads((tmp_path / "seen.json").read_text())
    assert resident > 32 << 20
    assert pinned >= 128 << 20  # so much is mapped, not allocated by torch
    assert outcome.phase("optimizer step")["at_peak"]["optimizer state"] == resident
    assert pinned <= outcome.answer["pinned_peak"] < pinned + (16 << 20)


LARGER_THAN_THE_HOST = """
import json, resource, torch, residency
from residency._transfer import _slab
_slab.available_host_bytes = lambda: 64 << 20
kind = {"bias": False, "dtype": torch.bfloat16}
base = torch.nn.Sequential(*[torch.nn.Linear(8192, 8192, **kind) for _ in range(16)])
residency.stream_frozen(base.requires_grad_(False))
head = torch.nn.Linear(8192, 32768, **kind).cuda()
optimizer = torch.optim.AdamW(head.parameters())
residency.offload_optimizer(optimizer)
for _ in range(2):
    head(base(torch.ones(8, 8192, device="cuda", dtype=torch.bfloat16))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
json.dump(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, open("seen.json", "w"))
"""


def test_a_base_and_a_state_that_are_larger_than_the_host_are_asked_for_and_never_touched(
    dry_run, tmp_path
) -> None:
    outcome = dry_run(LARGER_THAN_THE_HOST)
    assert outcome.has_run, outcome.errors
    homes = 16 * 2 * 8192**2 + 2 * 2 * 8192 * 32768
    assert outcome.answer["pinned_peak"] >= homes  # 3 GiB
    assert json.loads((tmp_path / "seen.json").read_text()) << 10 < homes // 2
    assert outcome.phase("forward")["peak_allocated"] < homes
