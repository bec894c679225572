"""Training runs to save, restore and compare."""

import torch

import residency

BUCKET = 4096


class Net(torch.nn.Module):
    """Has tied weights, a buffer that forward changes, one that is not saved, and a scalar."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(48, 32)
        self.norm = torch.nn.BatchNorm1d(32)
        self.inner = torch.nn.Linear(32, 65)
        self.outer = torch.nn.Linear(65, 32, bias=False)
        self.head = torch.nn.Linear(32, 48, bias=False)
        self.head.weight = self.embed.weight
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.frozen = torch.nn.Parameter(torch.ones(5), requires_grad=False)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, tokens):
        hidden = self.norm(self.embed(tokens))
        hidden = hidden + self.outer(torch.relu(self.inner(hidden))) * self.scale
        return self.head(torch.dropout(hidden, 0.1, True)) + self.frozen.sum()


class Run:
    """Is a training run: model, optimizer, scheduler, and steps on data of their own."""

    def __init__(self, device, *, offload=False, seed=0, kind=torch.optim.AdamW, **settings):
        torch.manual_seed(seed)
        self.device = device
        self.model = Net().to(device)
        named = dict(self.model.named_parameters())
        groups = [
            {"params": [p for n, p in named.items() if "inner" not in n]},
            {"params": [p for n, p in named.items() if "inner" in n], "lr": 3e-3},
        ]
        self.optimizer = kind(groups, lr=1e-2, **settings)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: 0.9**n)
        if offload:
            residency.offload_optimizer(self.optimizer, bucket=BUCKET)
        self.extra = {"epoch": 0, "losses": []}

    @property
    def state(self):
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "extra": self.extra,
        }

    def train(self, steps):
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randint(0, 48, (8,), generator=generator).to(self.device)
            self.optimizer.zero_grad()
            torch.nn.functional.cross_entropy(self.model(tokens), tokens).backward()
            self.optimizer.step()
            self.scheduler.step()
            self.extra["epoch"] = step
            self.extra["losses"].append(float(step))

    def read(self):
        """Returns copies of all that counts, with no wait for the device first."""
        found = {n: v.detach().cpu().clone() for n, v in self.model.state_dict().items()}
        names = {p: n for n, p in self.model.named_parameters()}
        for parameter, values in self.optimizer.state.items():
            for key, value in dict(values).items():
                found[f"state.{names[parameter]}.{key}"] = value.detach().cpu().clone()
        groups = [
            {k: v for k, v in g.items() if k not in ("params", "fused", "foreach")}
            for g in self.optimizer.param_groups
        ]
        return found, repr(groups), repr(self.scheduler.state_dict()), repr(self.extra)


def assert_equal(left, right):
    assert left[0].keys() == right[0].keys()
    for name, value in left[0].items():
        assert value.dtype == right[0][name].dtype, name
        assert torch.equal(value, right[0][name]), name
    assert left[1:] == right[1:]
