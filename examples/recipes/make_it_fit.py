"""From "does not fit" to a run that fits: a LoRA and a full fine-tune, tried by dry runs.

python examples/recipes/make_it_fit.py

It makes the changes that ``residency dry-run --fit`` prints for the two, and looks whether they
fit. It takes a minute or two on two CPU cores and needs PEFT and Transformers.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[1]
XL = "--n-layer 48 --n-head 25 --n-embd 1600 --max-iters 4 --eval-interval 2 --eval-iters 2"
LINES = {  # after a line of nanogpt.py: the lines that --fit printed
    "import os\n": (
        "import residency\nimport functools\nfrom torch.utils.checkpoint import checkpoint\n"
    ),
    "model = GPT().to(device)\n": (
        "for block in model.h:  # once the model is made\n"
        "    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)\n"
    ),
    "betas=(0.9, 0.95), fused=True)\n": (
        "residency.offload_optimizer(optimizer)  # at once\n"
    ),
}


def dry_run(device, script, *arguments):
    """Returns whether a script fits a card, and the beginning of the answer."""
    options = ["dry-run", "--quiet", "--device", device, "--", "python", str(script)]
    command = [sys.executable, "-m", "residency", *options, *arguments]
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    return answer.returncode == 0, answer.stdout.partition(" with")[0]


def changed_copy(folder):
    """Returns a copy of nanogpt.py with the lines that --fit printed."""
    source = (EXAMPLES / "nanogpt.py").read_text()
    for before, lines in LINES.items():
        assert source.count(before) == 1
        source = source.replace(before, before + lines)
    copy = Path(folder, "nanogpt.py")
    copy.write_text(source)
    return copy


def main():
    lora, nanogpt = EXAMPLES / "peft_lora.py", EXAMPLES / "nanogpt.py"
    with tempfile.TemporaryDirectory() as folder:
        copy = changed_copy(folder)
        runs = {
            "LoRA of 7B, as written": ("rtx4090", lora, "--batch-size 8 --accumulation 1"),
            "LoRA of 7B, changed": ("rtx4090", lora, "--batch-size 4 --accumulation 2"),
            "GPT-2 XL in full, as written": ("l4", nanogpt, XL),
            "GPT-2 XL in full, changed": (
                "l4",
                copy,
                f"{XL} --batch-size 6 --gradient-accumulation-steps 8",
            ),
        }
        for name, (device, script, arguments) in runs.items():
            fits, line = dry_run(device, script, *arguments.split())
            print(f"{name}, on one {device}: {line}", flush=True)
            assert fits == name.endswith("changed")


if __name__ == "__main__":
    main()
