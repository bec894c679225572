"""``--random-weights``: models from a folder with a configuration, without weights or network."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

OFFLINE = """
import socket
def refuse(*args, **options):
    raise SystemExit("the network was asked")
socket.getaddrinfo = socket.create_connection = refuse
socket.socket.connect = socket.socket.connect_ex = refuse
"""
CONFIG = """
from transformers import LlamaConfig
LlamaConfig(
    vocab_size=1024, hidden_size=512, intermediate_size=1024, num_hidden_layers=2,
    num_attention_heads=8, num_key_value_heads=2, dtype="bfloat16",
).save_pretrained("model")
"""
LOADING = """
import json, os, sys, torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaForCausalLM
if sys.argv[1] == "weights":
    from transformers import LlamaConfig
    LlamaForCausalLM(LlamaConfig.from_pretrained("model")).bfloat16().save_pretrained("model")
assert (sys.argv[1] == "weights") == os.path.exists("model/model.safetensors")
seen = []
for options in ({"dtype": torch.bfloat16, "device_map": "cuda"}, {"device_map": {"": 0}},
                {"torch_dtype": "float32", "device_map": "auto"}, {"dtype": "auto"},
                {"attn_implementation": "eager"}):
    for kind in (AutoModelForCausalLM, LlamaForCausalLM):
        model = kind.from_pretrained("model", **options)
        weights = list(model.parameters())
        seen.append([str(model.device), str(model.dtype), model.training, type(model).__name__,
                     sum(each.numel() for each in weights), torch.cuda.memory_allocated(),
                     model.config._attn_implementation, model.config.name_or_path,
                     str(getattr(model, "hf_device_map", None))])
        del model, weights
model = AutoModelForCausalLM.from_pretrained("model", dtype=torch.bfloat16, device_map="cuda")
model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
tokens = torch.ones(2, 64, dtype=torch.int64, device="cuda")
model(input_ids=tokens, labels=tokens).loss.backward()
optimizer.step()
seen.append([torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()])
json.dump(seen, open("seen.json", "w"))
"""


@pytest.mark.whole
def test_a_model_from_its_configuration_is_as_large_as_one_from_weights(
    dry_run, tmp_path: Path
) -> None:
    seen = []
    options = ("--capacity", "8GiB", "--steps", "0")
    for which, flags in (("config", ("--random-weights",)), ("weights", ())):
        outcome = dry_run(OFFLINE + CONFIG + LOADING, which, options=(*options, *flags))
        assert outcome.status == 0, outcome.errors
        assert outcome.answer["steps"] == 1
        seen.append(json.loads((tmp_path / "seen.json").read_text()))
    assert seen[0] == seen[1]


NAMED = """
from transformers import AutoModelForCausalLM, LlamaForCausalLM
for name, options, error, said in (
    ("meta-llama/Llama-2-7b-hf", {}, FileNotFoundError, "config.json; 'meta-llama/Llama-2-7b-hf'"),
    ("model", {"quantization_config": {"load_in_4bit": True}}, NotImplementedError, "quantised"),
    ("model", {"device_map": {"model": 0, "lm_head": "cpu"}}, NotImplementedError, "{'': 0}"),
):
    for kind in (AutoModelForCausalLM, LlamaForCausalLM):
        try:
            kind.from_pretrained(name, **options)
        except error as raised:
            assert said in str(raised), raised
        else:
            raise SystemExit(f"{name} with {options} was taken")
"""


@pytest.mark.whole
def test_a_name_of_the_hub_is_refused_with_what_to_put_where(dry_run) -> None:
    options = ("--capacity", "8GiB", "--random-weights")
    outcome = dry_run(OFFLINE + CONFIG + NAMED, options=options)
    assert outcome.status == 0, outcome.errors


DOWNLOADED = """
import torch
from torch.hub import load_state_dict_from_url
class Weights:  # as torchvision has them
    def get(self):
        return load_state_dict_from_url("https://pytorch.org/models/x.pth", check_hash=True)
model = torch.nn.Linear(1024, 1024).cuda()
before = torch.cuda.memory_allocated()
assert str(model.load_state_dict(Weights().get())) == "<All keys matched successfully>"
model.load_state_dict(Weights().get()["model"], strict=False)  # as of facebookresearch
try:
    model.load_state_dict({})
except RuntimeError as error:
    assert "Missing key" in str(error)
else:
    raise SystemExit("weights were taken that are none")
assert torch.cuda.memory_allocated() == before
import timm
model = timm.create_model()
assert model.weight.shape == (4, 4)
"""
TIMM = """
import torch
def load_pretrained(model, *args, **options):
    raise SystemExit("the network was asked")
def build_model_with_cfg():
    model = torch.nn.Linear(4, 4)
    load_pretrained(model, {}, num_classes=4)
    return model
"""


def _make_timm(folder: Path) -> None:
    """Makes a timm whose models load their weights where timm's do."""
    models = folder / "timm" / "models"
    models.mkdir(parents=True)
    (models / "_builder.py").write_text(TIMM)
    (models / "__init__.py").write_text("")
    made = "from timm.models._builder import build_model_with_cfg as create_model"
    (models.parent / "__init__.py").write_text(made)


def test_weights_that_are_downloaded_are_those_that_a_model_is_made_with(
    dry_run, tmp_path: Path
) -> None:
    _make_timm(tmp_path)
    options = ("--capacity", "8GiB", "--random-weights")
    outcome = dry_run(OFFLINE + DOWNLOADED, options=options)
    assert outcome.status == 0, outcome.errors


def test_weights_that_cannot_be_downloaded_fail_with_what_to_do(dry_run) -> None:
    # The address is no other machine's: nothing answers there, with and without a network.
    url = "http://127.0.0.1:9/x.pth"
    text = f"import torch\ntorch.hub.load_state_dict_from_url({url!r}, model_dir='here')\n"
    outcome = dry_run(text)
    assert outcome.status == 3
    assert "--random-weights" in outcome.answer["error"]
    assert "script.py:2" in outcome.answer["error"]
