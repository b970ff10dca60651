"""Asking PyTorch about its segments, where its answer drops references to what it is asked with."""

from __future__ import annotations

import ctypes
import sys

import pytest
import torch

from fencepool import _torch_snapshot

# Fresh numbers, as a MemPool's id has from the 257th on.
ID = (0, 10**9)


def drop(number: object) -> None:
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(number))


def dropping(mempool_id=None, include_traces=True):
    """As PyTorch 2.11 and 2.13."""
    for one in (*(mempool_id or (0, 0)), include_traces):
        drop(one)
    return [{"id": mempool_id}]


def dropping_pairs(mempool_id=None):
    """As PyTorch 2.8 to 2.10."""
    for one in mempool_id or ():
        drop(one)
    return [{"id": mempool_id}]


def keeping(mempool_id=None, include_traces=True):
    """As it will be."""
    return [{"id": mempool_id}]


@pytest.mark.parametrize("ask", [dropping, dropping_pairs, keeping])
@pytest.mark.parametrize("mem_pool_id", [None, ID], ids=["all", "one"])
def test_a_memory_pools_id_is_not_freed_by_asking_about_the_pool(monkeypatch, ask, mem_pool_id):
    monkeypatch.setattr(torch.cuda, "memory_snapshot", ask)
    number = int(str(ID[1]))
    wanted = None if mem_pool_id is None else (0, number)
    before = sys.getrefcount(number)
    for _ in range(10):
        assert _torch_snapshot.segments(wanted) == [{"id": wanted}]
    assert sys.getrefcount(number) == before


def test_an_interrupted_first_question_costs_no_number(monkeypatch):
    asked = []

    def interrupted(mempool_id=None, include_traces=True):
        asked.append(mempool_id)
        dropping(mempool_id, include_traces)
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.cuda, "memory_snapshot", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _torch_snapshot.segments(ID)
    (unknown,) = asked
    asked.clear()
    # The tuple's and that of the call below, and what is lost is what was added.
    assert [sys.getrefcount(unknown[at]) for at in range(2)] == [2, 2]


def test_before_memory_pools_had_ids_nothing_is_asked_with(monkeypatch):
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [1, 2])
    assert _torch_snapshot.segments() == [1, 2]


@pytest.mark.gpu
def test_ids_of_memory_pools_outlive_many_questions():
    torch.cuda.init()
    made = [torch.cuda.MemPool() for _ in range(300)]
    for mem_pool in made:
        mem_pool_id = mem_pool.id
        number = mem_pool_id[1]
        before = sys.getrefcount(number)
        for _ in range(3):
            assert _torch_snapshot.segments(mem_pool_id) == []
        assert sys.getrefcount(number) == before
