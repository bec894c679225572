"""Files of each format that the library reads, and ways to make them hostile."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

# Texts that take the place of a value in a JSON document; "OUTSIDE" is a folder to stay out of.
TEXTS = [
    *("9223372036854775808", "-9223372036854775809", "18446744073709551616", "4294967296"),
    *("-1", "0", "1", "1.0", "0.5", "1e400", "-1e400", "NaN", "Infinity", "1e308", "-0"),
    *("true", "false", "null", "{}", "[]", '""', '"."', '".."', '"/"', '"a"', '"residency"'),
    *('"\\u0000"', '"\\ud800"', '"\\u001b[31m"', '"F32"', '"U8"', '"OUTSIDE/canary"'),
    *('"../outside/canary"', '"../../outside/canary"', '"../../../outside/new"', '"OUTSIDE"'),
    *('"model.safetensors"', '"manifest.json"', '"step-00000001"', '".lock"', '"latest"'),
    *("[0, 0]", "[0, 9223372036854775808]", "[-1, 4]", "[4, 0]", "[[[[]]]]", '{"a": {"a": 1}}'),
    *("[4294967296, 4294967296]", "[9223372036854775807, 2]", "[0, 9223372036854775807]"),
    "9" * 5000,
    "-" + "9" * 400,
    "[" * 300 + "]" * 300,
    "[" * 50_000 + "]" * 50_000,
    '{"a":' * 20_000 + "1" + "}" * 20_000,
    '"' + "x" * 100_000 + '"',
    "[" + "0," * 20_000 + "0]",
    "[" + ",".join(["1"] * 200) + "]",
]
SPARSE_BYTES = 3 << 30


def nodes(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Lists the paths of all values in a JSON document."""
    found = [path]
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, inner in items:
        found += nodes(inner, (*path, key))
    return found


def hostile_json(chance: random.Random, value: Any, outside: str) -> str:
    """Returns a document's text with one or two values changed."""
    value = json.loads(json.dumps(value))
    texts: list[str] = []
    for _ in range(chance.choice([1, 1, 1, 2])):
        path = chance.choice(nodes(value))
        if not path:
            if chance.random() < 0.9:
                continue
            return chance.choice(TEXTS).replace("OUTSIDE", outside)
        parent = value
        for key in path[:-1]:
            parent = parent[key]
        kind = chance.random()
        if kind < 0.15:
            del parent[path[-1]]
        elif kind < 0.3:
            other = value
            for key in chance.choice(nodes(value)):
                other = other[key]
            parent[path[-1]] = json.loads(json.dumps(other))
        elif kind < 0.4 and isinstance(parent, dict):
            parent[f"@key{len(texts)}@"] = parent.pop(path[-1])
            texts.append(chance.choice([text for text in TEXTS if text[0] == '"']))
        elif kind < 0.5 and isinstance(parent, dict):
            parent[f"@twice{len(texts)}@"] = parent[path[-1]]
            texts.append(json.dumps(path[-1]))
        else:
            parent[path[-1]] = f"@value{len(texts)}@"
            texts.append(chance.choice(TEXTS))
    said = json.dumps(value, sort_keys=True, separators=(",", ":"))
    for index, text in enumerate(texts):
        for kind_name in ("key", "twice", "value"):
            said = said.replace(f'"@{kind_name}{index}@"', text)
    return said.replace("OUTSIDE", outside)


def hostile_bytes(chance: random.Random, content: bytes) -> bytes:
    """Flips, cuts, repeats or splices bytes."""
    out = bytearray(content)
    at = chance.randrange(len(out) + 1)
    if chance.random() < 0.4:
        at = chance.choice([0, 1, 8, len(out) // 2, max(0, len(out) - 1), max(0, len(out) - 22)])
    at = min(at, len(out))
    kind = chance.randrange(8)
    if kind <= 1 and at < len(out):
        out[at] ^= 1 << chance.randrange(8)
    elif kind == 2:
        del out[at:]
    elif kind == 3:
        out[at:at] = chance.randbytes(chance.choice([1, 8, 4096]))
    elif kind == 4:
        other = chance.randrange(len(out) + 1)
        out[at : at + 600] = content[other : other + 600]
    elif kind == 5:
        out[at : at + 8] = struct.pack("<Q", chance.choice([2**63, 2**64 - 1, 2**40, 2**31, 0]))
    elif kind == 6:
        out = bytearray(content * 2) if chance.random() < 0.5 else bytearray()
    else:
        out[at : at + 512] = bytes(512)
    return bytes(out)


def hostile_entry(chance: random.Random, file: Path, outside: Path) -> str:
    """Puts something that is no plain file in the place of one."""
    kinds = ["folder", "fifo", "link out", "link to folder", "loop", "sparse", "missing"]
    kind = chance.choice([*kinds, "dangling", "device", "unreadable"])
    if file.name == "run.jsonl" and kind in {"fifo", "sparse"}:
        # A report reads what its caller names to the end: `residency report <(command)` waits.
        kind = "missing"
    if kind == "sparse" and not file.is_symlink():
        os.truncate(file, SPARSE_BYTES)
        return kind
    if file.is_dir() and not file.is_symlink():
        shutil.rmtree(file)
    else:
        file.unlink()
    if kind == "folder":
        file.mkdir()
        (file / "inner").write_bytes(b"inner")
    elif kind == "fifo":
        os.mkfifo(file)
    elif kind == "link out":
        file.symlink_to(outside / "canary")
    elif kind == "link to folder":
        file.symlink_to(outside)
    elif kind == "loop":
        file.symlink_to(file.name)
    elif kind == "dangling":
        file.symlink_to(outside / "new")
    elif kind == "device":
        file.symlink_to(chance.choice(["/dev/zero", "/dev/full", "/dev/null"]))
    elif kind == "unreadable":
        file.symlink_to("/proc/self/mem")
    return kind


def reseal(save: Path, manifest: str | None = None) -> None:
    """Gives a save the checksums of what it holds now, as far as its manifest can be read."""
    file = save / "manifest.json"
    text = manifest
    if text is None:
        document = json.loads(file.read_text())
        for entry in document["ranks"]:
            for name, said in entry["files"].items():
                assert (save / name).is_file(), name
                content = (save / name).read_bytes()
                header = 8 + struct.unpack("<Q", content[:8])[0]
                chunk = said["chunk_bytes"]
                said["num_bytes"] = len(content)
                if header <= len(content):
                    said["header_bytes"] = header
                said["header_crc32"] = zlib.crc32(content[: said["header_bytes"]])
                chunks = [content[at : at + chunk] for at in range(0, len(content), chunk)]
                said["crc32"] = [zlib.crc32(part) for part in chunks]
        text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    if text.startswith('{"crc32":'):  # which is of the text of all other keys
        rest = "{" + text[text.find(",") + 1 :]
        text = f'{{"crc32":{zlib.crc32(rest.encode())},' + rest[1:]
    file.write_bytes(text.encode("utf-8", "surrogatepass"))


def hostile_header(chance: random.Random, file: Path, outside: str) -> None:
    """Changes the JSON of a safetensors file, keeping its length field right most of the time."""
    content = file.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    text = hostile_json(chance, json.loads(content[8 : 8 + length]), outside).encode()
    text += b" " * (-(8 + len(text)) % chance.choice([1, 8, 4096]))
    said = len(text) if chance.random() < 0.9 else chance.choice([2**63, 2**40, 0, 1])
    file.write_bytes(struct.pack("<Q", said) + text + content[8 + length :])


class Calls:
    """Pickles as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def hostile_pickle(chance: random.Random, outside: Path) -> bytes:
    """Returns a pickle that does harm where it is obeyed."""
    nested: Any = []
    for _ in range(400):
        nested = [nested]
    made: list[Callable[[], bytes]] = [
        lambda: pickle.dumps(Calls(os.mkdir, str(outside / "new"))),
        lambda: pickle.dumps({"w": Calls(open, str(outside / "new"), "w")}),
        lambda: pickle.dumps({"w": Calls(bytearray, 1 << 33)}),
        lambda: pickle.dumps({"w": Calls(torch.zeros, 1 << 31)}),
        lambda: pickle.dumps(nested),
        lambda: b"\x80\x04" + b"]" * 200_000 + b"a" * 199_999 + b".",
        lambda: b"\x80\x04" + b"(" * 200_000 + b"t" * 200_000 + b".",
        lambda: b"\x80\x02X\xff\xff\xff\x7f" + b"x" * 9 + b".",
        lambda: b"\x80\x04\x8d" + struct.pack("<Q", 2**63) + b".",
        lambda: b"\x80\x02]r\xff\xff\xff\x1f.",  # the memo's place 2**29
        lambda: b"\x80\x02\x8b\xff\xff\xff\x7f.",
        lambda: b"\x80\x02}q\x00" + b"h\x00" * 3 + b"s.",
        lambda: b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b".",
        lambda: b"I" + b"9" * 5000 + b"\n.",
        lambda: b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"K\x01.",
        lambda: b"",
        lambda: b"\x80\x02}(U\x01w" + b"K\x01" * 3 + b"u.",
        lambda: b"\x80\x02c" + b"os\nsystem\n(S'true'\ntR.",
        lambda: b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R.",
    ]
    return chance.choice(made)()


def hostile_zip(chance: random.Random, file: Path, outside: Path) -> str:
    """Changes an entry of a file of ``torch.save``."""
    with zipfile.ZipFile(file) as opened:
        entries = {name: opened.read(name) for name in opened.namelist()}
    name = chance.choice(sorted(entries))
    root = name.split("/")[0]
    kind = chance.choice(["bytes", "pickle", "drop", "bomb", "rename", "twice", "deflate"])
    if kind == "bytes":
        entries[name] = hostile_bytes(chance, entries[name])
    elif kind == "pickle":
        entries[f"{root}/data.pkl"] = hostile_pickle(chance, outside)
    elif kind == "drop":
        del entries[name]
    elif kind == "bomb":
        entries[f"{root}/data/0"] = bytes(256 << 20)
    elif kind == "rename":
        entries[chance.choice(["../outside/new", f"{outside}/new", "x" * 60000])] = entries[name]
    packing = zipfile.ZIP_DEFLATED if kind in {"bomb", "deflate"} else zipfile.ZIP_STORED
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with zipfile.ZipFile(file, "w", packing, compresslevel=1) as opened:
            for entry, content in entries.items():
                opened.writestr(entry, content)
            if kind == "twice":
                opened.writestr(name, entries[chance.choice(sorted(entries))])
    return f"{kind} {name}"


def hostile_metadata(chance: random.Random, file: Path, outside: Path) -> str:
    """Changes what the metadata of a directory of ``torch.distributed.checkpoint`` says."""
    content = file.read_bytes()
    assert b"Metadata" in content, "it is a hostile pickle already"
    metadata = pickle.loads(content)
    number = chance.choice([2**63, 2**63 - 1, 2**40, -1, 0, 1.5, "4", None, True])
    kind = chance.choice(["path", "offset", "length", "size", "chunk", "type", "drop", "nested"])
    place = metadata.storage_data[chance.choice(list(metadata.storage_data))]
    entry = metadata.state_dict_metadata[chance.choice(list(metadata.state_dict_metadata))]
    if kind == "path":
        paths = ["../outside/canary", f"{outside}/canary", "", ".", "a\0b", ".metadata", 7, None]
        place.relative_path = chance.choice(paths)
    elif kind in {"offset", "length"}:
        setattr(place, kind, number)
    elif kind == "size":
        with_number = (number,) * chance.choice([1, 2, 100])
        entry.size = chance.choice([with_number, number, torch.Size([2**40, 2**20])])
    elif kind == "chunk" and hasattr(entry, "chunks"):
        chunk = chance.choice(entry.chunks)
        setattr(chunk, chance.choice(["offsets", "sizes"]), chance.choice([(number,), number]))
    elif kind == "type":
        metadata.state_dict_metadata = chance.choice([number, [], {"a": number}, {number: entry}])
    elif kind == "drop":
        metadata.storage_data.pop(chance.choice(list(metadata.storage_data)))
    else:
        steps = [2**40, "a", 2**31, -1, "", number]
        metadata.planner_data = {"a": tuple(chance.choices(steps, k=3)), "0.weight": (2**31, 0)}
    file.write_bytes(pickle.dumps(metadata))
    return kind


def plant(chance: random.Random, saves: Path, outside: Path) -> str:
    """Puts what looks like a part of the library's own into a directory of saves."""
    names = [".saving-00000005-x", ".removing-step-00000001-x", ".replaced-00000002-x"]
    names += [".replaced-00000007-x", ".latest-x", ".probe-x", "step-00000007", "step-1", "step-"]
    name = chance.choice([*names, f"step-{2**63}", "step-00000001.not-a-save-x"])
    there = saves / name
    kind = chance.choice(["save", "save with links", "link", "marks", "pipe", "link to a save"])
    if kind.startswith("save"):
        shutil.copytree(saves / "step-00000001", there)
        for file in sorted(there.iterdir()):
            if kind == "save with links" and chance.random() < 0.5:
                file.unlink()
                file.symlink_to(chance.choice([outside / "canary", outside, outside / "new"]))
    elif kind == "link":
        there.symlink_to(outside)
    elif kind == "link to a save":
        there.symlink_to("step-00000000")
    elif kind == "pipe":
        os.mkfifo(there)
    else:
        there.mkdir()
        for mark in (".writers", "rank-00000.json", "failed-00000.json", "manifest.json"):
            if chance.random() < 0.5:
                (there / mark).symlink_to(outside / chance.choice(["canary", "new"]))
            elif chance.random() < 0.5:
                (there / mark).write_text(chance.choice(TEXTS))
    return f"{kind} planted as {name}, with links"


def small_net() -> nn.Module:
    return nn.Sequential(nn.Linear(33, 33), nn.BatchNorm1d(33), nn.Linear(33, 5))


def write_foreign(net: nn.Module, folder: Path) -> None:
    """Writes a module's state dict in each foreign format, one folder or file each."""
    weights = {name: tensor.cpu() for name, tensor in net.state_dict().items()}
    safetensors.torch.save_file(weights, folder / "one.safetensors")
    (folder / "index").mkdir()
    names = sorted(weights)
    index: dict[str, str] = {}
    for part in range(2):
        file = f"model-0000{part + 1}-of-00002.safetensors"
        mine = names[part::2]
        safetensors.torch.save_file({n: weights[n] for n in mine}, folder / "index" / file)
        index |= dict.fromkeys(mine, file)
    document = {"metadata": {"total_size": 1}, "weight_map": index}
    (folder / "index" / "model.safetensors.index.json").write_text(json.dumps(document))
    torch.save(weights, folder / "zip.pt")
    torch.save(weights, folder / "legacy.pt", _use_new_zipfile_serialization=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dict(weights), checkpoint_id=folder / "dcp", no_dist=True)


def change(chance: random.Random, target: Path, outside: Path) -> tuple[str, bool]:
    """Makes a file hostile, or one in a folder; says how, and whether checksums were renewed."""
    files = [target, *sorted(target.rglob("*"))]
    if target.is_symlink():
        raise ValueError(f"{target} leads elsewhere")
    plain = [path for path in files if path.is_file() and not path.is_symlink()]
    plain = [path for path in plain if path.stat().st_size < 1 << 20]
    file = chance.choice(plain)
    name = f"{file.relative_to(target.parent)}"
    kind = chance.random()
    if kind < 0.2:
        links = [path for path in files if path.is_symlink()]
        if links and chance.random() < 0.3:
            file = chance.choice(links)
        return f"{hostile_entry(chance, file, outside)} in the place of {file.name}", False
    if target.name == "saves" and kind < 0.3:
        return plant(chance, target, outside), True
    if kind > 0.45:
        if file.name == "manifest.json":
            reseal(file.parent, hostile_json(chance, json.loads(file.read_text()), str(outside)))
            return f"resealed JSON of {name}", True
        if file.suffix == ".safetensors":
            hostile_header(chance, file, str(outside))
            if file.parent.name.startswith("step-"):
                reseal(file.parent)
            return f"header of {name}", True
        if file.suffix == ".json":
            file.write_text(hostile_json(chance, json.loads(file.read_text()), str(outside)))
            return f"JSON of {name}", True
        if file.suffix == ".jsonl":
            lines = file.read_text().splitlines()
            for at in chance.sample(range(len(lines)), chance.choice([1, 1, 5])):
                lines[at] = hostile_json(chance, json.loads(lines[at]), str(outside))
            file.write_text("\n".join(lines) + "\n")
            return f"lines of {name}", True
        if zipfile.is_zipfile(file) and chance.random() < 0.8:
            return f"zip {hostile_zip(chance, file, outside)} of {name}", True
        if file.name == ".metadata" and chance.random() < 0.7:
            return f"metadata {hostile_metadata(chance, file, outside)} of {name}", True
        if file.suffix in {".pt", ".distcp"} or file.name == ".metadata":
            file.write_bytes(hostile_pickle(chance, outside))
            return f"pickle of {name}", True
    file.write_bytes(hostile_bytes(chance, file.read_bytes()))
    return f"bytes of {name}", False
