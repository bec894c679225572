"""An offloaded optimizer under Lightning, whose step runs forward and backward inside itself."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import residency

BUCKET = 2000
OPTIMIZERS = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=True, fused=False),
    "NAdam": lambda ps: torch.optim.NAdam(ps, lr=1e-2, foreach=True),
}

pytestmark = [
    # Lightning asks torch's pytree in a way that torch 2.13 gives up.
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    # Advice of Lightning's on workers, logging and GPUs that are not used.
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:GPU available but not used"),
]


@pytest.fixture(scope="module")
def lightning(framework):
    return framework("lightning.pytorch")


@pytest.fixture
def fit(lightning, device, make_net, rows, tmp_path):
    """Trains in a Trainer; an epoch is two steps of two batches each."""
    from lightning.pytorch.plugins.precision import MixedPrecision
    from lightning.pytorch.strategies import SingleDeviceStrategy

    class AnyDevice(lightning.accelerators.CPUAccelerator):
        """Leaves it to torch what the strategy's device needs."""

        def setup_device(self, device):
            pass

    class Module(lightning.LightningModule):
        def __init__(self, make, offload):
            super().__init__()
            self.net = make_net()
            self.make, self.offload = make, offload
            self.levels, self.peaks = [], []

        def configure_optimizers(self):
            optimizer = self.make(self.parameters())
            if self.offload:
                residency.offload_optimizer(optimizer, bucket=BUCKET)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
            return {"optimizer": optimizer, "lr_scheduler": schedule}

        def training_step(self, batch, index):
            torch.accelerator.synchronize()
            self.levels.append(torch.accelerator.memory_allocated())
            torch.accelerator.reset_peak_memory_stats()
            is_infinite = self.trainer.global_step == self.infinite_step
            return self.net(batch[0])["loss"] * (float("inf") if is_infinite else 1.0)

        def on_after_backward(self):
            self.peaks.append(torch.accelerator.max_memory_allocated())

    def fit(make, *, offload=False, epochs=2, resume=None, save=None, is_scaled=False):
        scaler = torch.amp.GradScaler(device.type, init_scale=4.0)
        plugin = MixedPrecision("16-mixed", device.type, scaler)
        trainer = lightning.Trainer(
            max_epochs=epochs,
            accumulate_grad_batches=2,
            gradient_clip_val=0.5,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
            strategy=SingleDeviceStrategy(device=str(device), accelerator=AnyDevice()),
            plugins=[plugin] if is_scaled else [],
        )
        module = Module(make, offload)
        module.infinite_step = 1 if is_scaled else None
        trainer.fit(module, DataLoader(TensorDataset(rows), batch_size=6), ckpt_path=resume)
        if save:
            trainer.save_checkpoint(save)
        return module, trainer.optimizers[0]

    return fit


def end(lab, fitted):
    module, optimizer = fitted
    return lab.read(optimizer, list(module.parameters()))


def test_no_state_is_on_the_device_while_a_step_runs_forward_and_backward(lab, fit):
    fit(OPTIMIZERS["AdamW"])  # makes the workspaces of matrix products, which stay
    plain, offloaded = (fit(OPTIMIZERS["AdamW"], offload=offload) for offload in (False, True))
    lab.assert_equal(end(lab, offloaded), end(lab, plain))
    state_bytes = sum(
        2 * lab.align(p.numel() * p.element_size()) for p in plain[0].parameters()
    )  # exp_avg and exp_avg_sq
    # Two batches come before the first step, and the third is already inside the second.
    assert len(plain[0].levels) == 8
    for name in ("levels", "peaks"):
        pairs = zip(getattr(plain[0], name), getattr(offloaded[0], name), strict=True)
        assert [a - b for a, b in pairs] == [0] * 2 + [state_bytes] * 6


@pytest.mark.parametrize("is_scaled", [False, True], ids=["", "scaled"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_checkpoint_resumes_at_home_to_the_bits_of_a_plain_uninterrupted_run(
    lab, fit, tmp_path, monkeypatch, kind, is_scaled
):
    make, path = OPTIMIZERS[kind], tmp_path / "run.ckpt"
    plain = fit(make, epochs=4, is_scaled=is_scaled)
    fit(make, epochs=2, offload=True, save=path, is_scaled=is_scaled)
    seen = []
    streamed = residency.OffloadedOptimizer.step

    def spy(optimizer, closure=None):
        """Looks at the state before each step: after Lightning's load and moves."""
        state = optimizer.state[optimizer.param_groups[0]["params"][0]]
        seen.append({key: value.is_pinned() for key, value in state.items()})
        return streamed(optimizer, closure)

    spy.hooked = True
    monkeypatch.setattr(residency.OffloadedOptimizer, "step", spy)
    resumed = fit(make, epochs=4, offload=True, resume=path, is_scaled=is_scaled)
    homes = {"step": False, "mu_product": False, "exp_avg": True, "exp_avg_sq": True}
    assert len(seen) == 4
    assert all(found == {key: homes[key] for key in found} for found in seen)
    lab.assert_equal(end(lab, resumed), end(lab, plain))


def test_lightning_s_own_wrapper_is_refused_with_nothing_changed(fit):
    from lightning.pytorch.core.optimizer import LightningOptimizer

    optimizer = fit(OPTIMIZERS["AdamW"])[1]
    before = dict(optimizer.__dict__)
    with pytest.raises(residency.RefusedError, match="Offload that one instead"):
        residency.offload_optimizer(LightningOptimizer(optimizer))
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.__dict__ == before
