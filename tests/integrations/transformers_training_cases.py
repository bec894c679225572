"""The offloaded optimizer under a trainer and under accelerate, its phases and its errors."""

from __future__ import annotations

import gc
import io
import json
import sys
import tempfile
import unittest
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import nn
from transformers_lab import (
    BUCKET,
    Each,
    Mixed,
    accelerated,
    adapted,
    assert_same,
    case,
    device_peak,
    inside,
    make,
    ours,
    peft,
    prepared,
    text,
    tiny_model,
    trained,
    weights,
)

import residency
from residency.integrations.transformers import (
    ResidencyCallback,
    ResidencyTrainerMixin,
)

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
def an_overlapped_run_ends_at_the_bits_of_a_stock_run() -> None:
    for resident in (0, "auto"):
        with tempfile.TemporaryDirectory() as folder:
            plain = trained(tiny_model(), inside(folder))
            callback = ResidencyCallback(bucket=BUCKET, overlap=True, resident=resident)
            found = trained(tiny_model(), inside(folder), callback)
            assert_same(weights(found.model), weights(plain.model))
            inner = found.optimizer.optimizer
            assert inner.statistics().ahead_bytes > 0
            assert_same(inner.state_dict(), plain.optimizer.state_dict())
    with pytest.raises(residency.InvalidArgumentError, match="overlap=True"):
        ResidencyCallback(resident="auto")


@case
def a_callback_whose_offload_saves_nothing_warns_once_with_the_bytes() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        unittest.TestCase().assertLogs("residency", "WARNING") as log,
    ):
        trained(tiny_model(), inside(folder), ResidencyCallback())
    (text,) = (record.getMessage() for record in log.records)
    assert "offloading this AdamW saves 0 B of device memory in a step" in text


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
def a_stock_trainer_has_passes_loads_and_evaluations_in_a_recording() -> None:
    with tempfile.TemporaryDirectory() as folder:
        file, at = Path(folder) / "run.jsonl", inside(folder)
        with residency.record(file):
            trainer = trained(adapted(), at)
            load_adapter = trainer.model.load_adapter
            load_adapter(trainer.state.best_model_checkpoint, "second")
        with residency.record(Path(folder) / "resumed.jsonl"):
            trained(adapted(), at, resume="checkpoint-2")
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        ended = [each["phase"] for each in lines if each.get("kind") == "end"]
        # The best model's, which calls `load_adapter`, then the one of this function.
        expected = {"forward": 4, "backward": 4, "optimizer_step": 4, "load": 2}
        assert {name: ended.count(name) for name in expected} == expected, ended
        assert {"evaluate", "save"} <= set(ended)
        assert not any("/" in name for name in ended), ended
        assert not any(each.get("error") for each in lines)
        resumed = (Path(folder) / "resumed.jsonl").read_text()
        assert resumed.index('"phase":"load"') < resumed.index('"phase":"forward"')


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
