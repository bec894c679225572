"""Fine-tune an encoder for classification with accelerate: accumulate, clip, save and load.

python accelerate_loop.py --mixed-precision fp16
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup


class Sentences(Dataset):
    """Random sentences of random lengths, of two classes."""

    def __init__(self, count, max_length, vocab_size):
        lengths = torch.randint(max_length // 4, max_length + 1, (count,)).tolist()
        self.ids = [torch.randint(1, vocab_size, (length,)) for length in lengths]
        self.labels = torch.randint(2, (count,))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return self.ids[index], self.labels[index]


def collate(examples):
    ids, labels = zip(*examples, strict=True)
    input_ids = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    return {
        "input_ids": input_ids,
        "attention_mask": (input_ids != 0).long(),
        "labels": torch.stack(labels),
    }


def evaluate(accelerator, model, loader):
    model.eval()
    correct, seen, true_positives, positives = 0, 0, 0, 0
    for batch in loader:
        with torch.no_grad():
            predictions = model(**batch).logits.argmax(dim=-1)
        predictions, labels = accelerator.gather_for_metrics((predictions, batch["labels"]))
        correct += (predictions == labels).sum().item()
        seen += len(labels)
        true_positives += (predictions[labels == 1] == 1).sum().item()
        positives += (labels == 1).sum().item()
    model.train()
    return {"accuracy": correct / seen, "recall": true_positives / max(positives, 1)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mixed-precision", choices=["no", "fp16", "bf16"], default="bf16")
    parser.add_argument("--vocab-size", type=int, default=30522)
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--num-layers", type=int, default=24)
    parser.add_argument("--num-heads", type=int, default=16)
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--train-size", type=int, default=512)
    parser.add_argument("--eval-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--output-dir", default="accelerate-out")
    args = parser.parse_args()

    set_seed(0)
    accelerator = Accelerator(
        mixed_precision=args.mixed_precision, gradient_accumulation_steps=args.accumulation
    )
    config = BertConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.hidden_size,
        intermediate_size=4 * args.hidden_size,
        num_hidden_layers=args.num_layers,
        num_attention_heads=args.num_heads,
        max_position_embeddings=args.max_length,
        num_labels=2,
    )
    model = BertForSequenceClassification(config)
    train_data = Sentences(args.train_size, args.max_length, args.vocab_size)
    eval_data = Sentences(args.eval_size, args.max_length, args.vocab_size)
    options = {"batch_size": args.batch_size, "collate_fn": collate}
    train_loader = DataLoader(train_data, shuffle=True, **options)
    eval_loader = DataLoader(eval_data, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    num_steps = args.epochs * len(train_loader) // args.accumulation
    scheduler = get_linear_schedule_with_warmup(optimizer, num_steps // 10, num_steps)
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )
    print(f"training on {accelerator.device}")

    best = -1.0
    for epoch in range(args.epochs):
        total = torch.zeros((), device=accelerator.device)
        for batch in train_loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                total += loss.detach().float()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        metrics = evaluate(accelerator, model, eval_loader)
        accelerator.print(f"epoch {epoch}: loss {total.item() / len(train_loader):.4f}, {metrics}")
        if metrics["accuracy"] > best:
            best = metrics["accuracy"]
            accelerator.save_state(args.output_dir)

    accelerator.load_state(args.output_dir)
    accelerator.print(f"best: {evaluate(accelerator, model, eval_loader)}")
    accelerator.save_model(model, f"{args.output_dir}/model")
    accelerator.print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
