"""Checkpoints that are written behind training are those of stock code."""

from __future__ import annotations

import gc
import json
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from safetensors.torch import load_file
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
    weights,
)
from worker_cases import pinned_bytes

import residency
from residency.integrations.transformers import (
    ResidencyTrainerMixin,
)

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
