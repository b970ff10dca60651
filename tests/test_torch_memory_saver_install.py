"""import torch_memory_saver gives ours: in this process, and in those that it starts by whatever means."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from fencepool.integrations.torch_memory_saver import _preload, configure_subprocess, shim_directory
from support import children

# What a child prints: where its torch_memory_saver came from.
WHICH = "import torch_memory_saver as t; print(getattr(t, 'NAME', 'fencepool'))"


@pytest.fixture
def other(tmp_path: Path) -> str:
    """A directory with another torch_memory_saver, standing for the one of its own distribution."""
    package = tmp_path / "site" / "torch_memory_saver"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("NAME = 'another'\n")
    return str(package.parent)


def run_file(directory: Path, code: str, *path: str, **changes: str) -> list[str]:
    """Run a program from a file, as spawn needs it, with directories on its path; the lines it prints."""
    file = directory / "program.py"
    file.write_text(textwrap.dedent(code))
    environment = children.environment(**changes)
    environment["PYTHONPATH"] = ":".join([*path, environment["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, file], capture_output=True, text=True, timeout=90, env=environment, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_the_directory_for_children_shadows_nothing_else():
    names = {path.name for path in Path(shim_directory()).iterdir()}
    assert names - {"__pycache__"} <= {"torch_memory_saver", f"{_preload.STEM}.abi3.so"}


def test_install_comes_before_an_installed_one(tmp_path, other):
    code = f"""
    from fencepool.integrations.torch_memory_saver import install, shim_directory, torch_memory_saver
    install()
    install()
    {WHICH}
    print(t.__file__.startswith(shim_directory()), t.torch_memory_saver is torch_memory_saver)
    """
    assert run_file(tmp_path, code, other) == ["fencepool", "True True"]


def test_install_after_another_was_imported_is_refused(tmp_path, other):
    code = """
    import os, sys
    import torch_memory_saver as before
    import fencepool as fp
    from fencepool.integrations.torch_memory_saver import install
    path, variable = list(sys.path), os.environ["PYTHONPATH"]
    try:
        install()
    except fp.Error as error:
        print("call install() before" in str(error), before.__file__ in str(error))
    import torch_memory_saver as after
    print(after is before, sys.path == path, os.environ["PYTHONPATH"] == variable)
    """
    assert run_file(tmp_path, code, other) == ["True True", "True True True"]


CHILDREN = """
import multiprocessing, subprocess, sys

def which():
    {which}
    sys.stdout.flush()

def start_all():
    subprocess.run([sys.executable, "-c", {which!r}], check=True)
    subprocess.run(["sh", "-c", sys.executable + ' -c "' + {which!r} + '"'], check=True)
    for method in ("spawn", "forkserver"):
        process = multiprocessing.get_context(method).Process(target=which)
        process.start()
        process.join()
        assert process.exitcode == 0

if __name__ == "__main__":
    from fencepool.integrations.torch_memory_saver import configure_subprocess, install
    {body}
"""


def in_children(directory: Path, body: str, *path: str) -> list[str]:
    """What the children print: executed, executed through a shell, spawned, from a fork server."""
    return run_file(directory, CHILDREN.format(which=WHICH, body=body), *path)


def test_children_of_a_process_with_install_import_ours(tmp_path, other):
    assert in_children(tmp_path, "install(); start_all()", other) == ["fencepool"] * 4


def test_children_can_be_left_out(tmp_path, other):
    # Those of multiprocessing take their parent's path over, whatever is in the environment.
    found = in_children(tmp_path, "install(children=False); start_all()", other)
    assert found == ["another", "another", "fencepool", "fencepool"]


def test_children_started_in_a_block_import_ours_and_later_ones_do_not(tmp_path, other):
    body = f"""
    import os
    before = list(sys.path), os.environ["PYTHONPATH"]
    with configure_subprocess():
        subprocess.run([sys.executable, "-c", {WHICH!r}], check=True)
        process = multiprocessing.get_context("spawn").Process(target=which)
        process.start()
        process.join()
    assert (sys.path, os.environ["PYTHONPATH"]) == before
    start_all()
    """
    assert in_children(tmp_path, body.strip(), other) == ["fencepool"] * 2 + ["another"] * 4


def test_a_block_inside_install_changes_nothing(tmp_path, other):
    body = "install()\n    with configure_subprocess(): pass\n    start_all()"
    assert in_children(tmp_path, body, other) == ["fencepool"] * 4


def test_blocks_that_overlap_last_until_the_last_ends():
    path, variable = list(sys.path), os.environ.get("PYTHONPATH")
    first, second = configure_subprocess(), configure_subprocess()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert sys.path == [shim_directory(), *path]
    assert os.environ["PYTHONPATH"].split(":")[0] == shim_directory()
    second.__exit__(None, None, None)
    assert sys.path == path
    assert os.environ.get("PYTHONPATH") == variable


@pytest.mark.parametrize("before", [None, "/a", "/a:/b", ":/a"])
def test_a_block_leaves_the_rest_of_the_path_as_it_is(monkeypatch, before):
    if before is None:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONPATH", before)
    with configure_subprocess():
        assert os.environ["PYTHONPATH"] == ":".join([shim_directory(), *([before] if before else [])])
    assert os.environ.get("PYTHONPATH") == before


def test_what_a_block_itself_puts_on_the_path_stays(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/a")
    with configure_subprocess():
        monkeypatch.setenv("PYTHONPATH", "/b:" + os.environ["PYTHONPATH"])
    assert os.environ["PYTHONPATH"] == "/b:/a"


def test_install_inside_a_block_outlives_it(tmp_path, other):
    body = "\n    with configure_subprocess(): install()\n    start_all()"
    assert in_children(tmp_path, body, other) == ["fencepool"] * 4


def test_an_import_hook_that_gives_another_is_named(tmp_path, other):
    code = f"""
    import importlib.machinery, sys
    import fencepool as fp
    from fencepool.integrations.torch_memory_saver import install

    class Hook:
        def find_spec(self, name, path=None, target=None):
            if name == "torch_memory_saver":
                return importlib.machinery.PathFinder.find_spec(name, [{other!r}])

    sys.meta_path.insert(0, Hook())
    try:
        install()
    except fp.Error as error:
        print("import hook" in str(error))
    """
    assert run_file(tmp_path, code) == ["True"]


def test_a_starter_can_name_the_directory_itself(tmp_path, other):
    assert run_file(tmp_path, WHICH, shim_directory(), other) == ["fencepool"]


def test_a_child_pauses_and_resumes_without_being_edited(tmp_path):
    code = """
    import multiprocessing, sys

    def work():
        import torch
        from torch_memory_saver import torch_memory_saver
        with torch_memory_saver.region(tag="weights", enable_cpu_backup=True):
            weights = torch.full((1 << 20,), 7, dtype=torch.uint8)
        torch_memory_saver.pause("weights")
        torch_memory_saver.resume("weights")
        print(bool((weights == 7).all()), torch_memory_saver.__class__.__module__, flush=True)

    if __name__ == "__main__":
        from fencepool.integrations.torch_memory_saver import configure_subprocess
        with configure_subprocess():
            process = multiprocessing.get_context("spawn").Process(target=work)
            process.start()
        process.join()
    """
    expected = "True fencepool.integrations.torch_memory_saver._saver"
    assert run_file(tmp_path, code, FENCEPOOL_DEVICE="cpu") == [expected]


# --- starters that use LD_PRELOAD ------------------------------------------------------------------


@pytest.fixture
def library() -> Path:
    path = Path(shim_directory()) / f"{_preload.STEM}.abi3.so"
    if not path.is_file():
        pytest.skip("built with CMake alone: setup.py puts the file for LD_PRELOAD into the package")
    return path


def preloading(library: Path) -> dict[str, str]:
    before = os.environ.get("LD_PRELOAD")  # a sanitizer's run-time library, which has to come first
    return {"LD_PRELOAD": f"{before}:{library}" if before else str(library)}


def test_a_process_with_our_file_preloaded_imports_ours(tmp_path, other, library):
    assert run_file(tmp_path, WHICH, other, **preloading(library)) == ["fencepool"]


def test_a_preloaded_process_passes_it_on(tmp_path, other, library):
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WHICH!r}], check=True)"
    assert run_file(tmp_path, code, other, **preloading(library)) == ["fencepool"]


def test_a_trainer_started_as_slime_does_it_pauses_all_it_has(tmp_path, other, library):
    code = """
    import torch
    from torch_memory_saver import torch_memory_saver
    weights = torch.full((1 << 20,), 7, dtype=torch.uint8)
    torch_memory_saver.memory_margin_bytes = 1 << 20
    torch_memory_saver.pause()
    backup = torch_memory_saver.get_cpu_backup(weights, zero_copy=True)
    print(bool((backup == 7).all()))
    with torch_memory_saver.disable():
        print(torch.ones(1 << 20).sum().item())
    torch_memory_saver.resume()
    print(bool((weights == 7).all()))
    """
    variables = {"TMS_INIT_ENABLE": "1", "TMS_INIT_ENABLE_CPU_BACKUP": "1", "FENCEPOOL_DEVICE": "cpu"}
    found = run_file(tmp_path, code, other, **variables, **preloading(library))
    assert found == ["True", "1048576.0", "True"]


def test_the_file_needs_the_c_library_alone(library):
    program = shutil.which("readelf")
    if program is None:
        pytest.skip("readelf is not installed")
    done = subprocess.run([program, "--dynamic", library], capture_output=True, text=True, check=True)
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", done.stdout)
    assert set(needed) <= {"libc.so.6", "libdl.so.2"}


def test_the_file_is_where_starters_look_for_it(tmp_path, other, library):
    # slime: beside the package; miles: through the function.
    code = """
    import os
    from fencepool.integrations.torch_memory_saver import install
    install()
    import torch_memory_saver
    from torch_memory_saver.utils import get_binary_path_from_package
    beside = os.path.dirname(os.path.dirname(torch_memory_saver.__file__))
    print(os.path.join(beside, "torch_memory_saver_hook_mode_preload.abi3.so"))
    print(get_binary_path_from_package("torch_memory_saver_hook_mode_preload"))
    """
    assert run_file(tmp_path, code, other) == [str(library), str(library)]


def test_the_file_says_that_there_are_backups_on_disk(library):
    # miles looks for this before it starts a trainer that needs them.
    assert b"TMS_INIT_ENABLE_DISK_BACKUP" in library.read_bytes()


def test_preloading_leaves_other_programs_as_they_are(library):
    def variable(**changes: str) -> str:
        environment = {"PATH": "/usr/bin:/bin", "LD_PRELOAD": str(library), **changes}
        command = ["sh", "-c", 'printf %s "$PYTHONPATH"']
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    here = str(library.parent)
    assert variable() == here
    assert variable(PYTHONPATH="/a:/b") == f"{here}:/a:/b"
    assert variable(PYTHONPATH=f"{here}:/a") == f"{here}:/a"
    assert variable(PYTHONPATH=f"{here}/longer") == f"{here}:{here}/longer"


def test_no_other_library_is_offered():
    import fencepool as fp

    with pytest.raises(fp.UnsupportedError, match="hook_mode_torch"):
        _preload.get_binary_path_from_package("torch_memory_saver_hook_mode_torch")
