"""Adapters that are loaded with nothing on the device, and refused with the model as it was."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers_lab import (
    Each,
    Mixed,
    adapted,
    adapter_of,
    assert_same,
    case,
    device_peak,
    files_of,
    inside,
    make,
    ours,
    peft,
    tiny_model,
    trained,
    watched,
    weights,
)
from worker_cases import require_simulator

import residency
from residency import sim

EMBEDDING = {"vocab_size": 16384, "hidden_size": 1024, "head_dim": 64}
EMBEDDING_BYTES = 16384 * 1024 * 4


# ------------------------------------------------------------------------------- adapters


@case
def under_a_capacity_in_which_stock_ends_in_the_best_adapter_ours_loads_it() -> None:
    """The embedding goes along in the file of an adapter that targets it, and is not trained."""
    require_simulator("a capacity to the byte, without the workspaces of a real device")

    def model() -> Any:
        return adapted(tiny_model(**EMBEDDING), target_modules=["q_proj", "embed_tokens"])

    parameters = list(model().parameters())
    trained_bytes = sum(p.nbytes for p in parameters if p.requires_grad)
    # Weights, gradients and both states; the rest, activations, has less than a second embedding.
    capacity = sum(p.nbytes for p in parameters) + 3 * trained_bytes + EMBEDDING_BYTES * 7 // 8
    del parameters
    peaks: list[int] = []

    def run(*callbacks: Any) -> Any:
        steps = {"max_steps": 2, "save_steps": 1, "eval_steps": 1, "save_only_model": True}
        small = {"per_device_eval_batch_size": 2, "prediction_loss_only": True}
        trainer = make(model(), inside(folder), *callbacks, **steps, **small)
        load = trainer._load_best_model

        def measured() -> None:
            peaks.append(device_peak(load))

        with mock.patch.object(trainer, "_load_best_model", measured):
            trainer.train()
        return trainer

    settings = sim.settings()
    sim.enable(**{**settings, "capacity": capacity, "context": 0, "check_races": False})
    with tempfile.TemporaryDirectory() as folder:
        gc.collect()
        with pytest.raises(torch.OutOfMemoryError) as info:
            run()
        trace = "".join(traceback.format_tb(info.value.__traceback__))
        assert "_load_best_model" in trace, f"{info.value}\n{trace}"
        del info
        gc.collect()
        trainer = run(ours(bucket="1MiB"))
        assert peaks == [0]
        file = load_file(f"{trainer.state.best_model_checkpoint}/adapter_model.safetensors")
        assert max(value.nbytes for value in file.values()) == EMBEDDING_BYTES
        assert_same(peft.get_peft_model_state_dict(trainer.model), file)
    del trainer
    gc.collect()
    sim.enable(**settings)


@case
def adapters_of_every_kind_come_back_as_their_file_has_them_with_nothing_on_the_device() -> None:
    settings: list[dict[str, Any]] = [
        {},
        {"use_dora": True},
        {"use_rslora": True},
        {"modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"trainable_token_indices": [1, 2]},
    ]
    for each in settings:
        model = adapted(**each).cuda()
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            file = load_file(f"{folder}/adapter_model.safetensors")
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1.0)
            trainer = make(model, folder, ours())
            places = {name: p.data_ptr() for name, p in model.named_parameters()}
            load = partial(trainer.model.load_adapter, folder, "default")
            assert device_peak(load) == 0
            assert {name: p.data_ptr() for name, p in model.named_parameters()} == places
            found = adapter_of(model)
            assert_same({name: found[name] for name in found}, {n: file[n] for n in found})


@case
def stock_takes_the_whole_file_on_the_device_and_a_cast_no_more_than_a_tensor() -> None:
    model = adapted(modules_to_save=["lm_head"]).cuda()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        path = f"{folder}/adapter_model.safetensors"
        file = load_file(path)
        assert device_peak(lambda: model.load_adapter(folder, "default")) >= sum(
            value.nbytes for value in file.values()
        )
        save_file({k: v.bfloat16() for k, v in file.items()}, path, metadata={"format": "pt"})
        make(model, folder, ours())
        largest = max(value.nbytes for value in file.values())
        assert device_peak(lambda: model.load_adapter(folder, "default")) <= largest
        assert_same(adapter_of(model), {k: v.bfloat16().float() for k, v in file.items()})


@case
def a_transposed_parameter_takes_one_tensor_on_the_device_at_most() -> None:
    model = adapted().cuda()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        file = load_file(f"{folder}/adapter_model.safetensors")
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.t().contiguous().t()
        make(model, folder, ours())
        largest = max(-(-value.nbytes // 512) * 512 for value in file.values())
        assert device_peak(lambda: model.load_adapter(folder, "default")) <= largest
        assert_same(adapter_of(model), file)


@case
def several_adapters_train_resume_and_end_as_with_stock_code() -> None:
    def run(folder: Path, *callbacks: Any, **settings: Any) -> Any:
        model = adapted()
        torch.manual_seed(2)
        model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["o_proj"]))
        return trained(model, folder, *callbacks, **settings)

    with tempfile.TemporaryDirectory() as folder:
        plain, whole = run(Path(folder)), run(inside(folder), ours(), kind=Mixed)
        assert_same(weights(whole.model), weights(plain.model))
        theirs, found = (Path(r.args.output_dir) / "checkpoint-4" for r in (plain, whole))
        assert files_of(found).keys() == files_of(theirs).keys()
        for name in ("adapter_model.safetensors", "other/adapter_model.safetensors"):
            assert (found / name).read_bytes() == (theirs / name).read_bytes()
        again = weights(run(Path(folder), resume="checkpoint-2").model)
        for kind in (transformers.Trainer, Mixed):
            with watched(peft.peft_model, "load_peft_weights") as calls:
                resumed = run(Path(folder), ours(), resume="checkpoint-2", kind=kind)
            assert {kwargs["device"] for _, kwargs in calls} == {"cpu"}
            assert_same(weights(resumed.model), again)


@case
def a_snapshot_that_is_still_copied_keeps_what_was_there_when_an_adapter_is_loaded() -> None:
    model = adapted().cuda()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        make(model, folder, ours())
        before = weights(model)
        taken = residency.snapshot(model)
        model.load_adapter(folder, "default")
        assert_same(taken.tree, before)
        assert_same(adapter_of(model), load_file(f"{folder}/adapter_model.safetensors"))


@case
def a_device_that_the_user_names_wins() -> None:
    model = adapted().cuda()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        make(model, folder, ours())
        with watched(peft.peft_model, "load_peft_weights") as calls:
            model.load_adapter(folder, "default")
            model.load_adapter(folder, "default", torch_device="cuda")
            model.load_adapter(folder, "default", True, "cuda:0")
            model.load_adapter(folder, "new", low_cpu_mem_usage=True)
        assert [kwargs["device"] for _, kwargs in calls] == ["cpu", "cuda", "cuda:0", "cpu"]
        assert {p.device.type for p in model.parameters()} == {"cuda"}
        assert_same(adapter_of(model, "new"), adapter_of(model))


@case
def learned_prompts_load_and_fail_as_with_stock_code() -> None:
    def run(folder: Path, *callbacks: Any, is_cut: bool = False) -> Any:
        config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
        torch.manual_seed(1)
        model = peft.get_peft_model(tiny_model(), config)

        def cut(state: Any) -> None:
            file = folder / f"checkpoint-{state.global_step}" / "adapter_model.safetensors"
            values = {name: value[:2].clone() for name, value in load_file(file).items()}
            save_file(values, file, metadata={"format": "pt"})

        cuts = [Each(on_save=cut)] if is_cut else []
        return trained(model, folder, *cuts, *callbacks)

    with tempfile.TemporaryDirectory() as folder:
        plain = run(inside(folder))
        assert_same(weights(run(inside(folder), ours()).model), weights(plain.model))
        messages = []
        for callbacks in ([], [ours()]):
            with pytest.raises(RuntimeError, match="When using prompt learning") as info:
                run(inside(folder), *callbacks, is_cut=True)
            messages.append(str(info.value))
        assert messages[0] == messages[1]


@case
def an_adapter_file_that_does_not_fit_is_refused_by_its_names_with_the_model_as_it_was() -> None:
    version = peft.__version__
    model = adapted(modules_to_save=["lm_head"]).cuda()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        path = f"{folder}/adapter_model.safetensors"
        good = load_file(path)
        a_key = next(name for name in reversed(good) if "lora_B" in name)
        head = next(name for name in good if "lm_head" in name)
        bad: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
            r"is \(3, 4\) in it and \(\d+, 4\)": lambda f: f.update({a_key: torch.zeros(3, 4)}),
            "strange.*is not in the model": lambda f: f.update({"strange": torch.zeros(1)}),
            "it lacks.*lora_B": lambda f: f.pop(a_key),
            "it lacks.*lm_head": lambda f: f.pop(head),
        }
        make(model, folder, ours())
        before, was = weights(model), model.training
        for message, spoil in bad.items():
            values = dict(good)
            spoil(values)
            save_file(values, path, metadata={"format": "pt"})
            for name in ("default", "new"):
                with pytest.raises(residency.RefusedError, match=message) as info:
                    model.load_adapter(folder, name)
                assert f"peft {version}" in str(info.value)
                assert "Nothing was changed; load it into a model" in str(info.value)
                assert list(model.peft_config) == ["default"]
                assert_same(weights(model), before)
                assert model.training == was
        save_file(good, path, metadata={"format": "pt"})
        model.load_adapter(folder, "new")  # and a good one still loads
        assert_same(adapter_of(model, "new"), good)


@case
def what_was_put_on_comes_off_and_copies_load_into_themselves() -> None:
    model = adapted()
    callback = ours()
    callback.remove()  # and with it the hook that cases left whose runs failed
    hook = sys.excepthook
    with tempfile.TemporaryDirectory() as folder:
        trainer = make(model, folder, callback)
        assert "load_adapter" in vars(model)
        make(model, folder, ours())  # another trainer of the same model: it is on already
        trainer.train()
        model.save_pretrained(folder)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            before = adapter_of(model)
            with torch.no_grad():
                for each in (*model.parameters(), *other.parameters()):
                    each.zero_()
            other.load_adapter(folder, "default")
            assert_same(adapter_of(other), before)
            assert not any(value.any() for value in adapter_of(model).values())
            model.load_adapter(folder, "default")
        callback.remove()
        assert "load_adapter" not in vars(model)
        assert "load_state_dict" not in vars(model)
        assert sys.excepthook is hook
        with watched(peft.peft_model, "load_peft_weights") as calls:
            model.load_adapter(folder, "default")
        assert [kwargs["device"] for _, kwargs in calls] == ["cuda"]
