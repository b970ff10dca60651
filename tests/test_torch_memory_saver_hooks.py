"""What TMS_INIT_ENABLE wraps of PyTorch's CUDA functions, on functions that only note what is done."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from fencepool.integrations.torch_memory_saver import _torch_hooks
from fencepool.integrations.torch_memory_saver._ambient import _Switch


class Cuda:
    """PyTorch's CUDA functions, as far as they are wrapped."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.device = 0
        self.is_initialised = False
        self.queued: list = []
        self.failing = ""
        cuda = self

        class Graph:
            def capture_begin(self, *arguments: object, **options: object) -> None:
                cuda.do("begin")

            def capture_end(self) -> None:
                cuda.do("end")

        self.Graph = Graph
        monkeypatch.setattr(torch.cuda, "set_device", self.set_device)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: self.is_initialised)
        monkeypatch.setattr(torch.cuda, "_lazy_call", self.queued.append)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda.memory, "empty_cache", None)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: self.do("empty_cache"))

    def do(self, what: str) -> None:
        self.done.append(what)
        if what == self.failing:
            raise RuntimeError(what)

    def initialise(self) -> None:
        if not self.is_initialised:
            self.is_initialised = True
            for call in self.queued:
                call()

    def set_device(self, device: int) -> None:
        if device < 0:
            raise ValueError(device)
        self.initialise()
        self.device = device

    @contextlib.contextmanager
    def left(self) -> Iterator[None]:
        self.done.append("leave")
        try:
            yield
        finally:
            self.done.append("come back")

    def follow(self) -> None:
        self.done.append(f"follow to {self.device}")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


def install(cuda: Cuda) -> None:
    _torch_hooks.install(SimpleNamespace(follow=cuda.follow, left=cuda.left, renewed=cuda.left))


def test_nothing_happens_before_cuda_is_used(cuda):
    install(cuda)
    assert cuda.done == []


def test_the_first_use_of_cuda_tells_the_device(cuda):
    install(cuda)
    cuda.initialise()
    assert cuda.done == ["follow to 0"]


def test_choosing_a_device_first_never_goes_to_another(cuda):
    install(cuda)
    torch.cuda.set_device(3)
    assert cuda.done == ["follow to 3"]
    torch.cuda.set_device(2)
    assert cuda.done == ["follow to 3", "follow to 2"]


def test_a_device_that_cannot_be_chosen_changes_nothing(cuda):
    install(cuda)
    with pytest.raises(ValueError, match="-5"):
        torch.cuda.set_device(-5)
    assert cuda.done == []
    cuda.initialise()
    assert cuda.done == ["follow to 0"]


def test_cuda_that_is_in_use_already_tells_at_once(cuda):
    cuda.is_initialised, cuda.device = True, 1
    install(cuda)
    assert cuda.done == ["follow to 1"]


def test_a_capture_is_kept_out_of(cuda):
    install(cuda)
    graph = cuda.Graph()
    graph.capture_begin((0, 1), capture_error_mode="global")
    assert cuda.done == ["leave", "begin"]
    graph.capture_end()
    assert cuda.done == ["leave", "begin", "end", "come back"]


def test_a_capture_that_does_not_begin_comes_back(cuda):
    install(cuda)
    cuda.failing = "begin"
    with pytest.raises(RuntimeError, match="begin"):
        cuda.Graph().capture_begin()
    assert cuda.done == ["leave", "begin", "come back"]


def test_a_capture_whose_end_fails_comes_back(cuda):
    install(cuda)
    cuda.failing = "end"
    graph = cuda.Graph()
    graph.capture_begin()
    with pytest.raises(RuntimeError, match="end"):
        graph.capture_end()
    assert cuda.done == ["leave", "begin", "end", "come back"]


def test_the_cache_is_emptied_outside(cuda):
    install(cuda)
    torch.cuda.empty_cache()
    torch.cuda.memory.empty_cache()
    assert cuda.done == ["leave", "empty_cache", "come back"] * 2


# --- the switch ------------------------------------------------------------------------------------


class Place:
    def __init__(self, name: str, done: list[str]) -> None:
        self.name, self.done = name, done

    def begin(self) -> None:
        self.done.append(f"+{self.name}")

    def end(self) -> None:
        self.done.append(f"-{self.name}")


def test_the_switch_leads_to_one_place_at_a_time():
    done: list[str] = []
    switch = _Switch()
    for place in (Place("a", done), Place("b", done), None):
        switch.lead_to(place)
    assert done == ["+a", "-a", "+b", "-b"]


def test_the_switch_comes_back_from_the_outermost_block_only():
    done: list[str] = []
    switch = _Switch()
    switch.lead_to(Place("a", done))
    with switch.left():
        with switch.left():
            pass
        assert done == ["+a", "-a"]
    assert done == ["+a", "-a", "+a"]


def test_a_place_chosen_inside_a_block_counts_after_it():
    done: list[str] = []
    switch = _Switch()
    switch.lead_to(Place("a", done))
    with switch.left():
        switch.lead_to(Place("b", done))
        assert done == ["+a", "-a"]
    assert done == ["+a", "-a", "+b"]
    with switch.left():
        switch.lead_to(None)
    assert done == ["+a", "-a", "+b", "-b"]
