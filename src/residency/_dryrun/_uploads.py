"""Keeps what a script would publish on the Hugging Face Hub on this machine: what a dry run has of
weights was not computed.

The Hub's client says that all went well, so that the script goes on. The watch over files refuses a
PUT by which a script sends something itself.
"""

from __future__ import annotations

import concurrent.futures
import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from residency._memory import ImportWatch

_CHANGES = ("create_", "delete_", "move_", "permanently_", "preupload_", "update_", "upload_")
_NO_COMMIT = "0" * 40


def publish_nothing() -> None:
    """Makes the Hub's client change nothing there, from its import on."""
    ImportWatch({"huggingface_hub.hf_api": _watch}).start()


def _watch(module: ModuleType) -> None:
    api: Any = vars(module)["HfApi"]
    for name, found in list(vars(api).items()):
        if name.startswith(_CHANGES) and inspect.isfunction(found):
            changed = _changing_nothing(module, name, found)
            setattr(api, name, changed)
            bound = vars(module).get(name)  # a method of the client that all share
            if inspect.ismethod(bound):
                setattr(module, name, functools.partial(changed, bound.__self__))


def _changing_nothing(module: ModuleType, name: str, found: Callable[..., Any]) -> Any:
    names = vars(module)

    @functools.wraps(found)
    def called(self: Any, *args: Any, **options: Any) -> Any:
        given = inspect.signature(found).bind_partial(self, *args, **options).arguments
        url = f"{self.endpoint}/{given.get('repo_id', 'a/repository')}"
        made: Any = None
        if name == "create_repo":
            made = names["RepoUrl"](url, endpoint=self.endpoint)
        elif name.startswith(("create_commit", "upload_")):
            commit = f"{url}/commit/{_NO_COMMIT}"
            made = names["CommitInfo"](commit, commit_message="", commit_description="", oid="")
        if not given.get("run_as_future"):
            return made
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        future.set_result(made)
        return future

    return called
