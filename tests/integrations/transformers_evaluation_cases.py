"""Evaluations whose outputs go to the host batch by batch, beside those of a stock trainer."""

from __future__ import annotations

import gc
import tempfile
import types
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers_lab import Lines, Mixed, arguments, case, inside, ours, text, tiny_model
from worker_cases import pinned_bytes

import residency
from residency.integrations.transformers import ResidencyCallback, _evaluation

STOCK = transformers.trainer.EvalLoopContainer


class Ragged(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Lines of various lengths: batches of them are padded to their longest."""

    def __len__(self) -> int:
        return 23  # the last batch is a smaller one

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        line = text()[index][: 5 + 7 * index % 11]
        return {"input_ids": line, "labels": line}


def padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    pad = nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad([row["input_ids"] for row in rows], batch_first=True),
        "labels": pad([row["labels"] for row in rows], batch_first=True, padding_value=-100),
    }


class Evaluated:
    """What a trainer's evaluation and prediction give, and what its metrics are given."""

    def __init__(
        self,
        folder: str,
        *callbacks: Any,
        kind: Any = transformers.Trainer,
        model: Any = None,
        data: Any = None,
        preprocess: Callable[..., Any] | None = None,
        metrics: Callable[..., Any] | None = None,
        **settings: Any,
    ) -> None:
        self.given: list[Any] = []
        self.metrics = metrics
        options = {"per_device_eval_batch_size": 5, "eval_strategy": "no", "save_strategy": "no"}
        options |= {"load_best_model_at_end": False}
        self.trainer = kind(
            tiny_model() if model is None else model,
            arguments(inside(folder), **{**options, **settings}),
            eval_dataset=Lines() if data is None else data,
            data_collator=padded,
            callbacks=list(callbacks),
            compute_metrics=self._compute,
            preprocess_logits_for_metrics=preprocess,
        )

    def _compute(self, found: Any, compute_result: bool | None = None) -> dict[str, Any]:
        self.given.append(found[:] if isinstance(found, tuple) else tuple(found))
        self.given.append(type(found.predictions))
        if self.metrics is not None:
            return self.metrics(found)
        first = found.predictions
        while isinstance(first, (list, tuple)):
            first = first[0]
        return {"mean": float(first.sum()), "last": compute_result}

    def values(self) -> Any:
        """Everything but the times."""
        evaluated = self.trainer.evaluate()
        predicted = self.trainer.predict(self.trainer.eval_dataset)
        numbers = [
            {k: v for k, v in each.items() if not k.endswith(("_second", "_runtime", "_time"))}
            for each in (evaluated, predicted.metrics)
        ]
        return [numbers, predicted.predictions, predicted.label_ids, self.given]


def assert_alike(found: Any, expected: Any, name: str = "") -> None:
    """Compares types, dtypes, shapes and bytes."""
    assert type(found) is type(expected), name
    if isinstance(expected, Mapping):
        assert list(found) == list(expected), name
        for key, value in expected.items():
            assert_alike(found[key], value, f"{name}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), name
        for index, value in enumerate(expected):
            assert_alike(found[index], value, f"{name}[{index}]")
    elif isinstance(expected, Tensor):
        assert found.device == expected.device, name
        assert_alike(found.cpu().numpy(), expected.cpu().numpy(), name)
    elif isinstance(expected, numpy.ndarray):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), name
        assert found.tobytes() == expected.tobytes(), name
    else:
        assert repr(found) == repr(expected), name


def assert_stock_s(callbacks: Callable[[], list[Any]] = lambda: [ours()], **settings: Any) -> None:
    """Compares with stock code's, of a model with the same weights."""
    model = settings.pop("model", tiny_model)
    with tempfile.TemporaryDirectory() as folder:
        expected = Evaluated(folder, model=model(), **settings).values()
        for kind in (transformers.Trainer, Mixed):
            found = Evaluated(folder, *callbacks(), kind=kind, model=model(), **settings).values()
            assert_alike(found, expected)
    assert not pinned_bytes()


@case
def evaluations_and_predictions_have_the_bits_of_stock_code() -> None:
    assert_stock_s()
    assert_stock_s(data=Ragged())
    assert_stock_s(data=Ragged(), eval_accumulation_steps=2)
    assert_stock_s(data=Ragged(), eval_do_concat_batches=False)
    assert_stock_s(data=Ragged(), include_for_metrics=["inputs", "loss"])
    assert_stock_s(eval_do_concat_batches=False, eval_accumulation_steps=1)
    assert_stock_s(per_device_eval_batch_size=24)  # one batch
    assert_stock_s(bf16_full_eval=True, data=Ragged())
    assert_stock_s(prediction_loss_only=True)


@case
def metrics_of_each_batch_get_device_tensors_as_ever() -> None:
    def on_device(found: Any) -> dict[str, float]:
        assert found.predictions.is_cuda
        assert found.label_ids.is_cuda
        return {"sum": found.predictions.double().sum().item()}

    assert_stock_s(batch_eval_metrics=True, metrics=on_device)
    more = {"include_for_metrics": ["inputs", "loss"]}
    assert_stock_s(batch_eval_metrics=True, metrics=on_device, data=Ragged(), **more)


@case
def what_a_gather_makes_of_a_batch_has_the_bits_of_stock_code() -> None:
    """As on two ranks with the same rows, of which the last is cut off."""
    from accelerate import Accelerator
    from accelerate.utils import recursively_apply

    def gathered(self: Any, input_data: Any, use_gather_object: bool = False) -> Any:
        return recursively_apply(lambda tensor: torch.cat([tensor, tensor])[:-1], input_data)

    with mock.patch.object(Accelerator, "gather_for_metrics", gathered):
        assert_stock_s(data=Ragged(), include_for_metrics=["inputs", "loss"])


@case
def nested_outputs_have_the_bits_of_stock_code() -> None:
    def nested(logits: Any, labels: Any) -> Any:
        logits = logits[0] if isinstance(logits, tuple) else logits
        named = {"best": logits.argmax(-1), "last": logits[:, -1], "host": labels.cpu()}
        return [named, (logits.bfloat16(), labels > 7), logits.half()]

    assert_stock_s(preprocess=nested, data=Ragged(), metrics=lambda found: {})
    assert_stock_s(model=lambda: tiny_model(output_hidden_states=True))
    assert_stock_s(preprocess=lambda logits, labels: logits.argmax(-1))


@case
def what_stock_code_makes_of_batches_that_differ_is_made_here() -> None:
    calls = iter(range(10**6))

    def dtypes(logits: Tensor, labels: Tensor) -> Tensor:
        """First whole numbers that half precision lacks, then half, then full precision."""
        made = (labels * 10_000 + 1, logits[..., 0].half(), logits[..., 0])
        return made[min(next(calls) % 5, 2)]

    def keys(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        named = {"a": logits[..., 0], "b": labels}
        return named if next(calls) % 2 else dict(reversed(named.items()))

    nothing = {"metrics": lambda found: {}}
    for preprocess in (dtypes, keys):
        for settings in ({}, {"eval_accumulation_steps": 3}):
            calls = iter(range(10**6))
            assert_stock_s(preprocess=preprocess, **nothing, **settings)

    def deep(logits: Tensor, labels: Tensor) -> Tensor:
        return logits if next(calls) < 2 else labels

    def shallow(logits: Tensor, labels: Tensor) -> Any:
        return (logits,) if next(calls) < 2 else logits

    kinds = (AssertionError, AttributeError, IndexError, RuntimeError, TypeError)
    for preprocess in (deep, shallow, lambda logits, labels: (logits, None)):
        errors = []
        for callbacks in ([], [ours()]):
            calls = iter(range(10**6))
            with tempfile.TemporaryDirectory() as folder:
                made = Evaluated(folder, *callbacks, preprocess=preprocess)
                with pytest.raises(kinds) as info:
                    made.values()
            errors.append((info.type, str(info.value), next(calls)))
        assert errors[0] == errors[1]
        del info


def peak_of(folder: str, *callbacks: Any, **settings: Any) -> int:
    """By how much an evaluation raises the device's bytes."""
    made = Evaluated(folder, *callbacks, per_device_eval_batch_size=4, **settings)
    made.trainer.evaluate()  # libraries take what they keep
    gc.collect()
    torch.accelerator.synchronize()
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    made.trainer.evaluate()
    return torch.accelerator.max_memory_allocated() - before


@case
def the_device_has_the_outputs_of_one_batch_beside_what_an_evaluation_without_them_needs() -> None:
    num_batches, tokens = 6, 4 * 16
    logits, labels, losses = tokens * 256 * 4, tokens * 8, 512  # a block of the device
    batch = logits + 2 * labels + losses  # labels twice: the loop has them, too
    with tempfile.TemporaryDirectory() as folder:
        least = peak_of(folder, prediction_loss_only=True)
        stock = peak_of(folder)
        assert stock >= least + (num_batches - 1) * logits
        for kind in (transformers.Trainer, Mixed):
            assert peak_of(folder, ours(), kind=kind) <= least + batch


@case
def a_trainer_without_the_callback_is_left_alone_while_another_has_it() -> None:
    with tempfile.TemporaryDirectory() as folder:
        stock, plain = peak_of(folder), Evaluated(folder).values()
        callback = ours()
        made = Evaluated(folder, callback)
        assert transformers.trainer.EvalLoopContainer is _evaluation.HostContainer
        assert issubclass(_evaluation.HostContainer, STOCK)
        assert peak_of(folder) == stock
        assert peak_of(folder, ours(outputs_on_host=False)) == stock
        inner = Evaluated(folder)

        def in_metrics(found: Any) -> dict[str, Any]:
            assert_alike(inner.values(), plain)
            inner.given.clear()
            return {}

        assert_stock_s(metrics=in_metrics)
        callback.remove()
        gc.collect()  # the callbacks of the trainers before
        del made
        other = ours()
        other.on_init_end(None, None, transformers.TrainerControl(), model=None)
        other.remove()
        assert transformers.trainer.EvalLoopContainer is STOCK


@case
def a_loop_of_another_module_keeps_its_outputs_on_the_host_too() -> None:
    """Axolotl compiles the loop's source again, among the names of a module of its own."""
    loop = transformers.Trainer.evaluation_loop
    names = dict(vars(transformers.trainer)) | {"EvalLoopContainer": STOCK}
    other = types.FunctionType(loop.__code__, names, loop.__name__, loop.__defaults__)
    other.__kwdefaults__ = loop.__kwdefaults__
    callback = ours()
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(transformers.Trainer, "evaluation_loop", other),
    ):
        stock = peak_of(folder)
        assert stock - peak_of(folder, callback) >= 4 * (4 * 16 * 256 * 4)  # of six batches
        assert names["EvalLoopContainer"] is _evaluation.HostContainer
        assert_stock_s(data=Ragged())
        callback.remove()
        gc.collect()  # the callbacks of the trainers before
        other_one = ours()
        other_one.on_init_end(None, None, transformers.TrainerControl(), model=None)
        other_one.remove()
        assert names["EvalLoopContainer"] is STOCK


@case
def an_evaluation_that_fails_leaves_nothing_and_the_next_one_is_whole() -> None:
    calls = iter(range(10**6))

    def failing(logits: Tensor, labels: Tensor) -> Tensor:
        if next(calls) == 3:
            raise KeyError("of the user's")
        return logits

    with tempfile.TemporaryDirectory() as folder:
        expected = Evaluated(folder).values()
        made = Evaluated(folder, ours(), preprocess=failing)
        gc.collect()
        before = torch.accelerator.memory_allocated()
        with pytest.raises(KeyError, match="of the user's") as info:
            made.trainer.evaluate()
        del info
        gc.collect()
        held = torch.accelerator.memory_allocated()
        assert held - before <= sum(p.nbytes for p in made.trainer.model.parameters())
        assert not pinned_bytes()
        assert_alike(made.values(), expected)


@case
def outputs_that_are_written_again_are_an_error_that_says_what_to_do() -> None:
    kept: list[Tensor] = []

    def in_place(logits: Tensor, labels: Tensor) -> Tensor:
        kept[:] = kept or [torch.zeros(5, 16, 256, device=logits.device)]
        with residency.mutating(*kept):
            return kept[0][: len(logits)].copy_(logits)

    def in_place_alone(logits: Tensor, labels: Tensor) -> Tensor:
        kept[:] = kept or [torch.zeros(5, 16, 256, device=logits.device)]
        with residency.mutating(*kept):
            kept[0].copy_(logits)
        return kept[0]

    with tempfile.TemporaryDirectory() as folder:
        expected = Evaluated(folder, per_device_eval_batch_size=4).values()
        kept.clear()
        # A part of what is kept is copied at once.
        made = Evaluated(folder, ours(), per_device_eval_batch_size=4, preprocess=in_place)
        assert_alike(made.values(), expected)
        kept.clear()
        made = Evaluated(folder, ours(), data=first_lines(10), preprocess=in_place_alone)
        with pytest.raises(residency.RefusedError, match=r"written in place.*clone"):
            made.trainer.evaluate()


def first_lines(num_rows: int) -> Any:
    return torch.utils.data.Subset(Lines(), range(num_rows))


@case
def a_version_without_the_containers_is_refused_with_the_way_out() -> None:
    with (
        mock.patch.dict(vars(transformers.trainer)),
        tempfile.TemporaryDirectory() as folder,
    ):
        del transformers.trainer.EvalLoopContainer
        with pytest.raises(residency.RefusedError, match=r"outputs_on_host=False") as info:
            Evaluated(folder, ours())
        assert f"transformers {transformers.__version__}" in str(info.value)
        Evaluated(folder, ResidencyCallback(outputs_on_host=False))
