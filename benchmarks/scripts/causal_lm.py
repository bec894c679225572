"""Two steps of a language model of transformers, made from its configuration alone, on CUDA.

In bfloat16, with gradient checkpointing and fused AdamW, a batch of one sequence of 2,048 tokens.
It is a script like any other: it says cuda, and knows nothing of residency.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

LENGTH = 2048


def main() -> None:
    """Trains for two steps."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("config", type=Path, help="a config.json")
    options = parser.parse_args()
    settings = json.loads(options.config.read_text())
    config = AutoConfig.for_model(**settings)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.gradient_checkpointing_enable()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    tokens = torch.randint(config.vocab_size, (1, LENGTH)).to("cuda")
    for _ in range(2):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(loss.item())


if __name__ == "__main__":
    main()
