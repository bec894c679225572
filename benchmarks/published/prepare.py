"""Makes what a run of LitGPT's reads: a checkpoint without bytes, a tokenizer and texts.

``python -m benchmarks.published.prepare MODEL FOLDER LONGEST`` runs with LitGPT's sources on the
path of modules. A checkpoint has its whole size, and takes no room on the disk.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers

_NUM_WORDS = 1000
_NUM_SAMPLES = 2000
_SPECIAL = ("<unk>", "</s>", "<s>")
_LENGTH_LIMIT = 600  # tokens: more than the 512 that the configurations cut a sample at


def main(model: str, folder: Path, longest: int) -> None:
    """Makes the checkpoint of a model, and the texts that its runs read."""
    is_old = importlib.util.find_spec("lit_gpt") is not None
    package: Any = importlib.import_module("lit_gpt" if is_old else "litgpt")
    config = package.Config.from_name(model)
    folder.mkdir(parents=True)
    with torch.device("meta"):
        shapes = package.GPT(config).state_dict()
    state = {name: torch.empty(each.shape, dtype=torch.bfloat16) for name, each in shapes.items()}
    with torch.serialization.skip_data():
        torch.save(state, folder / "lit_model.pth")
    settings = dataclasses.asdict(config)
    (folder / "lit_config.json").write_text(json.dumps(settings))
    (folder / "model_config.yaml").write_text(yaml.safe_dump(settings))
    _write_tokenizer(folder)
    _write_old_texts(longest) if is_old else _write_texts()


def _write_tokenizer(folder: Path) -> None:
    words = {f"w{number}": number for number in range(_NUM_WORDS)}
    words |= {word: len(words) + number for number, word in enumerate(_SPECIAL)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=_SPECIAL[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"eos_token": _SPECIAL[1], "bos_token": _SPECIAL[2]}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))


def _write_old_texts(longest: int) -> None:
    """Writes a longest sample, with shorter ones in a folder, and with as long ones in another."""
    lengths = random.Random(0)
    shorter = [lengths.randint(60, 300) for _ in range(_NUM_SAMPLES)]
    for name, others in (("alpaca", shorter), ("alpaca_long", [longest] * _NUM_SAMPLES)):
        folder = Path("data") / name
        folder.mkdir(parents=True, exist_ok=True)
        torch.save([_sample(length) for length in shorter[:300]], folder / "test.pt")
        torch.save([_sample(longest), *map(_sample, others)], folder / "train.pt")


def _sample(length: int) -> dict[str, Any]:
    tokens = torch.randint(0, _NUM_WORDS, (length,))
    return {"input_ids": tokens, "labels": tokens.clone(), "instruction": "", "input": ""}


def _write_texts() -> None:
    file = Path("mhenrichsen/alpaca_2k_test/train.jsonl")  # in place of the one on the hub
    if file.exists():
        return
    file.parent.mkdir(parents=True)
    text = " ".join(f"w{number % _NUM_WORDS}" for number in range(_LENGTH_LIMIT))
    line = json.dumps({"instruction": "w1 w2", "input": "", "output": text})
    file.write_text(f"{line}\n" * _NUM_SAMPLES)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
