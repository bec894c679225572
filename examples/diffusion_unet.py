"""Train a denoising diffusion model: a convolutional U-Net with attention, EMA, cosine schedule.

python diffusion_unet.py --image-size 64 --channels 128
"""

import argparse
import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class ResBlock(nn.Module):
    def __init__(self, inputs, outputs, embedding, dropout=0.1):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(32, inputs), nn.GroupNorm(32, outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time = nn.Linear(embedding, outputs)
        self.dropout = nn.Dropout(dropout)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x, t):
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(t))[:, :, None, None]
        return self.skip(x) + self.conv2(self.dropout(F.silu(self.norm2(h))))


class Attention(nn.Module):
    def __init__(self, channels, heads=4):
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(32, channels)
        self.qkv, self.out = nn.Conv2d(channels, 3 * channels, 1), nn.Conv2d(channels, channels, 1)

    def forward(self, x):
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, 3, self.heads, c // self.heads, h * w).unbind(1)
        y = F.scaled_dot_product_attention(*(a.transpose(-1, -2) for a in (q, k, v)))
        return x + self.out(y.transpose(-1, -2).reshape(b, c, h, w))


class UNet(nn.Module):
    def __init__(self, channels, multipliers):
        super().__init__()
        self.channels, embedding = channels, 4 * channels
        self.time = nn.Sequential(
            nn.Linear(channels, embedding), nn.SiLU(), nn.Linear(embedding, embedding)
        )
        self.input = nn.Conv2d(3, channels, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        width, skips = channels, []
        for level, multiplier in enumerate(multipliers):
            last = level == len(multipliers) - 1
            block = ResBlock(width, channels * multiplier, embedding)
            width = channels * multiplier
            skips.append(width)
            shrink = nn.Identity() if last else nn.Conv2d(width, width, 3, stride=2, padding=1)
            self.down.append(nn.ModuleList([block, shrink]))
        self.middle = ResBlock(width, width, embedding)
        self.attention = Attention(width)
        for skip in reversed(skips):
            self.up.append(ResBlock(width + skip, skip, embedding))
            width = skip
        self.norm = nn.GroupNorm(32, width)
        self.output = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x, t):
        half = self.channels // 2
        frequencies = torch.exp(-math.log(10000) * torch.arange(half, device=x.device) / half)
        angles = t[:, None].float() * frequencies
        t = self.time(torch.cat([angles.sin(), angles.cos()], dim=1))
        x, skips = self.input(x), []
        for block, shrink in self.down:
            x = block(x, t)
            skips.append(x)
            x = shrink(x)
        x = self.attention(self.middle(x, t))
        for block in self.up:
            skip = skips.pop()
            if x.shape[-1] != skip.shape[-1]:
                x = F.interpolate(x, size=skip.shape[-2:], mode="nearest")
            x = block(torch.cat([x, skip], dim=1), t)
        return self.output(F.silu(self.norm(x)))


@torch.no_grad()
def sample(model, alpha_bar, shape, num_steps):
    x = torch.randn(shape, device="cuda")
    times = torch.linspace(len(alpha_bar) - 1, 0, num_steps).long().tolist()
    for now, then in zip(times, [*times[1:], -1], strict=True):
        noise = model(x, torch.full(shape[:1], now, device="cuda"))
        a, b = alpha_bar[now], alpha_bar[then] if then >= 0 else torch.ones((), device="cuda")
        start = ((x - (1 - a).sqrt() * noise) / a.sqrt()).clamp(-1, 1)
        x = b.sqrt() * start + (1 - b).sqrt() * noise
    return x


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--channels", type=int, default=128)
    parser.add_argument("--multipliers", type=int, nargs="+", default=[1, 2, 4, 4])
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--num-images", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--timesteps", type=int, default=1000)
    parser.add_argument("--sample-steps", type=int, default=25)
    parser.add_argument("--output", default="unet_ema.pt")
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    steps = torch.arange(args.timesteps + 1, device="cuda") / args.timesteps
    schedule = torch.cos((steps + 0.008) / 1.008 * math.pi / 2) ** 2
    alpha_bar = (schedule[1:] / schedule[0]).clamp(min=1e-4)

    model = UNet(args.channels, args.multipliers).cuda().to(memory_format=torch.channels_last)
    ema = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    images = torch.rand(args.num_images, 3, args.image_size, args.image_size) * 2 - 1
    loader = DataLoader(TensorDataset(images), args.batch_size, shuffle=True, pin_memory=True)
    for epoch in range(args.epochs):
        for (x,) in loader:
            x = x.cuda(non_blocking=True).contiguous(memory_format=torch.channels_last)
            t = torch.randint(args.timesteps, (len(x),), device="cuda")
            noise, a = torch.randn_like(x), alpha_bar[t].view(-1, 1, 1, 1)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                predicted = model(a.sqrt() * x + (1 - a).sqrt() * noise, t)
            loss = F.mse_loss(predicted.float(), noise)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            with torch.no_grad():
                torch._foreach_lerp_(list(ema.parameters()), list(model.parameters()), 0.001)
        print(f"epoch {epoch}: loss {loss.item():.4f}")

    torch.save({"ema": ema.state_dict(), "optimizer": optimizer.state_dict()}, args.output)
    ema.load_state_dict(torch.load(args.output, map_location="cuda")["ema"])
    pictures = sample(ema, alpha_bar, (4, 3, args.image_size, args.image_size), args.sample_steps)
    pixels = ((pictures + 1) * 127.5).round().byte().cpu().numpy()
    print(f"{pixels.shape[0]} samples, peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
