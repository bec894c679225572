"""A dry run publishes nothing, and leaves no value in a file that it has not computed.

A server on this machine stands for everything outside.
"""

from __future__ import annotations

import http.server
import os
import threading
from collections.abc import Iterator

import pytest

TRAIN = """
import urllib.request, os, torch
net = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(5):
    loss = net(torch.randn(8, 64).cuda()).square().mean()
    loss.backward()
    optimizer.step()
    print(loss.item())
url = os.environ["SERVER"] + "/model"
"""
PUT = """
assert urllib.request.urlopen(url).read() == b"there"
try:
    urllib.request.urlopen(urllib.request.Request(url, data=b"weights", method="PUT"))
except OSError as error:
    assert "a dry run sends nothing" in str(error)
else:
    raise AssertionError
"""
PUSH = """
import huggingface_hub
open("weights.bin", "w").write("1")
api = huggingface_hub.HfApi(endpoint=os.environ["SERVER"], token="hf_x")
assert huggingface_hub.create_repo("me/model", token="hf_x").repo_id == "me/model"
assert api.create_repo(repo_id="me/model", exist_ok=True).repo_id == "me/model"
done = api.upload_folder(repo_id="me/model", folder_path=".", run_as_future=True)
assert "me/model" in done.result().commit_url
huggingface_hub.upload_file(
    path_or_fileobj="weights.bin", path_in_repo="w", repo_id="me/model", token="hf_x"
)
api.delete_file("w", "me/model")
"""
TRACKED = """

assert os.environ["WANDB_MODE"] == "offline"
"""


class _Handler(http.server.BaseHTTPRequestHandler):
    """Counts what is sent, and answers what is asked."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"there")

    def do_PUT(self) -> None:
        self.server.sent.append(self.path)  # type: ignore[attr-defined]
        self.do_GET()

    def do_POST(self) -> None:
        self.do_PUT()

    def do_DELETE(self) -> None:
        self.do_PUT()

    def log_message(self, *args: object) -> None:
        """Prints nothing."""


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.sent = []  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    for name in ("SERVER", "HF_ENDPOINT"):
        monkeypatch.setenv(name, address)
    for name in ("WANDB_MODE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    yield server.sent  # type: ignore[attr-defined]
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("script", [PUT, PUSH, TRACKED], ids=["put", "push", "tracked"])
def test_nothing_is_published(dry_run, sent: list[str], script: str) -> None:
    assert "SERVER" in os.environ
    outcome = dry_run(TRAIN + script, options=("--capacity", "4GiB"))
    assert outcome.status == 0, outcome.errors
    assert outcome.answer["ended"] == "finished", outcome.errors
    assert sent == []


CACHES = """
import json, pickle, sys, numpy
from pathlib import Path
Path("early").mkdir()
numpy.save("early/split.npy", numpy.arange(9))
exec(sys.argv[1])
features = net(torch.ones(2, 64).cuda()).detach().cpu().numpy()
Path("late").mkdir()
Path("both").mkdir()
numpy.save("late/features.npy", features)
numpy.savez("both/features.npz", features=features)
pickle.dump({"net": net.state_dict(), "epoch": 3}, open("snapshot.pkl", "wb"))
Path("both/state.json").write_text("{}")
Path("log.txt").write_text("loss 1.0 \\u00e9")
json.dump({"loss": 1.0}, open("figures.json", "w"))
torch.save(net.state_dict(), "model_1.pth")
Path("last_checkpoint").write_text("model_1.pth")
pickle.dump(features, open("moved.tmp", "wb"))
Path("moved.tmp").rename("moved.pkl")
"""


def test_values_that_were_not_computed_stay_in_no_file(dry_run, tmp_path) -> None:
    script = CACHES.replace("exec(sys.argv[1])", TRAIN.replace('os.environ["SERVER"]', '""'))
    outcome = dry_run(script, options=("--capacity", "4GiB"))
    assert outcome.status == 0, outcome.errors
    names = {str(each.relative_to(tmp_path)) for each in tmp_path.rglob("*")}
    assert {"early/split.npy", "log.txt", "figures.json"} <= names
    gone = ("both", "late", "last_checkpoint", "model_1.pth", "snapshot.pkl", "moved")
    assert [name for name in names if name.startswith(gone)] == []
