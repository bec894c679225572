"""The state of an optimizer that a script offloads: its resident part is optimizer state on the
device, and its homes are page-locked memory of the host, mapped ones, too."""

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
