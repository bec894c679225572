"""A training script that knows nothing of the simulator; tests/sim/test_cuda_face.py runs it.

    cuda_script.py DEVICE float32|bfloat16 FILE

What it learned is written to FILE, on the host.
"""

import sys

import torch
from torch import nn
from torch.nn import functional

DEVICE, PRECISION, FILE = sys.argv[1:]
VOCABULARY, LENGTH, WIDTH, HEADS = 61, 16, 32, 4
IS_MIXED = PRECISION == "bfloat16"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.mix(self.before_attention(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in heads)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.feed_forward(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tokens(x) + self.places(torch.arange(LENGTH, device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    text = torch.randint(VOCABULARY, (48, LENGTH + 1), generator=generator)
    data = torch.utils.data.TensorDataset(text[:, :-1].clone(), text[:, 1:].clone())
    loader = torch.utils.data.DataLoader(data, batch_size=8, pin_memory=DEVICE == "cuda")
    return list(loader)


def trainer(seed: int) -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Model().to(DEVICE)
    for parameter in model.parameters():
        assert parameter.is_cuda == (DEVICE == "cuda")
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def step(
    model: Model,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    batch: tuple[torch.Tensor, ...],
) -> torch.Tensor:
    x, y = (part.to(DEVICE, non_blocking=True) for part in batch)
    with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=IS_MIXED):
        loss = functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def use_cuda(weight: torch.Tensor) -> None:
    """What a script does with streams and events; it changes nothing."""
    torch.cuda.set_device(0)
    side, start, end = torch.cuda.Stream(), torch.cuda.Event(True), torch.cuda.Event(True)
    side.wait_stream(torch.cuda.current_stream())
    start.record()
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() == side
        copy = weight.detach().clone()
        copy.record_stream(side)
    torch.cuda.current_stream().wait_stream(side)
    end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) >= 0
    assert torch.equal(copy, weight)


def main() -> None:
    model, optimizer = trainer(seed=1)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0)
    data = batches()
    losses = [step(model, optimizer, scaler, batch) for batch in data[:3]]
    if DEVICE == "cuda":
        assert data[0][0].is_pinned()
        use_cuda(model.head.weight)
        assert torch.cuda.max_memory_allocated() > torch.cuda.memory_allocated() > 0
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, FILE)

    model, optimizer = trainer(seed=2)
    state = torch.load(FILE, map_location=DEVICE)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    losses += [step(model, optimizer, scaler, batch) for batch in data[3:]]
    learned = {"losses": torch.stack(losses).cpu(), "scale": scaler.get_scale()}
    for name, value in model.state_dict().items():
        learned[name] = value.cpu()
    for index, state in optimizer.state_dict()["state"].items():
        learned.update({f"{index}.{name}": value.cpu() for name, value in state.items()})
    torch.save(learned, FILE)


if __name__ == "__main__":
    main()
