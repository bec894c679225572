"""Records what CUDA's allocator does in training steps, for the simulated one to be held against.

``python -m benchmarks.record_allocations FOLDER`` trains small models of transformers, with several
settings, and writes one ``MODEL_SETTING.json.gz`` each: every allocation, free and growth of three
steps in order, with sizes and addresses, and the segments at the end; no stacks and no values. The
tests replay them with ``RESIDENCY_TRACE_DIR=FOLDER`` (`tests/sim/test_allocator_traces.py`).

``--small`` takes models of a few thousand parameters. As simulated CUDA this tries the recorder;
what it writes then is no fixture. ``--dry h200`` writes what a dry run of that card asks for, for
the tests to compare.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.device import find_device

_NUM_STEPS = 3
_ACTIONS = ("alloc", "free_completed", "segment_alloc", "segment_free")
_SETTINGS = ("float32", "bfloat16_fused", "checkpointing")
_LIMIT = 1_000_000  # entries; a step of these models has thousands


def _language_model(kind: str, is_small: bool) -> tuple[nn.Module, Callable[[], dict[str, Tensor]]]:
    import transformers

    width, layers, length = (64, 2, 32) if is_small else (1024, 8, 512)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=128 if is_small else 32_000,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 64,
        head_dim=32,
        use_cache=False,
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config)

    def batch() -> dict[str, Tensor]:
        tokens = torch.randint(config.vocab_size, (2, length))
        return {"input_ids": tokens, "labels": tokens}

    return model, batch


def _image_model(kind: str, is_small: bool) -> tuple[nn.Module, Callable[[], dict[str, Tensor]]]:
    import transformers

    size, options = 224, {}
    if is_small:
        size = 32
        options = {
            "ResNet": {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 16], "depths": [1] * 4},
            "ViT": {
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "intermediate_size": 64,
                "image_size": size,
                "patch_size": 8,
            },
        }[kind]
    config = getattr(transformers, f"{kind}Config")(num_labels=10, **options)
    model = getattr(transformers, f"{kind}ForImageClassification")(config)

    def batch() -> dict[str, Tensor]:
        images = torch.randn(2 if is_small else 16, 3, size, size)
        return {"pixel_values": images, "labels": torch.randint(10, images.shape[:1])}

    return model, batch


_MODELS = {
    "qwen3": (_language_model, "Qwen3"),
    "llama": (_language_model, "Llama"),
    "resnet": (_image_model, "ResNet"),
    "vit": (_image_model, "ViT"),
}


def main() -> None:
    """Records every model with every setting that it has, each from an empty allocator."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", choices=_MODELS)
    parser.add_argument("--dry", metavar="GPU", help="its name, as residency dry-run takes it")
    options = parser.parse_args()
    dry = {"gpu": options.dry, "dry": True} if options.dry else {}
    device = find_device("80GiB" if dry else "8GiB", schedule="eager", **dry)
    if device.type != "cuda":
        parser.error("torch finds no CUDA; RESIDENCY_TEST_DEVICE=sim-as-cuda takes the simulated")
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in [options.only] if options.only else _MODELS:
        for setting in _SETTINGS:
            torch.manual_seed(0)
            make, kind = _MODELS[name]
            model, batch = make(kind, options.small)
            if setting == "checkpointing" and not model.supports_gradient_checkpointing:
                print(f"{name:8} {setting:16} left out: the model has no checkpointing")
                continue
            recording = record(model, batch, setting, device)
            recording["description"] = f"{name}, {setting}, {_NUM_STEPS} steps" + (
                ", small" if options.small else ""
            )
            path = options.folder / f"{name}_{setting}.json.gz"
            with gzip.open(path, "wt", encoding="utf-8") as file:
                json.dump(recording, file)
            peak = torch.cuda.max_memory_reserved(device) / (1 << 20)
            print(f"{name:8} {setting:16} {len(recording['events']):7} events {peak:9.1f} MiB peak")
            del model, batch


def record(
    model: nn.Module,
    batch: Callable[[], dict[str, Tensor]],
    setting: str,
    device: torch.device,
) -> dict[str, Any]:
    """Trains a model and returns what the allocator did in it.

    Args:
        model: On the host; it gives its loss as ``.loss``.
        batch: Makes its next arguments, on the host.
        setting: One of ``float32``, ``bfloat16_fused`` and ``checkpointing``.
        device: The CUDA device.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    is_mixed = setting == "bfloat16_fused"
    if setting == "checkpointing":
        known: Any = model  # by its newer name, where it has that
        getattr(known, "activation_checkpointing_enable", known.gradient_checkpointing_enable)()
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=_LIMIT)
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=is_mixed)
    for _ in range(_NUM_STEPS):
        given = {name: value.to(device) for name, value in batch().items()}
        with torch.autocast("cuda", torch.bfloat16) if is_mixed else nullcontext():
            loss = model(**given).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del given, loss
    torch.cuda.synchronize(device)
    snapshot = torch.cuda.memory._snapshot(device)
    torch.cuda.memory._record_memory_history(None)
    trace = snapshot["device_traces"][device.index]
    assert len(trace) < _LIMIT  # nothing fell out of it
    return {
        "allocator_settings": snapshot.get("allocator_settings", {}),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device),
        "final_segments": [
            {
                "address": segment["address"],
                "total_size": segment["total_size"],
                "segment_type": segment["segment_type"],
                "stream": segment["stream"],
                "blocks": [
                    [block["address"], block["size"], block["requested_size"], block["state"]]
                    for block in segment["blocks"]
                ],
            }
            for segment in snapshot["segments"]
        ],
        "events": [
            [entry["action"], entry["addr"], entry["size"], entry["stream"]]
            for entry in trace
            if entry["action"] in _ACTIONS
        ],
    }


if __name__ == "__main__":
    main()
