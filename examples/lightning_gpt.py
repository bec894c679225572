"""Train a small GPT with Lightning in mixed precision, and resume from its checkpoint.

python lightning_gpt.py --precision bf16-mixed
"""

import argparse

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset


class GPT(nn.Module):
    def __init__(self, vocab_size, block_size, n_layer, n_head, n_embd):
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, n_embd)
        self.positions = nn.Parameter(torch.zeros(1, block_size, n_embd))
        layer = nn.TransformerEncoderLayer(
            n_embd,
            n_head,
            dim_feedforward=4 * n_embd,
            dropout=0.1,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.layers = nn.TransformerEncoder(layer, n_layer, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(n_embd)
        self.head = nn.Linear(n_embd, vocab_size, bias=False)

    def forward(self, idx):
        length = idx.size(1)
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=idx.device)
        x = self.tokens(idx) + self.positions[:, :length]
        return self.head(self.norm(self.layers(x, mask=mask, is_causal=True)))


class LitGPT(L.LightningModule):
    def __init__(self, vocab_size, block_size, n_layer, n_head, n_embd, lr, max_steps):
        super().__init__()
        self.save_hyperparameters()
        self.model = GPT(vocab_size, block_size, n_layer, n_head, n_embd)

    def _loss(self, batch):
        (tokens,) = batch
        logits = self.model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, batch, batch_idx):
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        loss = self._loss(batch)
        self.log("val_loss", loss, prog_bar=True)
        self.log("perplexity", torch.exp(loss))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=self.hparams.lr, total_steps=self.hparams.max_steps + 2
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--vocab-size", type=int, default=50304)
    parser.add_argument("--block-size", type=int, default=1024)
    parser.add_argument("--n-layer", type=int, default=12)
    parser.add_argument("--n-head", type=int, default=12)
    parser.add_argument("--n-embd", type=int, default=768)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--max-steps", type=int, default=200)
    parser.add_argument("--num-sequences", type=int, default=512)
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--out-dir", default="lightning-out")
    args = parser.parse_args()

    L.seed_everything(0)
    torch.set_float32_matmul_precision("high")
    tokens = torch.randint(args.vocab_size, (args.num_sequences, args.block_size + 1))
    train, val = TensorDataset(tokens[:-16]), TensorDataset(tokens[-16:])
    options = {
        "batch_size": args.batch_size,
        "pin_memory": True,
        "num_workers": args.num_workers,
        "persistent_workers": args.num_workers > 0,
    }
    loaders = (DataLoader(train, shuffle=True, **options), DataLoader(val, **options))
    module = LitGPT(
        args.vocab_size,
        args.block_size,
        args.n_layer,
        args.n_head,
        args.n_embd,
        6e-4,
        args.max_steps,
    )

    def trainer(max_steps):
        checkpoint = ModelCheckpoint(monitor="val_loss", save_last=True)
        return L.Trainer(
            accelerator="gpu",
            devices=1,
            precision=args.precision,
            max_steps=max_steps,
            accumulate_grad_batches=args.accumulate,
            gradient_clip_val=1.0,
            val_check_interval=args.accumulate,
            log_every_n_steps=1,
            callbacks=[checkpoint, LearningRateMonitor("step")],
            logger=CSVLogger(args.out_dir),
            enable_progress_bar=False,
        )

    first = trainer(args.max_steps // 2)
    first.fit(module, *loaders)
    checkpoint = first.checkpoint_callback.last_model_path
    second = trainer(args.max_steps)
    second.fit(module, *loaders, ckpt_path=checkpoint)
    print(f"steps {second.global_step}, {dict(second.callback_metrics)}")
    print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
