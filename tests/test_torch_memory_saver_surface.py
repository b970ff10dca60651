"""Every public name of torch_memory_saver 0.0.10 is there, and takes what it takes there."""

from __future__ import annotations

import importlib
import inspect

import pytest

from support import children

# Positional order and defaults, without self; what 0.0.10 has.
SIGNATURES = {
    "region": [
        ("tag", "default"),
        ("enable_cpu_backup", False),
        ("enable_disk_backup", False),
        ("cpu_backup_backend", None),
    ],
    "cuda_graph": [
        ("cuda_graph", inspect.Parameter.empty),
        ("pool", None),
        ("stream", None),
        ("capture_error_mode", "global"),
        ("tag", "default"),
        ("enable_cpu_backup", False),
        ("cpu_backup_backend", None),
    ],
    "disable": [],
    "pause": [("tag", None)],
    "resume": [("tag", None)],
    "get_cpu_backup": [("x", inspect.Parameter.empty), ("zero_copy", False)],
    "set_disk_backup_dir": [("path", inspect.Parameter.empty)],
}
PROPERTIES = {"enabled", "hook_mode", "memory_margin_bytes", "retain_cpu_backup"}
NAMES = {
    "torch_memory_saver": ["TorchMemorySaver", "configure_subprocess", "torch_memory_saver"],
    "torch_memory_saver.entrypoint": ["TorchMemorySaver"],
    "torch_memory_saver.hooks": [],
    "torch_memory_saver.hooks.base": ["HookMode"],
    "torch_memory_saver.hooks.mode_preload": ["configure_subprocess"],
    "torch_memory_saver.testing_utils": ["empty_cache", "get_and_print_gpu_memory", "get_device"],
    "torch_memory_saver.utils": ["get_binary_path_from_package", "is_xpu"],
}


@pytest.mark.parametrize("name", list(SIGNATURES))
def test_a_method_takes_the_same_arguments(name):
    from fencepool.integrations.torch_memory_saver import TorchMemorySaver

    parameters = list(inspect.signature(getattr(TorchMemorySaver, name)).parameters.values())[1:]
    found = [(one.name, one.default) for one in parameters]
    assert found[: len(SIGNATURES[name])] == SIGNATURES[name]
    assert all(one.default is not inspect.Parameter.empty for one in parameters[len(SIGNATURES[name]) :])


def test_the_class_has_these_properties():
    from fencepool.integrations.torch_memory_saver import TorchMemorySaver

    found = {name for name, value in vars(TorchMemorySaver).items() if isinstance(value, property)}
    assert found == PROPERTIES
    settable = {name for name in PROPERTIES if getattr(TorchMemorySaver, name).fset is not None}
    assert settable == PROPERTIES - {"enabled"}


def test_every_module_has_its_names_under_the_installed_name():
    code = f"""
    import importlib
    from fencepool.integrations import torch_memory_saver as ours
    ours.install()
    for module, names in {NAMES!r}.items():
        found = importlib.import_module(module)
        for name in names:
            getattr(found, name)
    import torch_memory_saver
    assert torch_memory_saver.torch_memory_saver is ours.torch_memory_saver
    assert isinstance(ours.torch_memory_saver, torch_memory_saver.TorchMemorySaver)
    assert "torch" not in sys.modules
    """
    children.run_silently(code)


def test_importing_it_needs_no_torch_and_no_device():
    importlib.import_module("fencepool.integrations.torch_memory_saver")
    children.run_silently(
        "import fencepool.integrations.torch_memory_saver, sys; assert 'torch' not in sys.modules",
        FENCEPOOL_DEVICE="",
    )
