"""Train a ResNet-50 on images, in the manner of torchvision's reference script.

python image_classification.py --batch-size 128 --amp
"""

import argparse
import shutil
import time

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class Bottleneck(nn.Module):
    def __init__(self, inputs, planes, stride):
        super().__init__()
        outputs = 4 * planes
        self.conv1 = nn.Conv2d(inputs, planes, 1, bias=False)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride=stride, padding=1, bias=False)
        self.conv3 = nn.Conv2d(planes, outputs, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(planes), nn.BatchNorm2d(planes)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            shortcut = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(outputs))

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        return self.relu(self.bn3(self.conv3(x)) + identity)


class ResNet(nn.Module):
    def __init__(self, layers, num_classes, width=64):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        blocks, inputs = [], width
        for stage, count in enumerate(layers):
            planes = width << stage
            for index in range(count):
                blocks.append(Bottleneck(inputs, planes, 2 if stage > 0 and index == 0 else 1))
                inputs = 4 * planes
        self.blocks = nn.Sequential(*blocks)
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(inputs, num_classes)

    def forward(self, x):
        return self.fc(self.pool(self.blocks(self.stem(x))).flatten(1))


class RandomImages(Dataset):
    def __init__(self, count, size, num_classes):
        self.count, self.size, self.num_classes = count, size, num_classes

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, self.size, self.size, generator=generator), index % self.num_classes


def accuracy(output, target, topk=(1, 5)):
    """Return the share of right answers among the k best guesses, in percent, for each k."""
    with torch.no_grad():
        _, pred = output.topk(max(topk), 1, True, True)
        correct = pred.t().eq(target.view(1, -1).expand_as(pred.t()))
        sums = [correct[:k].reshape(-1).float().sum(0, keepdim=True) for k in topk]
        return [s.mul_(100.0 / target.size(0)) for s in sums]


def train_one_epoch(model, criterion, optimizer, scaler, loader, epoch, args):
    model.train()
    end = time.time()
    for i, (image, target) in enumerate(loader):
        image, target = image.cuda(non_blocking=True), target.cuda(non_blocking=True)
        with torch.amp.autocast("cuda", enabled=args.amp):
            output = model(image)
            loss = criterion(output, target)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if i % args.print_freq == 0:
            acc1, acc5 = accuracy(output, target)
            print(
                f"[{epoch}][{i}/{len(loader)}] loss {loss.item():.4f} acc@1 {acc1.item():.2f} "
                f"acc@5 {acc5.item():.2f} {time.time() - end:.2f}s"
            )
            end = time.time()


def evaluate(model, criterion, loader):
    model.eval()
    totals = torch.zeros(3, device="cuda")
    with torch.inference_mode():
        for image, target in loader:
            image, target = image.cuda(non_blocking=True), target.cuda(non_blocking=True)
            output = model(image)
            loss, (acc1, acc5) = criterion(output, target), accuracy(output, target)
            totals += torch.stack([loss, acc1[0], acc5[0]]) * target.size(0)
    loss, acc1, acc5 = (totals / len(loader.dataset)).tolist()
    print(f"test: loss {loss:.4f} acc@1 {acc1:.3f} acc@5 {acc5:.3f}")
    return acc1


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, nargs=4, default=[3, 4, 6, 3])
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--num-classes", type=int, default=1000)
    parser.add_argument("--num-images", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--data-parallel", action="store_true")
    parser.add_argument("--print-freq", type=int, default=1)
    parser.add_argument("--resume", help="checkpoint to start from")
    parser.add_argument("--output", default="checkpoint.pt")
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    model = ResNet(args.layers, args.num_classes, args.width).cuda()
    if args.data_parallel:
        model = nn.DataParallel(model)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1).cuda()
    optimizer = torch.optim.SGD(
        model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4, nesterov=True
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.1)
    scaler = torch.amp.GradScaler("cuda", enabled=args.amp)
    start_epoch, best_acc1 = 0, -1.0
    if args.resume:
        checkpoint = torch.load(args.resume, map_location="cuda")
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        start_epoch, best_acc1 = checkpoint["epoch"], checkpoint["best_acc1"]

    options = {"batch_size": args.batch_size, "num_workers": args.workers, "pin_memory": True}
    images = RandomImages(args.num_images, args.image_size, args.num_classes)
    train_loader = DataLoader(images, shuffle=True, **options)
    val_loader = DataLoader(images, **options)
    for epoch in range(start_epoch, args.epochs):
        train_one_epoch(model, criterion, optimizer, scaler, train_loader, epoch, args)
        scheduler.step()
        acc1 = evaluate(model, criterion, val_loader)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        best = acc1 > best_acc1
        best_acc1 = max(acc1, best_acc1)
        torch.save(state | {"epoch": epoch + 1, "best_acc1": best_acc1}, args.output)
        if best:
            shutil.copyfile(args.output, f"best-{args.output.rpartition('/')[2]}")
    print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
