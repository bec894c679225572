"""Training scripts as people write them, in ``examples/``, each through ``residency dry-run``."""

from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
COMMON = {"set up", "forward", "backward", "optimizer step"}
# Small enough for a test, with what comes after the training; the phases that must be seen besides.
RUNS = {
    "nanogpt.py": ("--max-iters 2 --eval-interval 2 --eval-iters 2", {"evaluate", "save"}),
    "hf_trainer.py": (
        "--num-layers 2 --max-steps 2 --eval-steps 2 --accumulation 2",
        {"evaluate", "save"},
    ),
    "peft_lora.py": ("--size tiny --num-examples 8", {"save", "load", "generate"}),
    "trl_sft.py": ("--max-steps 2 --num-layers 2", {"save"}),
    "lightning_gpt.py": ("--max-steps 2 --num-sequences 48 --n-layer 2", {"save", "load"}),
    "accelerate_loop.py": ("--epochs 1 --train-size 64 --eval-size 16", {"evaluate", "save"}),
    "fsdp2.py": ("--steps 2 --n-layers 2", {"save"}),
    "ddp.py": ("--epochs 1 --num-images 128", {"save"}),
    "diffusion_unet.py": ("--epochs 1 --num-images 64", {"save"}),
    "vit_ema.py": ("--epochs 1 --num-images 128", {"save"}),
    "image_classification.py": ("--amp --epochs 1 --num-images 256", {"evaluate", "save"}),
}


def test_every_example_is_tried() -> None:
    assert {file.name for file in EXAMPLES.glob("*.py")} == set(RUNS)


@pytest.mark.whole
@pytest.mark.parametrize("name", RUNS)
def test_an_example_runs_to_its_end_on_a_simulated_gpu(dry_run, name: str) -> None:
    flags, besides = RUNS[name]
    options = ("--device", "h100", "--steps", "0")
    outcome = dry_run(EXAMPLES / name, *flags.split(), options=options)
    assert outcome.status == 0, outcome.errors
    answer = outcome.answer
    assert answer["ended"] == "finished", outcome.errors
    assert answer["steps"] >= 1
    assert answer["warnings"] == []  # such as that residency leaves a module as it is
    assert COMMON | besides <= {phase["name"] for phase in answer["phases"]}
    for phase in answer["phases"]:
        assert sum(phase["at_peak"].values()) == phase["peak_allocated"]
    assert outcome.phase("optimizer step")["at_peak"]["optimizer state"] > 0
