"""CUDA graphs whose memory is paused and resumed."""

from __future__ import annotations

import gc

import pytest
import torch

import fencepool as fp
from support.machine import MIB, warm_up_gpu
from support.waiting import eventually

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def warm():
    warm_up_gpu("cuda:0")


def captured(tag, size=2 * MIB, **options):
    """A graph that keeps its result in its own memory, its input and its output."""
    graph = torch.cuda.CUDAGraph()
    inputs = torch.ones(size, device="cuda:0")
    (inputs * 2).sin_()  # warm
    torch.cuda.synchronize()
    with fp.cuda_graph(graph, tag=tag, **options) as pool:
        middle = inputs * 2
        output = middle + 1
        del middle
    return graph, inputs, output, pool


def test_a_graph_replays_after_twenty_cycles(new_tag):
    tag = new_tag("graph")
    graph, inputs, output, pool = captured(tag)
    assert pool.contains(output)
    assert not pool.contains(inputs)
    for cycle in range(20):
        inputs.fill_(cycle)
        graph.replay()
        assert bool((output == 2 * cycle + 1).all())
        free = fp.memory_info("cuda:0")[0]
        report = fp.pause(tag)
        assert report.bytes_released > 0
        assert fp.memory_info("cuda:0")[0] > free
        fp.resume(tag)
        assert bool((output == 2 * cycle + 1).all())


def test_what_a_capture_left_is_there_for_replays_with_a_backup(new_tag):
    tag = new_tag("graph")
    graph = torch.cuda.CUDAGraph()
    state = None
    with fp.cuda_graph(graph, tag=tag, backup="host") as pool:
        state = torch.zeros(MIB, device="cuda:0")
    graph.replay()
    accumulate = torch.cuda.CUDAGraph()
    with fp.cuda_graph(accumulate, pool=graph.pool(), tag=tag, backup="host") as same:
        state.add_(1)
    assert same is pool
    accumulate.replay()
    fp.pause(tag)
    fp.resume(tag)
    accumulate.replay()
    assert bool((state == 2).all())


def test_graphs_that_share_a_handle_share_memory(new_tag):
    tag = new_tag("graph")
    handle = torch.cuda.graph_pool_handle()
    mapped, graphs, outputs = [], [], []
    inputs = torch.ones(8 * MIB, device="cuda:0")
    for _ in range(6):
        graph = torch.cuda.CUDAGraph()
        with fp.cuda_graph(graph, pool=handle, tag=tag) as pool:
            first = inputs * 2
            second = first + 1
            output = second.sum()
            del first, second
        graphs.append(graph)
        outputs.append(output)
        mapped.append(pool.status().bytes_mapped)
    assert mapped[-1] <= mapped[0] + 2 * MIB * len(graphs)
    assert len({graph.pool() for graph in graphs}) == 1
    fp.pause(tag)
    fp.resume(tag)
    for graph, output in zip(graphs, outputs, strict=True):
        graph.replay()
        assert float(output) == 3.0 * inputs.numel()


def test_a_handle_belongs_to_one_pool(new_tag):
    graph, _, output, pool = captured(new_tag("graph"))
    with (
        pytest.raises(ValueError, match="belong to one pool"),
        fp.cuda_graph(torch.cuda.CUDAGraph(), pool=graph.pool(), tag=new_tag("other")),
    ):
        pass
    assert pool.contains(output)


def test_a_region_around_a_capture_does_not_count_inside(new_tag):
    tag, outer = new_tag("graph"), fp.pool(new_tag(), "cuda:0")
    with outer.region():
        graph, inputs, output, pool = captured(tag)
        after = torch.ones(3, device="cuda:0")
    assert outer.contains(inputs)
    assert pool.contains(output)
    assert outer.contains(after)
    graph.replay()


def test_no_pause_during_a_capture_and_no_capture_while_paused(new_tag):
    tag = new_tag("graph")
    inputs = torch.ones(MIB, device="cuda:0")
    graph = torch.cuda.CUDAGraph()
    with fp.cuda_graph(graph, tag=tag):
        output = inputs + 1
        with pytest.raises(fp.PoolBusyError):
            fp.pause(tag)
    graph.replay()
    assert bool((output == 2).all())
    fp.pause(tag)
    with pytest.raises(fp.PoolPausedError), fp.cuda_graph(torch.cuda.CUDAGraph(), tag=tag):
        pass
    fp.resume(tag)
    graph.replay()


def test_freeing_pool_memory_inside_a_capture_does_not_break_it(new_tag):
    region_pool = fp.pool(new_tag(), "cuda:0")
    with region_pool.region():
        doomed = [torch.ones(24 * MIB, dtype=torch.uint8, device="cuda:0") for _ in range(3)]
    plain = region_pool.empty((24 * MIB,), dtype=torch.uint8)
    inputs = torch.ones(MIB, device="cuda:0")
    graph = torch.cuda.CUDAGraph()
    with fp.cuda_graph(graph, tag=new_tag("graph")):
        doomed.clear()
        del plain
        output = inputs * 3
        with region_pool.region():
            inside = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda:0")
        del inside
    graph.replay()
    assert bool((output == 3).all())


def test_the_memory_of_graphs_that_are_gone_goes_back(new_tag):
    tag = new_tag("graph")
    pool = captured(tag, size=16 * MIB)[3]
    gc.collect()
    fp.pause(tag)
    fp.resume(tag)
    eventually(lambda: pool.status().segments == 0, "the graph's memory is given back")


def test_a_graph_is_captured_on_a_gpu_only(new_tag):
    with (
        pytest.raises(ValueError, match="CUDA device"),
        fp.cuda_graph(torch.cuda.CUDAGraph(), tag=new_tag(), device="cpu"),
    ):
        pass
