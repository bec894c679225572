"""What a dry run costs, beside other estimators of the same run, each in a process of its own.

A language model of transformers from its configuration: bfloat16, gradient checkpointing, fused
AdamW, two steps of one sequence of 2,048 tokens (`benchmarks/scripts/causal_lm.py`). Beside
``residency dry-run``: ``accelerate estimate-memory``, by its own functions, as its command asks the
hub for a name; and torch's `MemTracker` under fake tensors of the CPU, where it runs without a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "benchmarks" / "scripts"
MODELS = {
    "Qwen3-8B": SCRIPTS / "qwen3_8b.json",
    "Llama-3-70B": SCRIPTS / "llama3_70b.json",
}
LENGTH = 2048
GIB, MIB = 1 << 30, 1 << 20
_LIMIT = 120.0  # seconds, for each
_OUT_OF_TIME = 124  # the status of `timeout`


@dataclass(frozen=True)
class Cost:
    """What an estimate took, and its last line of output."""

    seconds: float
    host_bytes: int
    said: str


def main() -> None:
    """Prints a Markdown table for each model."""
    if "--peer" in sys.argv:
        print(PEERS[sys.argv[2]](Path(sys.argv[3])))
        return
    for name, config in MODELS.items():
        print(f"{name}: bfloat16, checkpointing, fused AdamW, 2 steps of 1 x {LENGTH} tokens\n")
        print("| estimator | seconds | host memory, MiB | what it says |")
        print("|---|---:|---:|---|")
        dry = [sys.executable, "-m", "residency", "dry-run", "--capacity", "2TiB", "--json", "--"]
        dry += [sys.executable, str(SCRIPTS / "causal_lm.py"), str(config)]
        show("residency dry-run", measure(dry, said=_said_by_dry_run))
        for peer in PEERS:
            command = [sys.executable, "-m", "benchmarks.bench_dry_run_cost", "--peer", peer]
            show(peer, measure([*command, str(config)]))
        print()
    print("Seconds are of the whole process, imports included; host memory is the largest resident")
    print("set, of the largest of its processes. Targets: 8B under 10 s; 70B under 60 s and 2 GiB.")


def show(name: str, cost: Cost) -> None:
    """Prints a row."""
    row = f"| {name} | {cost.seconds:.1f} | {cost.host_bytes / MIB:.0f} | {cost.said} |"
    print(row, flush=True)


def measure(command: list[str], *, said: Callable[[str], str] | None = None) -> Cost:
    """Runs a command to its end."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    limited = ["timeout", str(_LIMIT), *command]
    started = time.monotonic()
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(limited, cwd=ROOT, env=environment, stdout=output, stderr=errors)
        # Of the process and of all that it has waited for; in KiB on Linux.
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.monotonic() - started
        lines, complaints = _lines(output), _lines(errors)
    if process.returncode == _OUT_OF_TIME:
        text = f"nothing in {_LIMIT:.0f} s"
    elif process.returncode or not lines:
        text = f"failed: {complaints[-1][:200] if complaints else process.returncode}"
    else:
        text = lines[-1] if said is None else said(lines[-1])
    return Cost(seconds, usage.ru_maxrss * 1024, text)


def _lines(file: IO[bytes]) -> list[str]:
    file.seek(0)
    return file.read().decode().strip().splitlines()


def _said_by_dry_run(line: str) -> str:
    answer = json.loads(line)
    return (
        f"peak allocated {answer['peak_allocated_bytes'] / GIB:.2f} GiB, "
        f"reserved {answer['peak_reserved_bytes'] / GIB:.2f} GiB"
    )


def _accelerate(path: Path) -> str:
    import torch
    from accelerate import init_empty_weights
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**json.loads(path.read_text()))
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    total, _ = calculate_maximum_sizes(model)
    said = []
    for dtype in ("float32", "float16"):
        usage = estimate_training_usage(total, dtype)
        said.append(f"{dtype} with Adam {max(usage.values()) / GIB:.2f} GiB")
    return "training peak, without activations: " + ", ".join(said)


def _mem_tracker(path: Path) -> str:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker
    from transformers import AutoConfig, AutoModelForCausalLM

    config: Any = AutoConfig.for_model(**json.loads(path.read_text()))
    with FakeTensorMode():
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.gradient_checkpointing_enable()
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        tokens = torch.randint(config.vocab_size, (1, LENGTH))
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            for _ in range(2):
                tracker.reset_mod_stats()
                model(input_ids=tokens, labels=tokens).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    peak = tracker.get_tracker_snapshot("peak")
    total = max(each["Total"] for each in peak.values())
    return f"peak allocated {total / GIB:.2f} GiB"


PEERS: dict[str, Callable[[Path], str]] = {
    "accelerate estimate-memory": _accelerate,
    "torch MemTracker, fake CPU tensors": _mem_tracker,
}


if __name__ == "__main__":
    main()
