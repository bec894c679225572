"""Values that a checkpoint may hold, and those that no file can."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_lab import PLUGINS, Kind, case, folder, make_trainer, read
from same_values import assert_same
from torch import nn

import residency
from residency.integrations.lightning import (
    ResidencyCheckpointIO,
)


@case
def unusual_values_are_frozen_as_torch_save_keeps_them() -> None:
    shared = torch.arange(12.0, device="cuda")
    strange: dict[str, Any] = {
        "view": shared[2:6],
        "whole": shared,
        "columns": shared.view(3, 4).t(),
        "parameter": nn.Parameter(shared.clone(), requires_grad=False),
        "grad": torch.ones(2, requires_grad=True),
        "module": nn.Linear(2, 2).cuda(),
        "kind": torch.ones(3, device="cuda").as_subclass(Kind),
        "sparse": torch.eye(3).to_sparse(),
        "conj": torch.ones(2, dtype=torch.complex64).conj(),
        "quantized": torch.quantize_per_tensor(torch.ones(2), 0.1, 1, torch.qint8),
        "meta": torch.empty(2, device="meta"),
        "bf16": torch.ones(3, dtype=torch.bfloat16, device="cuda"),
        "empty": torch.empty(0, 3, device="cuda"),
        "function": make_trainer,
        "optimizer_states": [{"state": {0: {"sparse": torch.eye(2).to_sparse()}, 1: None}}],
        "path": Path("a"),
        "state_dict": nn.Linear(2, 2).cuda().state_dict(),
    }
    strange["again"] = [strange["view"], strange["parameter"]]
    seen: list[Any] = []

    class Keeping(PLUGINS.TorchCheckpointIO):  # type: ignore[misc]
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            seen.append(checkpoint)
            super().save_checkpoint(checkpoint, path)

    with folder() as at:
        PLUGINS.TorchCheckpointIO().save_checkpoint(strange, at / "sync")
        io = ResidencyCheckpointIO(Keeping())
        io.save_checkpoint(strange, at / "ours")
        shared.fill_(-1)
        strange["module"].weight.data.fill_(-1)
        io.teardown()
        found, expected = read(at / "ours"), read(at / "sync")
    for both in (found, expected):
        both["module"] = both["module"].state_dict()
        both["sparse"] = both["sparse"].to_dense()
        state = both["optimizer_states"][0]["state"]
        state[0] = state[0]["sparse"].to_dense()
        both["conj"] = both["conj"].resolve_conj()
        both["quantized"] = both["quantized"].int_repr()
        assert type(both.pop("kind")) is Kind
        assert both.pop("meta").is_meta
    assert_same(found, expected)
    assert found["view"].untyped_storage().data_ptr() == found["whole"].untyped_storage().data_ptr()
    assert found["again"][0] is found["view"]
    assert seen[0]["parameter"].device.type == "cpu"
    assert list(found["state_dict"]._metadata) == [""]


@case
def attributes_of_tensors_are_in_the_file() -> None:
    parameter = nn.Parameter(torch.ones(3, device="cuda"))
    tensor = torch.zeros(2, device="cuda")
    parameter.notes, tensor.other = ["a"], parameter  # type: ignore[attr-defined]
    with folder() as at:
        io = ResidencyCheckpointIO()
        io.save_checkpoint({"p": parameter, "t": tensor, "again": parameter}, at / "a")
        parameter.notes.append("b")  # type: ignore[attr-defined]
        io.teardown()
        found = read(at / "a")
    assert found["p"].notes == ["a"]
    assert found["p"] is found["again"]
    assert found["t"].other is found["p"]


@case
def what_no_file_can_hold_is_refused_by_its_name() -> None:
    with folder() as at:
        io = ResidencyCheckpointIO()
        with pytest.raises(residency.RefusedError, match=r"'lock' .*cannot pickle"):
            io.save_checkpoint({"a": 1, "lock": threading.Lock()}, at / "a")
        io.save_checkpoint({"a": 1}, at / "b")
        io.teardown()
        assert [path.name for path in at.iterdir()] == ["b"]


@case
def what_pickle_can_not_find_again_is_refused_at_the_call_too() -> None:
    class Local:
        pass

    with folder() as at:
        io = ResidencyCheckpointIO()
        for value in (lambda: 0, Local, Local(), os):
            with pytest.raises(residency.RefusedError, match="'mine' "):
                io.save_checkpoint({"a": 1, "mine": [value]}, at / "a")
        io.teardown()
        assert list(at.iterdir()) == []
