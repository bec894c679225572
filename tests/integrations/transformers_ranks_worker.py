"""One of two ranks that train with the integration; the simulator is CUDA, with nccl.

test_transformers.py reads what became of each case.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from transformers_evaluation_cases import Evaluated, Ragged, assert_alike, peak_of
from transformers_lab import (
    Lines,
    Mixed,
    accelerated,
    adapted,
    adapter_of,
    assert_same,
    device_peak,
    files_of,
    make,
    ours,
    prepared,
    set_up_process,
    text,
    tiny_model,
    trained,
    weights,
)
from worker_cases import Cases, pinned_bytes, take_device

RANK, FOLDER = int(sys.argv[1]), Path(sys.argv[4])
two = Cases()
STATE_BYTES = sum(2 * p.nbytes for p in tiny_model().parameters())


@two
def optimizer_pt_never_comes_onto_the_device_and_the_run_ends_at_stock_s_bits() -> None:
    peaks: dict[str, int] = {}
    ends = {}
    for name, kind, callbacks in (
        ("stock", transformers.Trainer, []),
        ("ours", Mixed, [ours()]),
        ("not offloaded", Mixed, [ours(offload=False)]),
    ):
        folder = FOLDER / name
        plain = trained(tiny_model(), folder, *callbacks, kind=kind)
        trainer = make(tiny_model(), folder, *callbacks, kind=kind)
        load = trainer._load_optimizer_and_scheduler

        def measured(checkpoint: Any, name: str = name, load: Any = load) -> None:
            peaks[name] = device_peak(lambda: load(checkpoint))

        with mock.patch.object(trainer, "_load_optimizer_and_scheduler", measured):
            trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        assert_same(weights(trainer.model), weights(plain.model))
        ends[name] = weights(trainer.model)
        del plain, trainer, load, measured
        gc.collect()
    assert_same(ends["ours"], ends["stock"])
    assert_same(ends["not offloaded"], ends["stock"])
    assert peaks["ours"] == 0
    assert peaks["stock"] >= STATE_BYTES
    assert peaks["not offloaded"] < 1.5 * STATE_BYTES  # which stays, as in stock


@two
def checkpoints_of_two_ranks_are_those_of_stock_code() -> None:
    folders = []
    for kind in (transformers.Trainer, Mixed):
        folder = FOLDER / f"adapters {kind.__name__}"
        callbacks = [ours()] if kind is Mixed else []
        trainer = trained(
            adapted(), folder, *callbacks, kind=kind, save_steps=1, eval_steps=1, save_total_limit=2
        )
        best = Path(trainer.state.best_model_checkpoint)
        assert_same(adapter_of(trainer.model), load_file(best / "adapter_model.safetensors"))
        folders.append(folder)
        dist.barrier()
    theirs, found = map(files_of, folders)
    assert found.keys() == theirs.keys()
    assert sum("rng_state_1.pth" in name for name in found) == 2
    for name, path in found.items():
        if path.suffix in (".safetensors", ".md") or name.endswith("adapter_config.json"):
            assert path.read_bytes() == theirs[name].read_bytes(), name


@two
def on_two_machines_that_share_no_directory_each_has_the_files_that_stock_code_leaves() -> None:
    """As torchrun tells each process of two machines with a device each."""
    found = []
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="1"):
        for on_each in (False, True):
            for kind in (transformers.Trainer, Mixed):
                folder = FOLDER / f"of machine {RANK}, {kind.__name__} {on_each}"
                settings = {"load_best_model_at_end": False, "save_on_each_node": on_each}
                trained(tiny_model(), folder, kind=kind, **settings)
                dist.barrier()
                found.append(files_of(folder).keys())
    assert found[1] == found[0]
    assert found[3] == found[2]
    assert f"checkpoint-2/rng_state_{RANK}.pth" in found[0]
    assert ("checkpoint-2/model.safetensors" in found[0]) == (RANK == 0)
    assert "checkpoint-2/optimizer.pt" in found[2]


@two
def accelerate_loads_an_offloaded_optimizer_from_the_host_when_it_is_told_to() -> None:
    batches = [text()[4 * step + RANK :: 12] for step in range(3)]
    expected = accelerated(prepared(offload=False), batches)
    first = prepared(offload=True)
    accelerated(first, batches[:1])
    folder = str(FOLDER / "accelerate")
    first[0].save_state(folder)
    dist.barrier()
    second = prepared(offload=True)
    stock = device_peak(lambda: second[0].load_state(folder))
    host_first = device_peak(lambda: second[0].load_state(folder, map_location="cpu"))
    assert stock >= STATE_BYTES
    assert host_first == 0
    assert_same(accelerated(second, batches[1:]), expected)


@two
def evaluations_of_two_ranks_have_the_bits_of_stock_code() -> None:
    """Batches are padded to the longest of both ranks, and the last one has a row twice."""
    alone = len(Ragged())
    for settings in (
        {},
        {"include_for_metrics": ["inputs", "loss"]},
        {"eval_do_concat_batches": False, "eval_accumulation_steps": 1},
    ):
        folder = str(FOLDER / f"of rank {RANK}")
        Path(folder).mkdir(exist_ok=True)
        expected = Evaluated(folder, data=Ragged(), **settings).values()
        if not settings:
            assert len(expected[1]) == alone
        for kind in (transformers.Trainer, Mixed):
            found = Evaluated(folder, ours(), kind=kind, data=Ragged(), **settings).values()
            assert_alike(found, expected)
    assert not pinned_bytes()


@two
def the_device_has_the_gathered_outputs_of_two_batches_in_an_evaluation_of_two_ranks() -> None:
    """Those of the batch before are on their way while the newest are gathered."""
    num_batches, tokens = 6, 2 * 4 * 16  # of both ranks
    logits, labels, losses = tokens * 256 * 4, tokens * 8, 512  # a block of the device
    batch = logits + 2 * labels + losses  # labels twice: the loop has them, too
    data: Any = torch.utils.data.ConcatDataset([Lines(), Lines()])
    folder = str(FOLDER)
    least = peak_of(folder, prediction_loss_only=True, data=data)
    assert peak_of(folder, data=data) >= least + (num_batches - 1) * logits
    for kind in (transformers.Trainer, Mixed):
        assert peak_of(folder, ours(), kind=kind, data=data) <= least + 2 * batch


def main() -> None:
    set_up_process()
    take_device("1GiB", face="cuda", check_races=True)
    # Each process has a device of its own, the first: as on two machines that share a directory.
    os.environ.update(RANK=str(RANK), WORLD_SIZE="2", LOCAL_RANK="0")
    store = dist.FileStore(str(FOLDER / "store"), 2)
    dist.init_process_group("nccl", store=store, rank=RANK, world_size=2)
    two.run(FOLDER / f"two{RANK}.json")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
