"""Layer by layer: each module waits for the part of a restore that brings its own weights back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fencepool import _core
from fencepool._tensors import span_of
from fencepool.pools import Pool
from fencepool.reports import Resumed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fencepool.fences import Fence

# Modules of PyTorch whose forward reads the parameters of modules inside without calling them.
READ_INSIDE: tuple[type[torch.nn.Module], ...] = (
    torch.nn.MultiheadAttention,
    torch.nn.TransformerEncoderLayer,
    torch.nn.TransformerDecoderLayer,
)


class ModuleFences:
    """The hooks of :func:`fence_modules`."""

    def __init__(self, pools: tuple[Pool, ...], as_one: tuple[type[torch.nn.Module], ...]) -> None:
        self._pools = pools
        self._as_one = as_one
        self._handles: list[Any] = []

    def remove(self) -> None:
        """Wait no longer. Harmless when done before."""
        while self._handles:
            self._handles.pop().remove()

    def _hook(self, module: torch.nn.Module) -> None:
        self._handles.append(module.register_forward_pre_hook(self._before_forward))

    def _before_forward(self, module: torch.nn.Module, _arguments: Any) -> None:
        for pool in self._pools:
            restoring = pool._restoring
            if restoring is not None and not restoring._has_ended:
                self._wait(module, pool, restoring)

    def _wait(self, module: torch.nn.Module, pool: Pool, restoring: Fence) -> None:
        if restoring.done():
            return
        part = restoring._part([run for tensor in tensors_of(module, self._as_one) for run in _runs(tensor)])
        if part.done():
            return
        if pool._core.provider == "host":
            part.synchronize()  # the CPU itself runs the module
        else:
            part.wait(torch.cuda.current_stream(pool._core.ordinal))


def fence_modules(
    model: torch.nn.Module,
    *where: Pool | Resumed,
    as_one: tuple[type[torch.nn.Module], ...] = READ_INSIDE,
) -> ModuleFences:
    """Have each module of a model wait, when it is called, for its own parameters and buffers, and no others.

    After ``fp.resume(tag, order="explicit")`` the first layer then runs while the last one is on the link.
    The waiting is a forward pre-hook on every module that has tensors of its own. It looks up the last resume
    of the pools, so it serves every later cycle too. It puts an event before the current stream's later work
    (cuStreamWaitEvent); the host is not held, except on the embedded driver, where the CPU itself runs the
    module. While no restore is under way a hook costs a look at one attribute of each pool, and calls no
    driver. After ``order="context"`` a GPU needs no waiting, and hooks do none.

    A hook runs when a module is called, ``module(...)``. Where its forward reads a parameter of another
    module without calling that one, it does not wait for it, with two exceptions: modules inside that have no
    forward (``ParameterList``) count as their owner's, and so does all that is inside a module of one of the
    types ``as_one``. Whoever uses weights outside of a forward waits by ``Resumed.fence_for``.

    While the current stream is being captured into a CUDA graph, a hook does nothing once the module's part
    has ended, and else raises :class:`CaptureError`, which leaves the capture as it was: wait for the fence
    before capturing. Replays of graphs run no hooks: wait before them too. Tracing compilers
    (``torch.compile``) may break a graph at hooks while a restore is under way.

    Args:
        model: its modules as they are now; those that are added later have no hook.
        where: pools, or what a resume returned, for the pools it concerned.
        as_one: types of modules that wait for everything inside of them.

    Returns:
        A handle; ``remove()`` takes the hooks away. Thread-safe as far as changing a module's hooks is.

    Raises:
        TypeError: it is no module, or neither pools nor what a resume returned.
        ValueError: no pool was given, or none of the model's tensors lies in one of them.
    """
    _core.require_owner()
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"fence_modules() takes a torch.nn.Module, not {type(model).__name__}")
    pools = _pools_of(where)
    own = [(module, list(tensors_of(module, as_one))) for module in model.modules()]
    if not any(_core_contains(pools, tensor) for _, tensors in own for tensor in tensors):
        names = ", ".join(repr(pool.tag) for pool in pools) or "none"
        raise ValueError(f"no tensor of the {type(model).__name__} lies in one of the given pools: {names}")
    fences = ModuleFences(pools, as_one)
    try:
        for module, tensors in own:
            if tensors:
                fences._hook(module)
    except BaseException:
        fences.remove()
        raise
    return fences


def tensors_of(module: torch.nn.Module, as_one: tuple[type[torch.nn.Module], ...]) -> Iterator[torch.Tensor]:
    """What a module's own forward is taken to read."""
    yield from (parameter for parameter in module._parameters.values() if parameter is not None)
    yield from (buffer for buffer in module._buffers.values() if buffer is not None)
    for child in module.children():
        if isinstance(module, as_one):
            yield from child.parameters()
            yield from child.buffers()
        elif type(child).forward is torch.nn.Module.forward:  # a container, which nobody calls
            yield from tensors_of(child, as_one)


def _runs(tensor: Any) -> Iterator[tuple[int, int]]:
    """Where its bytes are, as (address, size); those of the tensors that a wrapper is made of."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from _runs(getattr(tensor, name))
        return
    is_one = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta
    if is_one and not torch.nn.parameter.is_lazy(tensor):
        yield span_of(tensor)


def _core_contains(pools: tuple[Pool, ...], tensor: torch.Tensor) -> bool:
    return any(size > 0 and pool._core.contains(at) for at, size in _runs(tensor) for pool in pools)


def _pools_of(where: tuple[Any, ...]) -> tuple[Pool, ...]:
    pools: dict[Pool, None] = {}
    for one in where:
        if isinstance(one, Resumed):
            pools.update(dict.fromkeys(one._pools))
        elif isinstance(one, Pool):
            pools[one] = None
        else:
            raise TypeError(
                f"fence_modules() takes pools or what a resume returned, not {type(one).__name__}"
            )
    return tuple(pools)
