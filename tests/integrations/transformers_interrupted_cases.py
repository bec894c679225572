"""Checkpoints of processes that a signal or death interrupts, and saves under way at once."""

from __future__ import annotations

import os
import signal
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
from torch import nn
from transformers_lab import (
    Each,
    Mixed,
    adapted,
    adapter_of,
    assert_same,
    case,
    files_of,
    make,
    tiny_model,
    trained,
    weights,
)

import residency
from residency.integrations.transformers import (
    save_pretrained,
)


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
