"""An offloaded optimizer in the Trainer of `transformers`: handed over, or by a callback."""

import pytest
import torch

import residency

BUCKET = 2000


@pytest.fixture
def train(framework, device, monkeypatch, make_net, rows, tmp_path):
    """Trains four steps with a checkpoint after two; resumes from one that is named."""
    transformers = framework("transformers", "Trainer", "TrainerCallback")
    from accelerate.state import AcceleratorState

    class Offloads(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, optimizer=None, **others):
            residency.offload_optimizer(optimizer, bucket=BUCKET)

    def train(how, resume=None):
        AcceleratorState._reset_state(True)
        monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", str(device))
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / how),
            max_steps=4,
            save_steps=2,
            warmup_steps=1,
            gradient_accumulation_steps=2,
            per_device_train_batch_size=3,
            learning_rate=1e-2,
            optim="adamw_torch",
            optim_args="foreach=True",
            label_names=["rows"],
            report_to=[],
            disable_tqdm=True,
        )
        net = make_net()
        own = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.0, foreach=True)
        if how == "handed over":
            residency.offload_optimizer(own, bucket=BUCKET)
        trainer = transformers.Trainer(
            net,
            arguments,
            train_dataset=[{"rows": row} for row in rows],
            optimizers=(own if "handed" in how else None, None),
            callbacks=[Offloads()] if how == "callback" else [],
        )
        trainer.train(resume_from_checkpoint=resume and str(tmp_path / how / resume))
        assert next(net.parameters()).device == device
        return trainer

    yield train
    AcceleratorState._reset_state(True)


def end(lab, trainer):
    return lab.read(trainer.optimizer.optimizer, list(trainer.model.parameters()))


@pytest.mark.parametrize(
    ("how", "plainly"), [("callback", "made by it"), ("handed over", "handed over plain")]
)
def test_a_run_and_its_resumption_end_at_the_bits_of_a_plain_uninterrupted_one(
    lab, train, how, plainly
):
    plain = train(plainly)
    assert type(plain.optimizer.optimizer) is torch.optim.AdamW
    whole, resumed = train(how), train(how, resume="checkpoint-2")
    for trainer, num_steps in ((whole, 4), (resumed, 2)):
        optimizer = trainer.optimizer.optimizer
        assert isinstance(optimizer, residency.OffloadedOptimizer)
        assert optimizer.statistics().num_steps == num_steps
        assert optimizer.state[next(trainer.model.parameters())]["exp_avg"].is_pinned()
        lab.assert_equal(end(lab, trainer), end(lab, plain))
