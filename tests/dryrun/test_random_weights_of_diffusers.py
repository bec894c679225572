"""``--random-weights``: models and pipelines of diffusers from their configurations alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("diffusers")

OFFLINE = """
import socket
def refuse(*args, **options):
    raise SystemExit("the network was asked")
socket.getaddrinfo = socket.create_connection = refuse
socket.socket.connect = socket.socket.connect_ex = refuse
"""
OPTIONS = ("--random-weights", "--capacity", "64GiB")
LORA = """
import sys, torch
from diffusers import BitsAndBytesConfig, FluxTransformer2DModel
from peft import LoraConfig
four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",
                          bnb_4bit_compute_dtype=torch.bfloat16)
model = FluxTransformer2DModel.from_pretrained(
    "black-forest-labs/FLUX.1-dev", subfolder="transformer", torch_dtype=torch.bfloat16,
    quantization_config=four if sys.argv[1] == "4-bit" else None).to("cuda")
model.requires_grad_(False)
model.add_adapter(LoraConfig(r=16, target_modules=["to_k", "to_q", "to_v", "to_out.0"]))
model.enable_gradient_checkpointing()
weights = [each for each in model.parameters() if each.requires_grad]
optimizer = torch.optim.AdamW(weights)
like = {"device": "cuda", "dtype": torch.bfloat16}
for _ in range(2):
    model(
        hidden_states=torch.randn(1, 1024, 64, **like),
        encoder_hidden_states=torch.randn(1, 512, 4096, **like),
        pooled_projections=torch.randn(1, 768, **like), timestep=torch.ones(1, **like),
        guidance=torch.ones(1, **like), txt_ids=torch.zeros(512, 3, **like),
        img_ids=torch.zeros(1024, 3, **like), return_dict=False,
    )[0].sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def configurations(scale: int = 1) -> dict[str, dict[str, object]]:
    """Returns FLUX.1-dev's files as they were published, or a model whose parts are smaller."""
    flux = {"attention_head_dim": 128, "guidance_embeds": True, "in_channels": 64}
    flux |= {"joint_attention_dim": 4096 // scale, "num_attention_heads": 24 // scale}
    flux |= {"num_layers": 19 // scale, "num_single_layers": 38 // scale, "patch_size": 1}
    vae = {"block_out_channels": [128 // scale, 256 // scale], "latent_channels": 16}
    vae |= {"down_block_types": ["DownEncoderBlock2D"] * 2, "norm_num_groups": 32 // scale}
    vae |= {"up_block_types": ["UpDecoderBlock2D"] * 2, "use_quant_conv": False}
    clip = {"hidden_size": 768 // scale, "intermediate_size": 3072 // scale, "vocab_size": 49408}
    clip |= {"num_attention_heads": 12 // scale, "num_hidden_layers": 12 // scale}
    t5 = {"d_model": 4096 // scale, "d_ff": 10240 // scale, "d_kv": 64, "num_heads": 64 // scale}
    t5 |= {"num_layers": 24 // scale, "feed_forward_proj": "gated-gelu", "vocab_size": 32128}
    parts = {
        "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
        "text_encoder": ("transformers", "CLIPTextModel"),
        "text_encoder_2": ("transformers", "T5EncoderModel"),
        "transformer": ("diffusers", "FluxTransformer2DModel"),
        "vae": ("diffusers", "AutoencoderKL"),
    }
    absent = ("tokenizer", "tokenizer_2", "image_encoder", "feature_extractor")
    index = {name: [None, None] for name in absent} | parts
    return {
        "model_index.json": {"_class_name": "FluxPipeline", **index},
        "scheduler/scheduler_config.json": {"_class_name": parts["scheduler"][1], "shift": 3.0},
        "transformer/config.json": {
            "_class_name": "FluxTransformer2DModel",
            "pooled_projection_dim": 768 // scale,
            **flux,
        },
        "vae/config.json": {"_class_name": "AutoencoderKL", **vae},
        "text_encoder/config.json": {"model_type": "clip_text_model", **clip},
        "text_encoder_2/config.json": {"model_type": "t5", **t5},
    }


def write(folder: Path, scale: int = 1) -> None:
    for name, config in configurations(scale).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(config))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes an empty cache of the hub, and returns where FLUX.1-dev's files are in one."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    model = tmp_path / "hub" / "models--black-forest-labs--FLUX.1-dev"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("0" * 40)
    return model / "snapshots" / ("0" * 40)


LOADING = """
import json, sys, torch
from diffusers import AutoencoderKL, BitsAndBytesConfig, DiffusionPipeline, FluxTransformer2DModel
if sys.argv[1] == "weights":
    from transformers import CLIPTextModel, T5EncoderModel
    for kind, part in ((CLIPTextModel, "text_encoder"), (T5EncoderModel, "text_encoder_2")):
        model = kind(kind.config_class.from_pretrained("model", subfolder=part))
        model.bfloat16().save_pretrained("model/" + part)
    for kind, part in ((AutoencoderKL, "vae"), (FluxTransformer2DModel, "transformer")):
        model = kind.from_config(kind.load_config("model", subfolder=part)).bfloat16()
        for variant in (None, "fp16"):
            model.save_pretrained("model/" + part, variant=variant)
seen = []
def note(model):
    weights = list(model.parameters())
    seen.append([type(model).__name__, str(model.device), str(model.dtype), model.training,
                 sum(each.numel() for each in weights), torch.cuda.memory_allocated(),
                 str(getattr(model, "config", {}).get("_name_or_path"))
                 if hasattr(model, "register_to_config") else model.name_or_path])
four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
for options in ({}, {"torch_dtype": torch.bfloat16}, {"variant": "fp16"},
                {"torch_dtype": torch.bfloat16, "device_map": "cuda"},
                {"torch_dtype": torch.bfloat16, "quantization_config": four}):
    for kind, part in ((FluxTransformer2DModel, "transformer"), (AutoencoderKL, "vae")):
        if part == "transformer" or "quantization_config" not in options:
            note(kind.from_pretrained("model", subfolder=part, **options))
for options in ({}, {"variant": "fp16"}):
    pipeline = DiffusionPipeline.from_pretrained(
        "model", torch_dtype=torch.bfloat16, tokenizer=None, tokenizer_2=None, **options
    ).to("cuda")
    for part in ("text_encoder", "text_encoder_2", "transformer", "vae"):
        note(getattr(pipeline, part))
    del pipeline
json.dump(seen, open("seen.json", "w"))
"""


@pytest.mark.whole
def test_a_pipeline_from_its_configurations_is_as_large_as_one_from_weights(
    dry_run, tmp_path: Path
) -> None:
    write(tmp_path / "model", scale=4)
    seen = []
    for which, options in (("config", OPTIONS), ("weights", OPTIONS[1:])):
        outcome = dry_run(OFFLINE + LOADING, which, options=options)
        assert outcome.has_run, outcome.errors
        seen.append(json.loads((tmp_path / "seen.json").read_text()))
    assert seen[0] == seen[1]


@pytest.mark.whole
@pytest.mark.parametrize(("kind", "least", "most"), [("16-bit", 23.8, 24.0), ("4-bit", 5.9, 6.1)])
def test_a_lora_of_flux_is_foreseen_at_its_size(
    dry_run, cache: Path, kind: str, least: float, most: float
) -> None:
    write(cache)
    outcome = dry_run(OFFLINE + LORA, kind, options=OPTIONS)
    assert outcome.status == 0, outcome.errors
    assert outcome.answer["steps"] == 2
    held = outcome.phase("forward")["at_peak"]["parameters"]
    assert least * 1e9 < held < most * 1e9  # 11.9 thousand million of them


@pytest.mark.whole
def test_configurations_that_are_not_here_are_named_with_how_to_have_them(
    dry_run, cache: Path
) -> None:
    outcome = dry_run(OFFLINE + LORA, "16-bit", options=OPTIONS)
    assert outcome.status == 3
    assert "hf download NAME --include '*.json'" in outcome.answer["error"]
    assert "the network was asked" not in outcome.errors
    write(cache)
    config = cache / "transformer" / "config.json"
    kind = {"quantization_config": {"quant_method": "gguf"}}
    config.write_text(json.dumps(json.loads(config.read_text()) | kind))
    outcome = dry_run(OFFLINE + LORA, "16-bit", options=OPTIONS)
    assert "makes no weights that are quantised by gguf" in outcome.answer["error"]
