"""``--random-weights``: models from a folder with a configuration, without weights or network."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from residency._dryrun import _random_weights

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
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaForCausalLM
if sys.argv[1] == "weights":
    from transformers import LlamaConfig
    LlamaForCausalLM(LlamaConfig.from_pretrained("model")).bfloat16().save_pretrained("model")
assert (sys.argv[1] == "weights") == os.path.exists("model/model.safetensors")
seen = []
four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",
                          bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16)
eight = BitsAndBytesConfig(load_in_8bit=True)
for options in ({"dtype": torch.bfloat16, "device_map": "cuda"}, {"device_map": {"": 0}},
                {"torch_dtype": "float32", "device_map": "auto"}, {"dtype": "auto"},
                {"attn_implementation": "eager"},
                {"quantization_config": four, "dtype": torch.bfloat16, "device_map": {"": 0}},
                {"quantization_config": eight, "device_map": "auto"},
                {"device_map": {"model": 0, "lm_head": "cpu"}}):
    for kind in (AutoModelForCausalLM, LlamaForCausalLM):
        model = kind.from_pretrained("model", **options)
        weights = list(model.parameters())
        seen.append([str(model.device), str(model.dtype), model.training, type(model).__name__,
                     sum(each.numel() for each in weights), torch.cuda.memory_allocated(),
                     model.config._attn_implementation, model.config.name_or_path,
                     model.name_or_path, str(getattr(model, "hf_device_map", None)),
                     torch.cuda.max_memory_allocated()])
        del model, weights
model = AutoModelForCausalLM.from_pretrained(
    "model", dtype=torch.bfloat16, device_map="cuda", quantization_config=four)
model = prepare_model_for_kbit_training(model)
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
        assert outcome.has_run, outcome.errors
        assert outcome.answer["steps"] == 1
        seen.append(json.loads((tmp_path / "seen.json").read_text()))
    assert seen[0] == seen[1]


NAMED = """
import json
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM
for kind in (AutoConfig, AutoModelForCausalLM, LlamaForCausalLM):
    try:
        kind.from_pretrained("meta-llama/Llama-2-7b-hf")
    except OSError as raised:  # of the cache, at once
        assert "cached files" in str(raised) or "meta-llama/Llama-2-7b-hf" in str(raised), raised
    else:
        raise SystemExit("a name was taken that is nowhere")
config = json.load(open("model/config.json"))
config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
json.dump(config, open("model/config.json", "w"))
for kind in (AutoModelForCausalLM, LlamaForCausalLM):
    try:
        kind.from_pretrained("model")
    except RuntimeError as raised:
        assert "--random-weights makes no weights that are quantised by gptq" in str(raised), raised
    else:
        raise SystemExit("quantised weights were made")
"""


@pytest.mark.whole
def test_what_has_no_configuration_here_or_weights_of_its_own_is_refused(dry_run) -> None:
    options = ("--capacity", "8GiB", "--random-weights")
    outcome = dry_run(OFFLINE + CONFIG + NAMED, options=options)
    assert outcome.has_run, outcome.errors


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
    assert outcome.has_run, outcome.errors


def test_weights_that_cannot_be_downloaded_fail_with_what_to_do(dry_run) -> None:
    # The address is no other machine's: nothing answers there, with and without a network.
    url = "http://127.0.0.1:9/x.pth"
    text = f"import torch\ntorch.hub.load_state_dict_from_url({url!r}, model_dir='here')\n"
    outcome = dry_run(text)
    assert outcome.status == 3
    assert "--random-weights" in outcome.answer["error"]
    assert "script.py:2" in outcome.answer["error"]


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_tied_weight_is_in_the_file_once(tmp_path: Path, is_tied: bool) -> None:
    safetensors = pytest.importorskip("safetensors")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, tie_word_embeddings=is_tied,
    )  # fmt: skip
    with (
        _random_weights._folder(
            transformers.LlamaForCausalLM, str(tmp_path), config, is_real=False
        ) as folder,
        safetensors.safe_open(Path(folder, "model.safetensors"), "pt") as file,
    ):
        names = set(file.keys())
    assert "model.embed_tokens.weight" in names
    assert ("lm_head.weight" in names) is not is_tied
