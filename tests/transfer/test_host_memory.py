"""Available host memory: the tightest group counts, and page cache that can go does not."""

from pathlib import Path

import pytest

from residency._transfer import _host_memory
from residency._transfer._host_memory import available_host_bytes, available_in_cgroups

V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def write_group(folder: Path, files: tuple[str, str, str], limit: object, used: int, cache: int):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / files[0]).write_text(f"{limit}\n")
    (folder / files[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{files[2]} {cache}\nactive_file 5\n")


def available(tmp_path: Path, line: str | None) -> int | None:
    proc = tmp_path / "proc"
    if line is not None:
        (proc / "self").mkdir(parents=True)
        (proc / "self" / "cgroup").write_text(f"12:cpu,cpuacct:/elsewhere\n{line}\n")
    return available_in_cgroups(root=tmp_path / "cgroup", proc=proc)


@pytest.mark.parametrize(
    ("files", "mount", "line"),
    [(V2, ".", "0::/a/b"), (V2, "unified", "0::/a/b"), (V1, "memory", "4:memory:/a/b")],
    ids=["v2", "hybrid", "v1"],
)
def test_the_tightest_of_the_process_own_group_and_those_above_counts(
    tmp_path: Path, files: tuple[str, str, str], mount: str, line: str
) -> None:
    root = tmp_path / "cgroup" / mount
    write_group(root, files, "max" if files is V2 else 2**63 - 4096, 9000, 0)
    write_group(root / "a", files, 5000, 4500, 1000)
    write_group(root / "a" / "b", files, 9000, 4000, 500)
    write_group(root / "other", files, 10, 10, 0)
    assert available(tmp_path, line) == 5000 - (4500 - 1000)


def test_page_cache_that_can_go_is_not_in_use(tmp_path: Path) -> None:
    write_group(tmp_path / "cgroup", V2, 8000, 7900, 7000)
    assert available(tmp_path, "0::/") == 7100


def test_a_group_of_nothing_but_page_cache_that_can_go_has_all_of_its_limit(tmp_path: Path) -> None:
    write_group(tmp_path / "cgroup", V2, 8000, 7000, 7000)
    assert available(tmp_path, "0::/") == 8000


@pytest.mark.parametrize("line", ["0::/docker/abc", "0::/../..", None])
def test_a_path_from_outside_the_container_leads_to_the_mount(
    tmp_path: Path, line: str | None
) -> None:
    write_group(tmp_path / "cgroup", V2, 8000, 1000, 0)
    assert available(tmp_path, line) == 7000


def test_a_group_over_its_limit_leaves_nothing_and_none_leaves_no_answer(tmp_path: Path) -> None:
    assert available(tmp_path / "none", "0::/") is None
    write_group(tmp_path / "cgroup", V2, 1000, 3000, 500)
    assert available(tmp_path, "0::/") == 0


@pytest.mark.parametrize(
    ("ram", "in_groups", "expected"),
    [(5, None, 5120), (5, 4096, 4096), (5, 8192, 5120), (None, 8192, 8192), (None, None, None)],
)
def test_the_host_has_what_is_free_or_less_where_a_group_says_so(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ram: int | None,
    in_groups: int | None,
    expected: int | None,
) -> None:
    said = "" if ram is None else f"MemAvailable:   {ram} kB\n"
    (tmp_path / "meminfo").write_text(
        f"MemTotal:   9 kB\nMemFree:   2 kB\n{said}SwapFree:   7 kB\n"
    )
    monkeypatch.setattr(_host_memory, "_PROC", tmp_path)
    monkeypatch.setattr(_host_memory, "available_in_cgroups", lambda: in_groups)
    assert available_host_bytes() == expected
