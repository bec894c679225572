"""Train a vision transformer with EMA weights, mixup and a cosine schedule.

python vit_ema.py --dim 768 --depth 12 --batch-size 64
"""

import argparse
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, dim, heads, drop_path):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.drop_path = drop_path

    def drop(self, x):
        if not self.training or self.drop_path == 0.0:
            return x
        keep = 1.0 - self.drop_path
        return x * x.new_empty(len(x), 1, 1).bernoulli_(keep) / keep

    def forward(self, x):
        h = self.norm1(x)
        x = x + self.drop(self.attention(h, h, h, need_weights=False)[0])
        return x + self.drop(self.mlp(self.norm2(x)))


class VisionTransformer(nn.Module):
    def __init__(self, image_size, patch, dim, depth, heads, num_classes, drop_path=0.1):
        super().__init__()
        self.patches = nn.Conv2d(3, dim, patch, stride=patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        self.positions = nn.Parameter(torch.zeros(1, (image_size // patch) ** 2 + 1, dim))
        rates = torch.linspace(0, drop_path, depth).tolist()
        self.blocks = nn.Sequential(*(Block(dim, heads, rate) for rate in rates))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, num_classes)
        nn.init.trunc_normal_(self.positions, std=0.02)
        nn.init.trunc_normal_(self.cls, std=0.02)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


def mixup(images, labels, num_classes, alpha, smoothing=0.1):
    ratio = torch.distributions.Beta(alpha, alpha).sample().item()
    order = torch.randperm(len(images), device=images.device)
    off = smoothing / num_classes
    targets = torch.full((len(labels), num_classes), off, device=labels.device)
    targets.scatter_(1, labels[:, None], 1.0 - smoothing + off)
    images = ratio * images + (1.0 - ratio) * images[order]
    return images, ratio * targets + (1.0 - ratio) * targets[order]


@torch.inference_mode()
def evaluate(model, loader, num_classes):
    model.eval()
    confusion = torch.zeros(num_classes, num_classes, dtype=torch.long, device="cuda")
    loss_sum, seen = 0.0, 0
    for images, labels in loader:
        images, labels = images.cuda(non_blocking=True), labels.cuda(non_blocking=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(images)
        loss_sum += F.cross_entropy(logits.float(), labels, reduction="sum").item()
        seen += len(labels)
        cells = labels * num_classes + logits.argmax(dim=1)
        confusion += torch.bincount(cells, minlength=num_classes**2).view_as(confusion)
    recall = confusion.diag() / confusion.sum(dim=1).clamp(min=1)
    return loss_sum / seen, recall.mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--patch", type=int, default=16)
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--num-classes", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--num-images", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--warmup-steps", type=int, default=2)
    parser.add_argument("--mixup", type=float, default=0.8)
    parser.add_argument("--patience", type=int, default=5)
    parser.add_argument("--output", default="vit.pt")
    args = parser.parse_args()

    torch.manual_seed(0)
    shape = (args.num_images, 3, args.image_size, args.image_size)
    data = TensorDataset(torch.randn(shape), torch.randint(args.num_classes, (args.num_images,)))
    train_loader = DataLoader(data, args.batch_size, shuffle=True, pin_memory=True, drop_last=True)
    val_loader = DataLoader(data, args.batch_size, pin_memory=True)

    model = VisionTransformer(
        args.image_size, args.patch, args.dim, args.depth, args.heads, args.num_classes
    ).cuda()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9999), use_buffers=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    total = args.epochs * len(train_loader)

    def factor(step):
        if step < args.warmup_steps:
            return (step + 1) / args.warmup_steps
        return 0.5 * (1.0 + math.cos(math.pi * step / total))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    best_loss, stale = math.inf, 0
    for epoch in range(args.epochs):
        model.train()
        for images, labels in train_loader:
            images, labels = images.cuda(non_blocking=True), labels.cuda(non_blocking=True)
            images, targets = mixup(images, labels, args.num_classes, args.mixup)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(images), targets)
            if not math.isfinite(loss.item()):
                raise SystemExit(f"loss is {loss.item()}, stopping")
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            ema.update_parameters(model)
        val_loss, recall = evaluate(ema, val_loader, args.num_classes)
        print(f"epoch {epoch}: loss {loss.item():.4f}, val {val_loss:.4f}, recall {recall:.4f}")
        if val_loss < best_loss:
            best_loss, stale = val_loss, 0
            torch.save({"model": model.state_dict(), "ema": ema.state_dict()}, args.output)
        else:
            stale += 1
        if stale > args.patience:
            break
    print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
