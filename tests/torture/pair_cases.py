"""The classes in reach that have ``state_dict``, each with a way to make and to use one of them."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Make = Callable[[], Any]
Use = Callable[[Any], object]


@dataclass(frozen=True)
class Case:
    """A class with what makes an object of it and what changes one."""

    name: str
    make: Make
    use: Use


def seeded(make: Make) -> Make:
    """Makes a first object, and then others that are alike, as those of new processes are."""
    count = 0

    def made() -> Any:
        nonlocal count
        count = min(count + 1, 2)
        torch.manual_seed(count)
        return make()

    return made


def module(name: str, make: Make, *shape: int, more: Use = lambda module: None) -> Case:
    def use(made: nn.Module) -> None:
        torch.manual_seed(99)
        if shape:
            made(torch.randn(shape))
        more(made)

    return Case(name, seeded(make), use)


def _quantization() -> Iterator[Case]:
    ao: Any = torch.ao.quantization
    for name in (
        *("MinMaxObserver", "PerChannelMinMaxObserver", "MovingAverageMinMaxObserver"),
        *("MovingAveragePerChannelMinMaxObserver", "HistogramObserver", "FixedQParamsObserver"),
        *("PlaceholderObserver", "RecordingObserver", "NoopObserver", "FakeQuantize"),
        *("FusedMovingAvgObsFakeQuantize", "ReuseInputObserver"),
    ):
        settings = {"scale": 1.0, "zero_point": 0} if name == "FixedQParamsObserver" else {}
        yield module(name, lambda n=name, s=settings: getattr(ao, n)(**s), 4, 5)
    channels = {"observer": ao.MovingAveragePerChannelMinMaxObserver, "ch_axis": 0}
    per_channel = {"qscheme": torch.per_channel_affine, "dtype": torch.qint8}
    yield module(
        "FakeQuantize per channel",
        lambda: ao.FakeQuantize(**channels, **per_channel, quant_min=-128, quant_max=127),
        *(4, 5),
    )
    qat = ao.get_default_qat_qconfig("fbgemm")
    yield module("qat.Linear", lambda: torch.ao.nn.qat.Linear(4, 4, qconfig=qat), 2, 4)
    bn = torch.ao.nn.intrinsic.qat.ConvBn2d
    yield module("qat.ConvBn2d", lambda: bn(2, 2, 1, qconfig=qat), 2, 2, 3, 3)
    yield module("quantized.Linear", lambda: torch.ao.nn.quantized.Linear(2, 2))


def _torch_modules() -> Iterator[Case]:
    utils, p = nn.utils, nn.utils.parametrizations
    yield module("BatchNorm1d", lambda: nn.BatchNorm1d(4), 3, 4)
    yield module("InstanceNorm1d", lambda: nn.InstanceNorm1d(4, track_running_stats=True), 3, 4, 5)
    yield module("LazyLinear", lambda: nn.LazyLinear(3), 2, 4)
    yield module("LazyConv2d", lambda: nn.LazyConv2d(3, 1), 2, 4, 3, 3)
    yield module("LazyBatchNorm1d", lambda: nn.Sequential(nn.LazyBatchNorm1d()), 3, 4)
    yield module("LSTM", lambda: nn.LSTM(4, 4, 2), 3, 2, 4)
    yield module("MultiheadAttention", lambda: nn.MultiheadAttention(4, 2))
    yield module("TransformerEncoderLayer", lambda: nn.TransformerEncoderLayer(4, 2, 8), 3, 2, 4)
    yield module("ParameterList", lambda: nn.ParameterList([torch.randn(2), torch.randn(3)]))
    yield module("spectral_norm", lambda: p.spectral_norm(nn.Linear(4, 4)), 3, 4)
    yield module("weight_norm", lambda: p.weight_norm(nn.Linear(4, 4)), 3, 4)
    yield module("orthogonal", lambda: p.orthogonal(nn.Linear(4, 4)), 3, 4)
    yield module("old spectral_norm", lambda: utils.spectral_norm(nn.Linear(4, 4)), 3, 4)
    prune: Any = importlib.import_module("torch.nn.utils.prune")
    yield module("prune", lambda: prune.random_unstructured(nn.Linear(4, 4), "weight", 0.5), 3, 4)
    averaged = torch.optim.swa_utils.AveragedModel
    yield module(
        "AveragedModel",
        lambda: averaged(nn.Linear(4, 4)),
        more=lambda m: m.update_parameters(nn.Linear(4, 4)),
    )


def _metrics() -> Iterator[Case]:
    if importlib.util.find_spec("torchmetrics") is None:
        return
    metrics: Any = importlib.import_module("torchmetrics")

    def persistent(make: Make) -> Make:
        def made() -> Any:
            metric = make()
            metric.persistent(mode=True)
            return metric

        return made

    def counted(metric: Any) -> None:
        for _ in range(2):
            metric.update(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]))

    values: Use = lambda metric: metric.update(torch.tensor([1.0, 2.0]))  # noqa: E731
    for name in ("CatMetric", "SumMetric", "MeanMetric", "MaxMetric"):
        yield Case(name, persistent(getattr(metrics, name)), values)
    binary: Any = importlib.import_module("torchmetrics.classification")
    for name in ("BinaryAUROC", "BinaryPrecisionRecallCurve", "BinaryAccuracy", "BinaryROC"):
        yield Case(name, persistent(getattr(binary, name)), counted)
    both = lambda: metrics.MetricCollection([binary.BinaryAUROC(), binary.BinaryF1Score()])  # noqa: E731
    yield Case("MetricCollection", persistent(both), counted)
    yield Case("not persistent", metrics.CatMetric, values)


def _models() -> Iterator[Case]:
    if importlib.util.find_spec("transformers") is not None:
        t: Any = importlib.import_module("transformers")
        small = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 16, "n_positions": 8}
        yield module("GPT2", lambda: t.GPT2LMHeadModel(t.GPT2Config(**small)))
        sizes = {"hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 16, "state_size": 4}
        yield module("Mamba", lambda: t.MambaForCausalLM(t.MambaConfig(**sizes)))
    if importlib.util.find_spec("peft") is not None:
        peft: Any = importlib.import_module("peft")
        for name in ("LoraConfig", "IA3Config", "LoHaConfig", "VeraConfig"):
            settings: dict[str, Any] = {"target_modules": ["0"]}
            if name == "IA3Config":
                settings["feedforward_modules"] = []
            yield module(
                name,
                lambda n=name, s=settings: peft.get_peft_model(
                    nn.Sequential(nn.Linear(4, 4)), getattr(peft, n)(**s)
                ),
                *(2, 4),
            )


def module_cases() -> list[Case]:
    return [*_torch_modules(), *_quantization(), *_metrics(), *_models()]


# ---------------------------------------------------------------------------------- schedulers


def scheduler_cases() -> list[tuple[str, Callable[[torch.optim.Optimizer], Any]]]:
    s = torch.optim.lr_scheduler

    class Factor:
        def __init__(self) -> None:
            self.seen = 0

        def __call__(self, epoch: int) -> float:
            self.seen += 1
            return 0.9**self.seen

    class Counted(s.StepLR):
        updates = 0

        def step(self, *args: Any) -> None:
            self.updates += 3
            super().step(*args)

        def state_dict(self) -> dict[str, Any]:
            return {"inner": super().state_dict(), "updates": self.updates}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.updates = state_dict["updates"]
            super().load_state_dict(state_dict["inner"])

    return [
        ("LambdaLR", lambda o: s.LambdaLR(o, lambda e: 0.9**e)),
        ("LambdaLR of an object", lambda o: s.LambdaLR(o, Factor())),
        ("MultiplicativeLR", lambda o: s.MultiplicativeLR(o, lambda e: 0.9)),
        ("StepLR", lambda o: s.StepLR(o, 2)),
        ("MultiStepLR", lambda o: s.MultiStepLR(o, [1, 3])),
        ("ConstantLR", lambda o: s.ConstantLR(o)),
        ("LinearLR", lambda o: s.LinearLR(o)),
        ("ExponentialLR", lambda o: s.ExponentialLR(o, 0.9)),
        ("PolynomialLR", lambda o: s.PolynomialLR(o)),
        ("CosineAnnealingLR", lambda o: s.CosineAnnealingLR(o, 5)),
        ("CosineAnnealingWarmRestarts", lambda o: s.CosineAnnealingWarmRestarts(o, 3)),
        ("CyclicLR", lambda o: s.CyclicLR(o, 0.01, 0.1)),
        ("OneCycleLR", lambda o: s.OneCycleLR(o, 0.1, total_steps=20)),
        ("ReduceLROnPlateau", lambda o: s.ReduceLROnPlateau(o, patience=1)),
        ("SequentialLR", lambda o: s.SequentialLR(o, [s.ConstantLR(o), s.StepLR(o, 1)], [2])),
        ("ChainedScheduler", lambda o: s.ChainedScheduler([s.ConstantLR(o), s.StepLR(o, 1)])),
        ("SWALR", lambda o: torch.optim.swa_utils.SWALR(o, 0.05)),
        ("with values of its own", lambda o: Counted(o, 2)),
    ]


# ---------------------------------------------------------------------------------- optimizers

# What a class cannot be made without.
_NEEDED: dict[str, dict[str, Any]] = {"Ranger21": {"num_iterations": 100}}


def optimizer_classes(
    *, own_pairs_alone: bool = False
) -> list[tuple[str, Callable[[list[nn.Parameter]], Any]]]:
    """Returns what makes each class, by name: all, or those alone that override a method."""
    base: Any = torch.optim.Optimizer
    found: dict[str, Callable[[list[nn.Parameter]], Any]] = {}
    for package in ("torch.optim", "schedulefree", "pytorch_optimizer"):
        if importlib.util.find_spec(package.partition(".")[0]) is None:
            continue
        library = importlib.import_module(package)
        for name, kind in sorted(vars(library).items()):
            if not (inspect.isclass(kind) and issubclass(kind, base) and kind is not base):
                continue
            methods = [
                (getattr(kind, n), getattr(base, n)) for n in ("state_dict", "load_state_dict")
            ]
            if own_pairs_alone and all(mine is torchs for mine, torchs in methods):
                continue
            settings = _NEEDED.get(name, {})
            found[f"{package}.{name}"] = lambda p, k=kind, s=settings: k(p, **s)
    if "pytorch_optimizer.Lookahead" in found:
        library = importlib.import_module("pytorch_optimizer")
        for name in ("Lookahead", "TRAC", "ScheduleFreeWrapper", "Magma"):
            around = getattr(library, name)
            found[f"pytorch_optimizer.{name}"] = lambda p, k=around: k(
                torch.optim.AdamW(p, lr=0.01)
            )
    return list(found.items())
