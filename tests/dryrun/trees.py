"""A user's folder, and what a script may do to it."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

# What a process of a dry run does without torch, in the folder of the user.
BEGIN = """
import os, random, shutil, socket, sqlite3, sys
from contextlib import closing
from pathlib import Path
from residency._dryrun._files import files_of_run
files = files_of_run()
do = {}  # at an event of Python's
def refuse():
    raise OSError(5, "refused")
def hear(event, arguments):
    if event in do:
        do[event]()
sys.addaudithook(hear)
def refused(call, *arguments):
    do.update(dict.fromkeys(("os.rename", "os.remove", "os.link", "os.mkdir"), refuse))
    try:
        call(*arguments)
    except OSError:
        pass
    do.clear()
def write_row(name):
    with closing(sqlite3.connect(name)) as database:
        database.execute("create table if not exists t(a)")
        database.execute("insert into t values (2)")
        database.commit()
"""


def tree(folder: Path) -> dict[str, object]:
    """Returns what a folder has: bytes, times and modes of files, and where links lead.

    The time of a folder is that of the last name in it, and new files stay.
    """
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = (str(path.readlink()), path.lstat().st_mtime_ns)
        elif path.is_dir():
            found[name] = path.stat().st_mode
        else:
            facts = path.stat()
            content = path.read_bytes() if path.is_file() else None
            attributes = {each: os.getxattr(path, each) for each in os.listxattr(path)}
            found[name] = (content, facts.st_mtime_ns, facts.st_mode, attributes)
    return found


def is_save(path: Path) -> bool:
    return path.read_bytes() == bytes(9)


def logs_of_older(folder: Path, before: dict[str, object]) -> list[str]:
    """Returns what sqlite would take for a part of a database that is older than the run."""
    beside = [name + end for name in before for end in ("-journal", "-shm", "-wal")]
    databases = [name for name in beside if is_database(folder / name.rpartition("-")[0])]
    paths = {each: folder / each for each in databases if each not in before}
    return [name for name, path in paths.items() if path.is_symlink() or path.is_file()]


def is_of_older(path: Path) -> bool:
    """Returns whether a new name may be one of an older file, or of the older link."""
    return path.lstat().st_nlink > 1 or (path.is_symlink() and str(path.readlink()) == "a/1")


def is_database(path: Path) -> bool:
    return path.is_file() and path.read_bytes().startswith(b"SQLite format 3")


def open_folders_of_run(folder: Path, before: dict[str, object]) -> None:
    """Opens to a test the folders that the script has made and closed."""
    for outer, inner, _ in os.walk(folder):
        for path in (Path(outer, name) for name in inner):
            if str(path.relative_to(folder)) not in before and not path.is_symlink():
                path.chmod(0o700)


def make_tree(folder: Path) -> None:
    for name in ("a", "a/b", "c"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for name in ("1", "2", "a/1", "a/2", "a/b/1", "c/1"):
        (folder / name).write_text(f"the user's {name}")
    (folder / "a" / "2").chmod(0o600)
    (folder / "c").chmod(0o750)
    (folder / "empty").touch()
    (folder / "link").symlink_to("a/1")
    os.link(folder / "a" / "2", folder / "c" / "2")
    os.mkfifo(folder / "pipe")
    for name in ("db", "c/db"):
        with closing(sqlite3.connect(folder / name)) as database:
            database.execute("create table t(a)")
            database.commit()


CHANGES = {
    "overwritten": "open('a/1', 'w').write('x'); open('a/1', 'w').write('y')",
    "written through a link": "open('link', 'w').write('x')",
    "appended to": "open('a/1', 'a').write('x'); open('empty', 'a').write('x')",
    "changed in place": "open('a/1', 'r+').write('x'); os.truncate('a/2', 1)",
    "removed": "os.remove('a/1'); os.remove('link')",
    "removed with its folder": "shutil.rmtree('a'); os.makedirs('a'); open('a/1', 'w').write('x')",
    "renamed": "os.rename('a/1', '3'); open('a/1', 'w').write('x'); open('3', 'w').write('x')",
    "renamed onto another": "os.replace('a/1', 'a/2'); os.remove('a/2')",
    "renamed with its folder": (
        "os.rename('a', 'd'); open('d/1', 'w').write('x'); shutil.rmtree('d/b'); os.makedirs('a/b')"
    ),
    "moved into a folder that goes": (
        "os.mkdir('d'); shutil.move('a/1', 'd/1'); shutil.move('a/b', 'd/b'); shutil.rmtree('d')"
    ),
    "moved with a new folder": (
        "os.mkdir('d'); os.rename('a/1', 'd/1'); os.remove('1'); os.rename('d', '1')"
    ),
    "replaced by a file that was written beside it": (
        "open('t', 'w').write('x'); os.replace('t', 'a/1')"
    ),
    "replaced by a save": (
        "files.note_save('a/1'); os.open('a/1', os.O_WRONLY | os.O_CREAT); "
        "shutil.copyfile('a/1', 'a/2')"
    ),
    "given another name": (
        "os.link('a/1', 'd'); open('d', 'w').write('x'); "
        "os.link('a/2', 'e'); open('e', 'a').write('x')"
    ),
    "replaced by a folder": "os.remove('a/1'); os.mkdir('a/1'); open('a/1/2', 'w').write('x')",
    "replaced by a link": "os.remove('a/1'); os.symlink('2', 'a/1')",
    "changed by a descriptor of its folder": (
        "a = os.open('a', os.O_RDONLY); os.remove('1', dir_fd=a); "
        "os.rename('2', '1', src_dir_fd=a, dst_dir_fd=a)"
    ),
    "opened in a folder by its descriptor": (
        "a = os.open('a', os.O_RDONLY); "
        "os.write(os.open('1', os.O_WRONLY | os.O_TRUNC, dir_fd=a), b'x')"
    ),
    "made shorter by who appends": "f = open('a/1', 'a+'); f.truncate(3); f.write('x')",
    "given another mode": "os.chmod('a/1', 0o400); os.chmod('a', 0o700); os.chmod('link', 0o604)",
    "given another mode by a descriptor": "f = open('a/1'); os.fchmod(f.fileno(), 0o640)",
    "given another mode and removed": (
        "os.chmod('a', 0o701); os.chmod('a/1', 0); shutil.rmtree('a')"
    ),
    "given another mode and moved with its folder": (
        "os.chmod('a/b', 0o700); os.rename('a', 'd'); os.chmod('d', 0o711); os.rename('c', 'a')"
    ),
    "given another time": (
        "os.utime('a/1', (1, 1)); os.utime('link', (2, 2), follow_symlinks=False); "
        "Path('a/2').touch(); os.utime('a/b', ns=(3, 3))"
    ),
    "given another time by a descriptor": "f = open('a/1'); os.utime(f.fileno(), (1, 1))",
    "written as it was": "text = open('a/1').read(); open('a/1', 'r+').write(text)",
    "given the facts of another": "shutil.copystat('a/2', '1'); shutil.copymode('a/2', '2')",
    "changed by sqlite3": "write_row('db'); write_row(Path('c/db'))",
    "changed by sqlite3, named by a URI": (
        "d = sqlite3.connect('file:c/%64b?mode=rw', uri=True); "
        "d.execute('drop table t'); d.commit()"
    ),
    "left by sqlite3 in the middle": (
        "d = sqlite3.connect('db'); d.execute('pragma journal_mode=wal'); "
        "d.execute('insert into t values (1)'); d.commit(); sys.stdout.flush(); os._exit(0)"
    ),
    "written by way of a descriptor": (
        "f = open('1'); open(f'/proc/self/fd/{f.fileno()}', 'w').write('x'); "
        "g = open('2'); open(f'/dev/fd/{g.fileno()}', 'r+').write('x'); "
        "h = open('c/2'); os.truncate(f'/proc/self/fd/{h.fileno()}', 1); os.remove('c/2'); "
        "os.symlink(f'/dev/fd/{h.fileno()}', 'd'); open('d', 'a').write('x')"
    ),
    "written by way of a descriptor when it was gone": (
        "f, g, h = open('1'), open('2'), open('c/2'); os.remove('1'); open('2', 'w').write('y'); "
        "os.remove('c/2'); open(f'/proc/self/fd/{f.fileno()}', 'w').write('x'); "
        "open(f'/proc/self/fd/{g.fileno()}', 'r+').write('x'); "
        "open(f'/dev/fd/{h.fileno()}', 'w').write('x'); os.setxattr(f.fileno(), 'user.a', b'x')"
    ),
    "written by a descriptor that is there": (
        "f = os.open('1', os.O_RDWR); file = os.fdopen(f, 'w'); file.write('x'); file.flush(); "
        "assert open('1').read() == 'xhe user\\'s 1'"
    ),
    "saved by way of a descriptor": (
        "f = open('1'); p = f'/proc/self/fd/{f.fileno()}'; files.note_save(p); "
        "open(p, 'wb').write(bytes(9))"
    ),
    "given another name by way of a link": (
        "os.symlink('1', 's'); f = os.open('.', os.O_RDONLY); "
        "os.link('s', 'd', src_dir_fd=f, dst_dir_fd=f); open('d', 'w').write('x')"
    ),
    "given another name by way of a descriptor": (
        "f = open('1'); os.link(f'/proc/self/fd/{f.fileno()}', 'd', src_dir_fd=f.fileno()); "
        "open('d', 'r+').write('x')"
    ),
    "moved where a folder could not be given a name": (
        "refused(os.link, 'a', 'd'); os.rename('1', 'd'); refused(os.rename, 'd', '2')"
    ),
    "moved into a folder whose move was refused": (
        "os.makedirs('d/e'); os.rename('1', 'd/1'); os.rename('a/b', 'd/b'); os.mkdir('f'); "
        "refused(os.rename, 'd', 'f')"
    ),
    "replaced by a save whose first move was refused": (
        "files.note_save('s'); open('s', 'wb').truncate(9); refused(os.rename, 's', '1'); "
        "open('1', 'r+').write('x'); os.setxattr('1', 'user.a', b'x'); os.replace('s', '1')"
    ),
    "moved onto a save, which was refused": (
        "files.note_save('s'); open('s', 'wb').truncate(9); refused(os.rename, '1', 's'); "
        "open('1', 'r+').write('x'); os.remove('2')"
    ),
    "moved by Python's own rename": "import posix; posix.rename('1', '2'); posix.replace('2', '3')",
    "moved in a process that was killed": (
        "files._after_rename = lambda *each: os._exit(0); os.rename('1', '2')"
    ),
    "a database beside which a log is put": (
        "open('db-wal', 'wb').write(b'x'); shutil.copyfile('1', 'c/db-journal'); os.remove('2')"
    ),
    "a link in the place of a log": (
        "os.symlink('1', 'db-wal'); os.rename('link', 'empty-wal'); sqlite3.connect('db').close(); "
        "write_row('empty'); assert not os.path.lexists('empty-wal')"
    ),
    "a database in whose place another was": (
        "os.rename('db', 'o'); d = sqlite3.connect('db'); d.execute('pragma journal_mode=wal'); "
        "d.execute('create table u(a)'); d.commit(); sys.stdout.flush(); os._exit(0)"
    ),
    "a pipe that is removed": "os.remove('pipe'); os.mkfifo('pipe'); os.remove('pipe')",
    "a pipe in the way of a file": "os.remove('pipe'); open('pipe', 'w').write('x')",
}

UNDO = """
import sys
from residency._dryrun._undo import undo
lost = undo(sys.argv[1], has_saves=False, leaves_new=sys.argv[2] == "True")
sys.exit(str(lost) if lost else 0)
"""
ANY_CHANGES = """
names = ["1", "2", "a", "a/1", "a/2", "a/b", "a/b/1", "c", "c/1", "d", "d/1", "empty", "link"]
names += ["db", "c/db", "c/2", "db-wal", "c/db-journal"]
FLAGS = [os.O_CREAT, os.O_TRUNC, os.O_APPEND, os.O_EXCL, os.O_NOFOLLOW]
def open_by_flags(name):
    flags = random.choice([os.O_RDONLY, os.O_WRONLY, os.O_RDWR]) | os.O_NONBLOCK
    for flag in FLAGS:
        flags |= flag * (random.random() < 0.4)
    folder = os.open(os.path.dirname(name) or ".", os.O_RDONLY)
    try:
        descriptor = os.open(os.path.basename(name), flags, dir_fd=folder)
    finally:
        os.close(folder)
    try:
        os.write(descriptor, b"run")
        os.ftruncate(descriptor, 2)
        os.fchmod(descriptor, 0o640)
    finally:
        os.close(descriptor)
opened = []
def open_again(name):
    if not opened or random.random() < 0.5:
        opened.append(open(name))
    link = f"/{random.choice(['proc/self', 'dev'])}/fd/{random.choice(opened).fileno()}"
    if random.random() < 0.3:
        os.truncate(link, 2)
    elif random.random() < 0.3:
        save(link)
    else:
        open(link, random.choice(["w", "a", "r+"])).write("again")
def link_by_descriptor(name):
    if random.random() < 0.5:
        descriptor = os.open(".", os.O_TMPFILE | os.O_RDWR)
    else:
        descriptor = os.open(random.choice(names), os.O_RDONLY | os.O_NONBLOCK)
    os.link(f"/proc/self/fd/{descriptor}", name, src_dir_fd=descriptor)
def link_followed(one, other):
    folder = os.open(".", os.O_RDONLY)
    os.link(one, other, src_dir_fd=folder, follow_symlinks=random.random() < 0.5)
def leave_log(name):
    left.append(sqlite3.connect(name))
    left[-1].execute("pragma journal_mode=wal")
    left[-1].execute("create table if not exists u(a)")
    left[-1].commit()
left = []
def cut_by_descriptor(name):
    with open(name, random.choice(["a+", "r+"])) as file:
        file.truncate(1)
        file.write("run")
random.seed(int(sys.argv[1]))
def save(name):
    files.note_save(name)
    with open(name, "wb") as file:
        file.truncate(9)
for _ in range(30):
    one, other = random.choice(names), random.choice(names)
    change = random.choice([
        lambda: open(one, random.choice(["w", "a", "r+", "x"])).write("run"),
        lambda: os.remove(one), lambda: shutil.rmtree(one), lambda: os.rename(one, other),
        lambda: shutil.move(one, other), lambda: os.mkdir(one), lambda: os.symlink(other, one),
        lambda: os.link(one, other), lambda: shutil.copyfile(one, other), lambda: save(one),
        lambda: shutil.copytree(one, other), lambda: os.truncate(one, 3),
        lambda: os.chmod(one, random.choice([0o600, 0o644, 0o751, 0o500, 0o400])),
        lambda: os.utime(one, (7, 7), follow_symlinks=random.random() < 0.5),
        lambda: Path(one).touch(), lambda: open_by_flags(one), lambda: open_by_flags(one),
        lambda: cut_by_descriptor(one), lambda: write_row(one), lambda: os.remove("pipe"),
        lambda: os.setxattr(one, "user.run", b"x"), lambda: shutil.copystat(one, other),
        lambda: open_again(one), lambda: open_again(one), lambda: leave_log(one),
        lambda: link_by_descriptor(one), lambda: link_followed(one, other),
    ])
    # What is refused was heard of, and is tried again, or not.
    for is_refused in random.choice([[False], [False], [True], [True, False], [True, True, False]]):
        do.update({"os." + e: refuse for e in ("rename", "remove", "link", "mkdir") if is_refused})
        try:
            change()
        except (OSError, shutil.Error, RecursionError, sqlite3.Error):  # a folder into itself
            pass
        do.clear()
if left:
    sys.stdout.flush()
    os._exit(0)
"""
OPENED = """
import itertools
access = [os.O_RDONLY, os.O_WRONLY, os.O_RDWR]
more = [os.O_CREAT, os.O_TRUNC, os.O_APPEND, os.O_EXCL, os.O_NOFOLLOW, os.O_PATH, os.O_DIRECTORY]
for first in access:
    for chosen in itertools.product([False, True], repeat=len(more)):
        flags = first | sum(flag for flag, is_in in zip(more, chosen) if is_in)
        for name in ("old", "private", "link", "empty", "two names", "missing", "a"):
            told = []
            try:
                descriptor = os.open(name, flags)
                told.append("opened")
                os.write(descriptor, b"x")
            except OSError as error:
                told.append(error.errno)
            if told[0] == "opened":
                os.close(descriptor)
            if os.path.isfile(name):
                told += [open(name).read(), oct(os.stat(name).st_mode)]
                if name == "missing":
                    os.remove(name)
            print(flags, name, *told)
"""
