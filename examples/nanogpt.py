"""Train a GPT-2 on one GPU: mixed precision, prefetch on a side stream, fused AdamW, checkpoints.

python nanogpt.py --batch-size 12 --block-size 1024 --dtype bfloat16
"""

import argparse
import math
import os
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--n-layer", type=int, default=12)
parser.add_argument("--n-head", type=int, default=12)
parser.add_argument("--n-embd", type=int, default=768)
parser.add_argument("--vocab-size", type=int, default=50304)
parser.add_argument("--block-size", type=int, default=1024)
parser.add_argument("--batch-size", type=int, default=12)
parser.add_argument("--gradient-accumulation-steps", type=int, default=4)
parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="bfloat16")
parser.add_argument("--learning-rate", type=float, default=6e-4)
parser.add_argument("--max-iters", type=int, default=600)
parser.add_argument("--warmup-iters", type=int, default=100)
parser.add_argument("--eval-interval", type=int, default=200)
parser.add_argument("--eval-iters", type=int, default=20)
parser.add_argument("--out-dir", default="out")
parser.add_argument("--resume", action="store_true")
args = parser.parse_args()

device = "cuda"
torch.manual_seed(1337)
torch.backends.cuda.matmul.allow_tf32 = True
ctx = torch.autocast(device, getattr(torch, args.dtype), enabled=args.dtype != "float32")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        n = args.n_embd
        self.ln_1, self.ln_2 = nn.LayerNorm(n), nn.LayerNorm(n)
        self.c_attn, self.c_proj = nn.Linear(n, 3 * n), nn.Linear(n, n)
        self.mlp = nn.Sequential(nn.Linear(n, 4 * n), nn.GELU(), nn.Linear(4 * n, n))

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).split(C, dim=2)
        q, k, v = (t.view(B, T, args.n_head, C // args.n_head).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(args.vocab_size, args.n_embd)
        self.wpe = nn.Embedding(args.block_size, args.n_embd)
        self.h = nn.ModuleList(Block() for _ in range(args.n_layer))
        self.ln_f = nn.LayerNorm(args.n_embd)
        self.lm_head = nn.Linear(args.n_embd, args.vocab_size, bias=False)
        self.apply(self._init_weights)
        self.wte.weight = self.lm_head.weight

    def _init_weights(self, module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, idx, targets):
        pos = torch.arange(idx.size(1), device=idx.device)
        x = self.wte(idx) + self.wpe(pos)
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))


data = np.random.default_rng(0).integers(0, args.vocab_size, 200_000, dtype=np.uint16)
copy_stream = torch.cuda.Stream()


def get_batch():
    """Start to move the next batch on the side stream."""
    ix = torch.randint(len(data) - args.block_size - 1, (args.batch_size,))
    chunks = [torch.from_numpy(data[i : i + args.block_size + 1].astype(np.int64)) for i in ix]
    batch = torch.stack(chunks).pin_memory()
    with torch.cuda.stream(copy_stream):
        return batch.to(device, non_blocking=True)


def take(batch):
    torch.cuda.current_stream().wait_stream(copy_stream)
    batch.record_stream(torch.cuda.current_stream())
    return batch[:, :-1], batch[:, 1:]


model = GPT().to(device)
decay = [p for p in model.parameters() if p.dim() >= 2]
no_decay = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, 0.95), fused=True)
accumulation = args.gradient_accumulation_steps
scaler = torch.amp.GradScaler(device, enabled=args.dtype == "float16")
print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters")

checkpoint_path = os.path.join(args.out_dir, "ckpt.pt")
iter_num, best_val_loss = 0, float("inf")
if args.resume:
    checkpoint = torch.load(checkpoint_path, map_location=device)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    iter_num, best_val_loss = checkpoint["iter_num"], checkpoint["best_val_loss"]
    del checkpoint


def get_lr(it):
    if it < args.warmup_iters:
        return args.learning_rate * (it + 1) / (args.warmup_iters + 1)
    ratio = (it - args.warmup_iters) / max(1, args.max_iters - args.warmup_iters)
    return args.learning_rate * (0.1 + 0.45 * (1.0 + math.cos(math.pi * min(1.0, ratio))))


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = torch.zeros(args.eval_iters)
    for k in range(args.eval_iters):
        x, y = take(get_batch())
        with ctx:
            losses[k] = model(x, y).item()
    model.train()
    return losses.mean()


batch = get_batch()
t0 = time.time()
while iter_num < args.max_iters:
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    for _ in range(accumulation):
        x, y = take(batch)
        with ctx:
            loss = model(x, y) / accumulation
        batch = get_batch()
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1

    lossf = loss.item() * accumulation
    dt, t0 = time.time() - t0, time.time()
    print(f"iter {iter_num}: loss {lossf:.4f}, time {dt * 1000:.2f}ms")
    if iter_num % args.eval_interval == 0 or iter_num == args.max_iters:
        val_loss = estimate_loss()
        print(f"step {iter_num}: val loss {val_loss:.4f}")
        if val_loss < best_val_loss:
            best_val_loss = val_loss
            os.makedirs(args.out_dir, exist_ok=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | {"iter_num": iter_num, "best_val_loss": val_loss}, checkpoint_path)

print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
