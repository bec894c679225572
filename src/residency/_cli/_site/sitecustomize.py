"""Python imports this at its start where ``residency record`` or ``residency dry-run`` has put its
folder on the path.

It waits for torch to be imported, then starts what was asked for; of a process that never imports
torch a dry run only notes what it does to files. Where residency is imported first, torch follows
at once: what is started takes modules of residency that would be half imported otherwise, since
torch is what they import first. The environment's own ``sitecustomize``, which this one hides, runs
before.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

_HERE = Path(__file__).resolve().parent


def _run_the_hidden_one() -> None:
    for folder in sys.path:
        file = Path(folder or ".") / "sitecustomize.py"
        if file.is_file() and file.resolve().parent != _HERE:
            _load(file, "sitecustomize")
            return


def _load(file: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _find(package: str, folder: str) -> None:
    if importlib.util.find_spec(package) is None:  # an interpreter that has none itself
        sys.path.append(folder)


def _find_residency() -> None:
    _find("residency", str(_HERE.parents[2]))


def _settings() -> Any:
    return json.loads(os.environ["RESIDENCY_DRY_RUN"])


def _watch_script() -> None:
    run = _settings()
    for name in ("_facts", "_made", "_found", "_aside", "_hearing"):
        _load_first(name)
    _load_first("_files").watch_files_of_run(run["folder"])
    _load_first("_children").follow_children()
    if run["steps"]:
        _load_first("_places")
        _load_first("_caught")
        _load_first("_loops")
        _load_first("_turning")
        _load_first("_rewriting").rewrite_loops()
        _load_first("_texts").follow_texts()


def _load_first(name: str) -> ModuleType:
    """Loads a module of a package that is not imported; who imports it later gets this one."""
    file = _HERE.parents[1] / "_dryrun" / f"{name}.py"
    module = sys.modules[f"residency._dryrun.{name}"] = _load(file, f"residency._dryrun.{name}")
    return module


def _start_dry_run(torch: ModuleType) -> None:
    _find_residency()
    _find("residency_sim", _settings()["simulator"])
    from residency._dryrun import start_child

    start_child()


def _start_recording(torch: ModuleType) -> None:
    try:
        _find_residency()
        from residency._memory import record_process

        record_process()
    except Exception as error:
        print(f"residency: this process is not recorded: {error}", file=sys.stderr)


def _import_torch(residency: ModuleType) -> None:
    importlib.import_module("torch")


_run_the_hidden_one()
if os.environ.get("RESIDENCY_DRY_RUN"):
    _watch_script()
_asked = {"RESIDENCY_DRY_RUN": _start_dry_run, "RESIDENCY_RECORD": _start_recording}
for _variable, _start in _asked.items():
    if os.environ.get(_variable):
        _imports = _load(_HERE.parents[1] / "_memory" / "_imports.py", "_residency_imports")
        _imports.ImportWatch({"torch": _start, "residency": _import_torch}).start()
