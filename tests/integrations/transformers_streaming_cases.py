"""A Trainer whose model has a base that streams from the host: the bits of a resident run."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers_lab import adapted, case, inside, tiny_model, trained

import residency


def _both(**settings: Any) -> None:
    found: dict[bool, list[Tensor]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        for streams in found:
            where = inside(folder)
            for resume, max_steps in ((None, 4), ("checkpoint-2", 6)):
                model = adapted(tiny_model(num_hidden_layers=5))
                streaming = residency.stream_frozen(model) if streams else nullcontext()
                with streaming:
                    trainer = trained(model, where, resume=resume, max_steps=max_steps, **settings)
                    layers = model.get_base_model().model.layers
                    frozen = [p for p in layers.parameters() if not p.requires_grad]
                    assert {p.is_cpu for p in frozen} == {streams}
                history = trainer.state.log_history
                losses = [e[key] for e in history for key in ("loss", "eval_loss") if key in e]
                found[streams].append(torch.tensor(losses))
                found[streams] += [value.cpu() for value in model.state_dict().values()]
    assert len(found[False]) > 100
    assert all(map(torch.equal, found[True], found[False]))


@case
def a_streamed_base_is_trained_and_resumed_to_the_bits_of_a_resident_one() -> None:
    _both(gradient_accumulation_steps=2)


@case
def so_it_is_checkpointed_and_in_mixed_precision() -> None:
    _both(activation_checkpointing=True, bf16=True, logging_steps=1)
