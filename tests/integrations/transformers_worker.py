"""Transformers, PEFT and accelerate with the integration, in one process in which the simulator is
CUDA, its work late and its races checked.

test_transformers.py reads what became of each case. The frameworks are the installed ones.
"""

from __future__ import annotations

import copy
import gc
import io
import json
import os
import pickle
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers_lab import (
    BUCKET,
    Each,
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
    text,
    tiny_model,
    trained,
    watched,
    weights,
)
from worker_cases import Cases, optional, pinned_bytes, require_simulator, take_device

import residency
from residency import sim
from residency.integrations.transformers import (
    ResidencyCallback,
    ResidencyTrainerMixin,
    save_pretrained,
)

peft = optional("peft")
case = Cases()
EMBEDDING = {"vocab_size": 16384, "hidden_size": 1024, "head_dim": 64}
EMBEDDING_BYTES = 16384 * 1024 * 4


def inside(folder: str) -> Path:
    return Path(tempfile.mkdtemp(dir=folder))


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


# ------------------------------------------------------------------------------- the optimizer


@case
def a_run_and_its_resumption_end_at_the_bits_of_a_stock_run() -> None:
    for model in (tiny_model, adapted):
        with tempfile.TemporaryDirectory() as folder:
            plain = trained(model(), inside(folder))
            assert type(plain.optimizer.optimizer) is torch.optim.AdamW
            expected = weights(plain.model)
            for kind in (transformers.Trainer, Mixed):
                where = inside(folder)
                for resume, num_steps in ((None, 4), ("checkpoint-2", 2)):
                    found = trained(model(), where, ours(), kind=kind, resume=resume)
                    assert_same(weights(found.model), expected)
                    inner = found.optimizer.optimizer
                    assert isinstance(inner, residency.OffloadedOptimizer)
                    assert inner.statistics().num_steps == num_steps
                    states = inner.state.values()
                    assert all(state["exp_avg"].is_pinned() for state in states)
                    assert_same(inner.state_dict(), plain.optimizer.state_dict())


@case
def with_accumulation_and_half_precision_the_bits_stay_those_of_a_stock_run() -> None:
    for precision in ({"bf16": True}, {"fp16": True}):
        settings = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1, **precision}
        with tempfile.TemporaryDirectory() as folder:
            plain = trained(tiny_model(), inside(folder), **settings)
            where = inside(folder)
            for resume in (None, "checkpoint-2"):
                found = trained(tiny_model(), where, ours(), kind=Mixed, resume=resume, **settings)
                assert_same(weights(found.model), weights(plain.model))


@case
def the_mixin_resumes_with_no_more_than_a_bucket_on_the_device_and_stock_with_the_state() -> None:
    peaks: dict[str, int] = {}

    def resume(name: str, trainer: Any, folder: str) -> None:
        load = trainer._load_optimizer_and_scheduler

        def measured(checkpoint: Any) -> None:
            peaks[name] = device_peak(lambda: load(checkpoint))

        with mock.patch.object(trainer, "_load_optimizer_and_scheduler", measured):
            trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2")

    with tempfile.TemporaryDirectory() as folder:
        trained(tiny_model(), folder)
        resume("stock", make(tiny_model(), folder), folder)
        resume("mixin", make(tiny_model(), folder, ours(), kind=Mixed), folder)
    state_bytes = sum(2 * p.nbytes for p in tiny_model().parameters())
    assert peaks["stock"] >= state_bytes
    assert peaks["mixin"] == 0


@case
def an_optimizer_that_is_offloaded_already_is_adopted_as_it_is() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        residency.offload_optimizer(optimizer, bucket="8KiB", slots=2)
        trainer = transformers.Trainer(
            model,
            make(model, folder).args,
            train_dataset=make(model, folder).train_dataset,
            eval_dataset=make(model, folder).eval_dataset,
            optimizers=(optimizer, None),
            callbacks=[ours()],
        )
        trainer.train()
        assert trainer.optimizer.optimizer is optimizer
        assert optimizer.statistics().num_buckets > 4  # of 8 KiB, as it was made
        trainer.train()  # and the trainer's own second run
        assert optimizer.statistics().num_steps == 8


@case
def an_optimizer_that_cannot_be_offloaded_is_refused_with_the_version_and_the_way_out() -> None:
    class Coupled(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            every = [p for group in self.param_groups for p in group["params"]]
            norm = torch.stack([p.grad.norm() for p in every if p.grad is not None]).norm()
            for p in every:
                if p.grad is not None:
                    p.sub_(p.grad / norm, alpha=0.1)

    with tempfile.TemporaryDirectory() as folder:

        def run(callback: ResidencyCallback) -> Any:
            model = tiny_model().cuda()
            coupled = Coupled(model.parameters(), lr=1e-2)
            made = make(model, folder, callback)
            made.optimizer = coupled
            made.train()
            return made

        with pytest.raises(residency.RefusedError, match="couples the parameters") as info:
            run(ours())
        assert f"transformers {transformers.__version__}" in str(info.value)
        assert "ResidencyCallback(offload=False)" in str(info.value)
        trainer = run(ours(offload=False))
        assert type(trainer.optimizer.optimizer) is Coupled


@case
def sizes_that_mean_nothing_are_refused_when_the_callback_is_made() -> None:
    with pytest.raises(residency.InvalidArgumentError, match="bucket"):
        ResidencyCallback(bucket="12 parsecs")
    with tempfile.TemporaryDirectory() as folder:
        for count in (-1, 1.5, True):
            with pytest.raises(residency.InvalidArgumentError, match="max_in_flight"):
                make(tiny_model(), folder, kind=Mixed, max_in_flight=count)


@case
def two_callbacks_in_one_trainer_are_refused_with_the_version() -> None:
    with tempfile.TemporaryDirectory() as folder:
        one, model = ours(), adapted()
        for callbacks in ([one, ours()], [one, one]):
            with pytest.raises(residency.RefusedError, match="two callbacks") as info:
                make(model, folder, *callbacks)
            assert f"transformers {transformers.__version__}" in str(info.value)
        trainer = make(tiny_model(), folder, ours())
        trainer.add_callback(ours())
        with pytest.raises(residency.RefusedError, match="two callbacks"):
            trainer.train()
        assert trainer.state.global_step == 0
        trainer.remove_callback(ResidencyCallback)  # the first of them
        trainer.train()
        trainer.remove_callback(ResidencyCallback)
        trainer.add_callback(ours())
        trainer.train()


@case
def a_second_callback_that_is_refused_leaves_nothing_of_what_the_first_has_begun() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for settings in ({}, {"offload": False}):
            hook, first = sys.excepthook, ours(**settings)
            trainer = make(tiny_model(), folder, first)
            trainer.add_callback(ours())
            with pytest.raises(residency.RefusedError, match="two callbacks"):
                trainer.train()
            assert type(trainer.optimizer.optimizer) is torch.optim.AdamW
            assert residency._memory._phase.open_phases() == ()
            assert sys.excepthook is hook
        model = tiny_model().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        residency.offload_optimizer(optimizer, bucket=BUCKET)
        trainer = make(model, folder, ours())
        trainer.optimizer = optimizer
        trainer.add_callback(ours())
        with pytest.raises(residency.RefusedError, match="two callbacks"):
            trainer.train()
        assert isinstance(optimizer, residency.OffloadedOptimizer)  # as it was handed over


@case
def runs_that_fail_leave_one_hook_for_uncaught_errors_and_the_next_that_ends_takes_it_off() -> None:
    def fail(state: Any) -> None:
        raise RuntimeError("of the user's")

    with tempfile.TemporaryDirectory() as folder:
        before, hooks, callbacks = sys.excepthook, set(), []
        for _ in range(3):
            callbacks.append(ours(offload=False))
            with pytest.raises(RuntimeError, match="of the user's"):
                trained(tiny_model(), folder, callbacks[-1], Each(on_step_end=fail))
            hooks.add(sys.excepthook)
        assert len(hooks - {before}) == 1
        for callback in callbacks:
            assert sys.excepthook is not before
            callback.remove()
        assert sys.excepthook is before
        with pytest.raises(RuntimeError, match="of the user's"):
            trained(tiny_model(), folder, ours(offload=False), Each(on_step_end=fail))
        gc.collect()  # the callback of that run is gone
        trained(tiny_model(), folder, ours(offload=False))
        assert sys.excepthook is before


@case
def a_trainer_without_a_method_that_is_needed_is_refused_with_the_version() -> None:
    class Old:
        """Is a trainer of long ago."""

    class Mine(ResidencyTrainerMixin, Old):  # type: ignore[misc]
        pass

    with pytest.raises(residency.RefusedError, match=r"has no Trainer\._get_output_dir") as info:
        Mine()
    assert f"transformers {transformers.__version__}" in str(info.value)

    def load_adapter(self: Any, model_id: Any, adapter_name: str) -> None: ...

    with (
        mock.patch.object(peft.PeftModel, "load_adapter", load_adapter),
        tempfile.TemporaryDirectory() as folder,
        pytest.raises(residency.RefusedError, match=rf"peft {peft.__version__} has no.*torch_dev"),
    ):
        make(adapted(), folder, ours())


@case
def without_peft_s_model_loading_is_left_alone() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model()
        before = set(vars(model))
        trainer = trained(model, inside(folder), ours(offload=False))
        assert "load_adapter" not in set(vars(model)) - before
        plain = trained(tiny_model(), inside(folder))
        assert_same(weights(trainer.model), weights(plain.model))


# ------------------------------------------------------------------------------- seeing


@case
def training_steps_saves_loads_and_evaluations_are_phases() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for kind, expected in (
            (transformers.Trainer, {"train", "train/step", "train/load"}),
            (Mixed, {"train", "train/step", "train/load", "train/save", "train/evaluate"}),
        ):
            file = Path(folder) / f"{kind.__name__}.jsonl"
            with residency.record(file):
                trained(adapted(), inside(folder), ours(), kind=kind)
            lines = [json.loads(line) for line in file.read_text().splitlines()]
            ended = {each["phase"] for each in lines if each.get("kind") == "end"}
            assert expected <= ended, ended
            steps = [e for e in lines if (e.get("kind"), e.get("phase")) == ("end", "train/step")]
            assert len(steps) == 4
            assert not any(each.get("error") for each in lines)


@case
def an_out_of_memory_error_in_training_says_what_held_the_memory() -> None:
    class Hungry(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = tiny_model()

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
            torch.empty(2 << 30, dtype=torch.uint8, device=input_ids.device)
            return self.inner(input_ids=input_ids, labels=labels)

    with tempfile.TemporaryDirectory() as folder:
        with pytest.raises(torch.OutOfMemoryError) as info:
            trained(Hungry(), folder, ours(), kind=Mixed)
        [note] = info.value.__notes__
        assert "in the phase train/step" in note or "train/step" in note
        with pytest.raises(torch.OutOfMemoryError) as info:
            trained(Hungry(), folder, callback := ours())
        assert not hasattr(info.value, "__notes__")  # nothing that a callback is told of
        with redirect_stderr(io.StringIO()) as stderr:  # as Python does when it ends
            sys.excepthook(info.type, info.value, info.tb)
        assert "residency: the device's memory when this failed" in stderr.getvalue()
        assert "train/step" in stderr.getvalue()
        callback.remove()
        trained(tiny_model(), folder, callback)  # what was left open is closed
        assert residency._memory._phase.open_phases() == ()


# ------------------------------------------------------------------------------- saving


@case
def checkpoints_written_behind_training_are_those_of_stock_code() -> None:
    tied = {"tie_word_embeddings": True}
    models: list[Callable[[], Any]] = [
        lambda: tiny_model(**tied),
        lambda: adapted(modules_to_save=["lm_head"]),
        lambda: adapted(target_modules=["q_proj", "embed_tokens"]),  # has a layer of the base
    ]
    for model in models:
        with tempfile.TemporaryDirectory() as folder:
            runs = []
            for kind in (transformers.Trainer, Mixed):
                where = inside(folder)
                callbacks = [ours()] if kind is Mixed else []
                runs.append(trained(model(), where, *callbacks, kind=kind).args.output_dir)
            theirs, found = (files_of(Path(run)) for run in runs)
            assert found.keys() == theirs.keys()
            for name, path in found.items():
                if path.suffix in (".safetensors", ".json", ".md") and "trainer_state" not in name:
                    assert path.read_bytes() == theirs[name].read_bytes(), name
                elif path.name in ("optimizer.pt", "scheduler.pt"):
                    loaded = [torch.load(p, weights_only=True) for p in (path, theirs[name])]
                    assert_same(*loaded)
                    assert path.stat().st_size <= theirs[name].stat().st_size * 1.1
                elif "trainer_state" in name:
                    ends = [json.loads(p.read_text()) for p in (path, theirs[name])]
                    best = [Path(end["best_model_checkpoint"]).name for end in ends]
                    assert best[0] == best[1]
                    for end, run in zip(ends, reversed(runs), strict=True):
                        assert Path(end["best_model_checkpoint"]).parent == Path(run)
                    counts = [
                        (e["global_step"], e["best_metric"], e["best_global_step"]) for e in ends
                    ]
                    assert counts[0] == counts[1]
            if model().__class__.__name__.startswith("Qwen"):
                stock = transformers.Qwen3ForCausalLM.from_pretrained(f"{runs[1]}/checkpoint-4")
                assert stock.lm_head.weight is stock.model.embed_tokens.weight
                assert_same(weights(stock), weights(trained(model(), inside(folder)).model))


@case
def rotation_and_the_best_checkpoint_are_those_of_stock_code() -> None:
    settings = {"save_steps": 1, "eval_steps": 1, "max_steps": 5, "learning_rate": 0.3}
    for limit in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            left = []
            for kind, slots in ((transformers.Trainer, None), (Mixed, 1), (Mixed, 3)):
                options = {"max_in_flight": slots, "kind": kind} if slots else {}
                callbacks = [ours()] if slots else []
                trainer = trained(
                    adapted(),
                    inside(folder),
                    *callbacks,
                    save_total_limit=limit,
                    **settings,
                    **options,
                )
                best = Path(trainer.state.best_model_checkpoint)
                assert_same(
                    adapter_of(trainer.model), load_file(best / "adapter_model.safetensors")
                )
                names = sorted(path.name for path in best.parent.iterdir())
                left.append((best.name, names))
            assert left[1:] == left[:1] * 2
            assert left[0][0] != "checkpoint-5" or limit == 1 or len(left[0][1]) == limit


@case
def the_best_checkpoint_of_a_run_whose_directory_was_renamed_is_found_as_by_stock_code() -> None:
    def run(kind: Any, folder: Path, max_steps: int, resume: str | None = None) -> Any:
        class FirstIsBest(kind):  # type: ignore[misc]
            def _determine_best_metric(self, metrics: Any, trial: Any) -> bool:
                metrics = {**metrics, "eval_score": -float(self.state.global_step)}
                return bool(super()._determine_best_metric(metrics, trial))

        settings = {"save_steps": 1, "eval_steps": 1, "save_total_limit": 2}
        metric = {"metric_for_best_model": "eval_score", "greater_is_better": True}
        steps = {"max_steps": max_steps, "resume": resume}
        return trained(tiny_model(), folder, kind=FirstIsBest, **settings, **metric, **steps)

    with tempfile.TemporaryDirectory() as folder:
        ends = []
        for kind in (transformers.Trainer, Mixed):
            first, renamed = (Path(folder) / f"{kind.__name__} {name}" for name in ("a", "b"))
            run(kind, first, 2)
            first.rename(renamed)
            trainer = run(kind, renamed, 4, "checkpoint-2")
            assert trainer.state.best_model_checkpoint == str(renamed / "checkpoint-1")
            assert sorted(path.name for path in renamed.iterdir()) == [
                "checkpoint-1",
                "checkpoint-4",
            ]
            saved = json.loads((renamed / "checkpoint-4" / "trainer_state.json").read_text())
            assert saved["best_model_checkpoint"] == str(renamed / "checkpoint-1")
            ends.append(weights(trainer.model))
        assert_same(*ends)


@case
def what_is_written_is_of_the_moment_of_the_call_while_training_goes_on() -> None:
    # A step may take over two buckets of states that a save is still reading, and then waits.
    for options in ({"offload": False}, {"bucket": "1MiB"}):
        with tempfile.TemporaryDirectory() as folder:
            plain = trained(tiny_model(), inside(folder))
            go_on, seen = threading.Event(), []

            def wait_for_step_4(state: Any, go_on: Any = go_on, seen: Any = seen) -> None:
                seen.append((state.global_step, go_on.is_set()))
                if state.global_step == 3:
                    go_on.set()

            save = torch.save

            def late(value: Any, file: Any, go_on: Any = go_on, save: Any = save) -> None:
                if str(file).endswith("optimizer.pt") and "residency-checkpoints" in (
                    threading.current_thread().name
                ):
                    assert go_on.wait(60)
                save(value, file)

            trainer = make(
                tiny_model(),
                inside(folder),
                Each(on_step_end=wait_for_step_4),
                ours(**options),
                kind=Mixed,
            )
            with mock.patch("torch.save", late):
                trainer.train()
            assert (3, False) in seen  # two steps were taken before a byte was written
            for step in (2, 4):
                ends = [
                    Path(each.args.output_dir) / f"checkpoint-{step}" for each in (trainer, plain)
                ]
                assert_same(*(load_file(end / "model.safetensors") for end in ends))
                assert_same(*(torch.load(e / "optimizer.pt", weights_only=True) for e in ends))


@case
def weights_that_a_callback_writes_once_they_are_saved_are_in_the_file_as_they_were() -> None:
    def run(model: Any, folder: str) -> dict[str, torch.Tensor]:
        seen: list[dict[str, torch.Tensor]] = []

        def overwrite(state: Any) -> None:
            if state.global_step == 2:  # the first save allocates, which waits
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.zero_()

        events = Each(on_step_end=lambda state: seen.append(weights(model)), on_save=overwrite)
        settings = {"save_steps": 1, "max_steps": 2, "load_best_model_at_end": False}
        make(model, folder, events, kind=Mixed, **settings).train()
        assert not any(p.any() for p in model.parameters())
        return seen[1]

    for model in (tiny_model, lambda: adapted(modules_to_save=["lm_head"])):
        with tempfile.TemporaryDirectory() as folder:
            expected, again = run(model(), folder), model()
            if isinstance(again, peft.PeftModel):
                again.load_adapter(f"{folder}/checkpoint-2", "default")
            else:
                again.load_state_dict(load_file(f"{folder}/checkpoint-2/model.safetensors"))
            assert_same(weights(again), expected)


@case
def a_save_takes_nothing_on_the_device() -> None:
    peaks = []

    class Measured(Mixed):
        def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            save = super()._save_checkpoint
            peaks.append(device_peak(lambda: save(*args, **kwargs)))

    for model in (tiny_model(), adapted()):
        with tempfile.TemporaryDirectory() as folder:
            trained(model, folder, ours(), kind=Measured)
    assert peaks == [0] * 4


@case
def what_saves_pinned_is_given_back_when_training_ends() -> None:
    gc.collect()
    before = pinned_bytes()
    seen = []

    def look(state: Any) -> None:
        seen.append(pinned_bytes() - before)

    model = tiny_model()
    with tempfile.TemporaryDirectory() as folder:
        trained(model, folder, Each(on_save=look), ours(offload=False), kind=Mixed)
    num_bytes = 3 * sum(p.nbytes for p in model.parameters())  # weights and two states
    assert num_bytes <= seen[0] <= 2 * num_bytes
    assert seen[1] == seen[0]  # the same again, for the second save
    assert pinned_bytes() == before


@case
def a_part_that_cannot_be_captured_is_written_before_training_goes_on() -> None:
    def mark(state: Any) -> None:
        trainer.optimizer.param_groups[0]["note"] = Path("of a kind that a document cannot hold")

    with tempfile.TemporaryDirectory() as folder:
        trainer = make(
            tiny_model(), folder, Each(on_train_begin=mark), ours(offload=False), kind=Mixed
        )
        trainer.train()
        found = torch.load(f"{folder}/checkpoint-2/optimizer.pt", weights_only=False)
        assert isinstance(found["param_groups"][0]["note"], Path)
        assert len(found["state"]) == len(list(trainer.model.parameters()))
        assert (Path(folder) / "checkpoint-2" / "scheduler.pt").exists()


@case
def a_write_that_fails_surfaces_once_and_the_next_save_works() -> None:
    failing = {"checkpoint-1"}
    save = peft.PeftModel.save_pretrained

    def broken(self: Any, folder: Any, *args: Any, **kwargs: Any) -> None:
        if Path(folder).name in failing:
            failing.discard(Path(folder).name)
            raise OSError(28, "No space left on device")
        save(self, folder, *args, **kwargs)

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(peft.PeftModel, "save_pretrained", broken),
    ):
        settings = {"save_steps": 1, "eval_steps": 1, "kind": Mixed}
        trainer = make(adapted(), folder, ours(), **settings)
        with pytest.raises(residency.CheckpointError, match=r"checkpoint-1 could not be.*No space"):
            trainer.train()
        assert list(Path(folder).iterdir()) == []
        trainer.train()
        names = sorted(path.name for path in Path(folder).iterdir())
        assert names == [f"checkpoint-{step}" for step in (1, 2, 3, 4)]
        failing.add("checkpoint-4")  # the last: nobody begins another save
        with pytest.raises(residency.CheckpointError, match="checkpoint-4 could not be written"):
            make(adapted(), inside(folder), ours(), **settings).train()


@case
def kinds_that_are_not_made_of_a_state_dict_alone_are_written_before_training_goes_on() -> None:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with tempfile.TemporaryDirectory() as folder:
        ends = []
        for kind in (transformers.Trainer, Mixed):
            torch.manual_seed(1)
            model = peft.get_peft_model(tiny_model(), config)
            trainer = trained(model, inside(folder), kind=kind)
            ends.append(
                Path(trainer.args.output_dir) / "checkpoint-2" / "adapter_model.safetensors"
            )
        assert ends[0].read_bytes() == ends[1].read_bytes()
        plain = trained(adapted(), inside(folder), kind=Mixed, max_in_flight=0)
        assert (Path(plain.args.output_dir) / "checkpoint-4" / "optimizer.pt").exists()


@case
def trainers_that_save_in_their_own_way_leave_the_files_that_they_leave_without_the_mixin() -> None:
    class Own(transformers.Trainer):
        def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
            os.makedirs(output_dir, exist_ok=True)
            torch.save(dict(self.model.state_dict()), f"{output_dir}/own.bin")

    class Again(transformers.Trainer):
        def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
            super()._save(output_dir, state_dict)
            self.model.save_pretrained(f"{output_dir}/again")
            zeros = {k: torch.zeros_like(v) for k, v in self.model.state_dict().items()}
            self.model.save_pretrained(f"{output_dir}/zeros", state_dict=dict(zeros))
            self.model.save_pretrained(f"{output_dir}/placed", True, dict(zeros))

    def mixed_adapters() -> Any:
        config = peft.LoraConfig(r=4, target_modules=["q_proj"])
        torch.manual_seed(1)
        return peft.get_peft_model(tiny_model(), config, mixed=True)

    without_best = {"load_best_model_at_end": False, "max_steps": 2}
    for kind, model, names in (
        (Own, tiny_model, {"own.bin"}),
        (Again, tiny_model, {f"{n}model.safetensors" for n in ("", "again/", "zeros/", "placed/")}),
        (transformers.Trainer, mixed_adapters, {"model.safetensors"}),
    ):
        mixed = type("AlsoMixed", (ResidencyTrainerMixin, kind), {})
        with tempfile.TemporaryDirectory() as folder:
            found = []
            for each in (kind, mixed):
                trainer = trained(model(), inside(folder), kind=each, **without_best)
                found.append(files_of(Path(trainer.args.output_dir) / "checkpoint-2"))
            assert found[0].keys() == found[1].keys()
            assert names <= found[0].keys()
            for name in names:
                ends = [
                    load_file(files[name])
                    if name.endswith("safetensors")
                    else torch.load(files[name], weights_only=True)
                    for files in found
                ]
                assert_same(ends[1], ends[0])


@case
def a_checkpoint_that_a_signal_asks_for_is_whole_before_its_mark_is_taken_off() -> None:
    if "enable_jit_checkpoint" not in vars(transformers.TrainingArguments(use_cpu=True)):
        return  # came with transformers 5
    from transformers.trainer_jit_checkpoint import JITCheckpointCallback

    seen = []

    class Asked(Mixed):
        def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            super()._save_checkpoint(*args, **kwargs)
            seen.append(set(files_of(Path(folder) / f"checkpoint-{self.state.global_step}")))

    with tempfile.TemporaryDirectory() as folder:
        handler = signal.getsignal(signal.SIGTERM)

        def ask(state: Any) -> None:
            if state.global_step == 1:
                manager.is_checkpoint_requested = True

        only_asked = {"save_strategy": "no", "load_best_model_at_end": False}
        trainer = make(
            tiny_model(),
            folder,
            Each(on_step_end=ask),
            kind=Asked,
            enable_jit_checkpoint=True,
            **only_asked,
        )
        [callback] = (
            c for c in trainer.callback_handler.callbacks if isinstance(c, JITCheckpointCallback)
        )
        manager = callback.jit_manager
        trainer.train()
        assert signal.getsignal(signal.SIGTERM) == handler
        [names] = seen
        assert {"model.safetensors", "optimizer.pt", "trainer_state.json"} <= names
        [checkpoint] = Path(folder).iterdir()
        assert set(files_of(checkpoint)) == names


@case
def saves_that_are_under_way_at_once_do_not_share_their_memory_and_one_that_is_dropped_none() -> (
    None
):
    from residency.integrations.transformers._saves import BackgroundSaves

    saves = BackgroundSaves(2)
    may_end = [threading.Event(), threading.Event()]
    has_ended = threading.Event()
    value = torch.arange(4.0, device="cuda")

    def begun(number: int) -> Any:
        draft = saves.begin(Path(folder), f"checkpoint-{number}")
        draft.folder.mkdir(parents=True)
        return draft

    def wait_for(event: threading.Event) -> Callable[[Any], None]:
        def write(tree: Any) -> None:
            assert event.wait(60)

        return write

    with tempfile.TemporaryDirectory() as folder:
        first = begun(1)
        first.take({"w": value}, wait_for(may_end[0]))
        arenas = [first._arena]
        saves.submit(first, has_ended.set)
        second = begun(2)  # while the first is written,
        arenas.append(second._arena)
        may_end[0].set()
        assert has_ended.wait(60)
        second.take({"w": value}, wait_for(may_end[1]))
        saves.submit(second, lambda: None)  # which has ended before this is submitted
        third = begun(3)
        assert third._arena is not arenas[1]
        arenas.append(third._arena)
        third.drop()
        fourth = begun(4)
        assert fourth._arena in arenas
        assert fourth._arena is not arenas[1]
        fourth.drop()
        may_end[1].set()
        saves.close()
        names = sorted(path.name for path in Path(folder).iterdir())
        assert names == ["checkpoint-1", "checkpoint-2"]


@case
def what_a_process_left_that_died_is_removed_by_the_next_run() -> None:
    with tempfile.TemporaryDirectory() as folder:
        left = Path(folder) / ".residency-saving" / "checkpoint-9" / "checkpoint-9"
        left.mkdir(parents=True)
        assert transformers.trainer_utils.get_last_checkpoint(folder) is None
        trained(adapted(), folder, kind=Mixed)
        names = sorted(path.name for path in Path(folder).iterdir())
        assert names == ["checkpoint-2", "checkpoint-4"]


@case
def a_snapshot_is_saved_in_files_that_stock_from_pretrained_reads() -> None:
    model = tiny_model(tie_word_embeddings=True).cuda()
    before = weights(model)
    taken = residency.snapshot(model)
    with residency.mutating(*model.parameters()), torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(taken, folder, model=model)
        loaded = transformers.Qwen3ForCausalLM.from_pretrained(folder)
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        assert_same(weights(loaded), before)
        assert "lm_head.weight" not in load_file(f"{folder}/model.safetensors")
        message = f"not one of.*transformers {transformers.__version__}"
        with pytest.raises(residency.InvalidArgumentError, match=message):
            save_pretrained(residency.snapshot(nn.Linear(2, 2)), folder, model=model)
        other = adapted().cuda()
        save_pretrained(residency.snapshot(other), f"{folder}/adapter", model=other)
        assert_same(adapter_of(other), load_file(f"{folder}/adapter/adapter_model.safetensors"))


@case
def a_process_that_dies_while_it_saves_leaves_no_checkpoint_that_is_not_whole() -> None:
    assert dead, "main lets some processes die before the simulator is there"
    for folder in dead:
        last = transformers.trainer_utils.get_last_checkpoint(str(folder))
        assert last == str(folder / "checkpoint-2")
        assert sorted(path.name for path in folder.iterdir()) == [
            ".residency-saving",
            "checkpoint-2",
        ]
        for kind in (transformers.Trainer, Mixed):  # stock code goes on from it, and so do we
            trainer = trained(tiny_model(), folder, kind=kind, resume="checkpoint-2", max_steps=3)
            assert trainer.state.global_step == 3
        assert not (folder / ".residency-saving").exists()


def let_some_die(folder: Path) -> list[Path]:
    """Forks processes that train on the host and end in the middle of their second save."""
    save, rename = torch.save, os.rename

    def cut_off(value: Any, file: Any) -> None:
        save(value, file)
        if str(file).endswith("checkpoint-4/optimizer.pt"):
            os.truncate(file, 100)
            os._exit(9)

    def never(source: Any, target: Any) -> None:
        if str(target).endswith("checkpoint-4"):
            os._exit(9)
        rename(source, target)

    folders = []
    for target, dying in (("torch.save", cut_off), ("os.rename", never)):
        folders.append(folder / target)
        process = os.fork()
        if process == 0:
            with mock.patch(target, dying):
                trained(tiny_model(), folders[-1], kind=Mixed, use_cpu=True)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 9
    return folders


dead: list[Path] = []


# ------------------------------------------------------------------------------- accelerate


@case
def accelerate_saves_and_loads_an_offloaded_optimizer_to_the_same_bits() -> None:
    batches = text().split(2)
    expected = accelerated(prepared(offload=False), batches[:6])
    with tempfile.TemporaryDirectory() as folder:
        first = prepared(offload=True)
        accelerated(first, batches[:3])
        first[0].save_state(folder)
        second = prepared(offload=True)
        assert device_peak(lambda: second[0].load_state(folder)) == 0
        assert_same(accelerated(second, batches[3:6]), expected)
        assert_same(accelerated(first, batches[3:6]), expected)


def main(folder: Path) -> None:
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)  # capacities here have no room for larger ones
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # the frameworks' advice to their users
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    dead.extend(let_some_die(folder))
    take_device("1GiB", face="cuda", check_races=True)
    case.run(folder / "outcomes.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
