"""Train an image classifier with DistributedDataParallel.

torchrun --nproc-per-node 8 ddp.py --batch-size 64
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def conv(inputs, outputs, stride=1):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class ConvNet(nn.Module):
    def __init__(self, width, num_classes):
        super().__init__()
        stages, inputs = [], 3
        for stage in range(4):
            outputs = width << stage
            stages += [conv(inputs, outputs, 2), conv(outputs, outputs), conv(outputs, outputs)]
            inputs = outputs
        self.features = nn.Sequential(*stages)
        self.classifier = nn.Linear(inputs, num_classes)

    def forward(self, x):
        return self.classifier(self.features(x).mean(dim=(2, 3)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--num-classes", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=64, help="of each rank")
    parser.add_argument("--num-images", type=int, default=256)
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--checkpoint", default="ddp.pt")
    args = parser.parse_args()

    rank = int(os.environ.get("RANK", 0))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    torch.manual_seed(0)

    model = ConvNet(args.width, args.num_classes)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model).cuda(local_rank)
    model = DistributedDataParallel(model, device_ids=[local_rank])
    optimizer = torch.optim.SGD(
        model.parameters(), lr=args.lr * world_size, momentum=0.9, weight_decay=1e-4
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)

    images = torch.randn(args.num_images, 3, args.image_size, args.image_size)
    labels = torch.randint(args.num_classes, (args.num_images,))
    dataset = TensorDataset(images, labels)
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank)
    loader = DataLoader(
        dataset,
        batch_size=args.batch_size,
        sampler=sampler,
        num_workers=args.num_workers,
        pin_memory=True,
    )

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for batch_images, batch_labels in loader:
            batch_images = batch_images.cuda(local_rank, non_blocking=True)
            batch_labels = batch_labels.cuda(local_rank, non_blocking=True)
            loss = F.cross_entropy(model(batch_images), batch_labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        dist.all_reduce(loss)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item() / world_size:.4f}")

    if rank == 0:
        torch.save(model.module.state_dict(), args.checkpoint)
    dist.barrier()
    location = {"cuda:0": f"cuda:{local_rank}"}
    model.module.load_state_dict(torch.load(args.checkpoint, map_location=location))
    if rank == 0:
        print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
