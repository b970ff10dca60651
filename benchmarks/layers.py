"""How soon a model's first layer, and the whole of it, has run after a resume: layer by layer, and at once.

    python benchmarks/layers.py --device cuda:0
    python benchmarks/layers.py --device cpu              # the embedded driver: emulation
    python benchmarks/layers.py --render benchmarks/results/FILE.json

Exit status: 0; 1 when contents or answers were wrong; 2 for bad usage. See docs/benchmarks.md.
"""

from __future__ import annotations

import time
from typing import Annotated, Any

import torch
import typer

import fencepool as fp
from measuring import contents, host_pages, layered_model, link_speed
from measuring.devices import EMULATED_MEMORY, Device, is_emulated
from measuring.layouts import LAYOUTS
from reporting import result_files

TOKENS = 16
_SAME = 1e-2  # of the largest answer

# "layer by layer" waits module by module, "whole, explicit" for the whole fence, "context" orders everything.
MODES = ("layer by layer", "whole, explicit", "context")


class Stamps:
    """Points in the device's work, as seconds since the first one. On a GPU by its own clock."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._marks: dict[str, Any] = {}

    def mark(self, name: str) -> None:
        """What was submitted to the current stream so far is done by then."""
        if self._device.is_emulated:
            self._marks[name] = time.perf_counter()
            return
        self._marks[name] = torch.cuda.Event(enable_timing=True)
        self._marks[name].record()

    def since(self, start: str) -> dict[str, float]:
        """Waits for all of them."""
        self._device.synchronize()
        if self._device.is_emulated:
            return {name: at - self._marks[start] for name, at in self._marks.items()}
        return {name: self._marks[start].elapsed_time(at) / 1e3 for name, at in self._marks.items()}


class Bench:
    """The model in its pool, its hooks, and one cycle."""

    def __init__(self, device: Device, layout_name: str, layers: int, adopt_whole: bool) -> None:
        self.device = device
        layout = LAYOUTS[layout_name]
        self.pool = fp.pool("layers", device.name, backup="host")
        self.model = layered_model.make(layout, layers, device.torch_device)
        for part in [self.model] if adopt_whole else self.model:
            self.pool.adopt(part)
        if not device.is_emulated:
            torch.cuda.empty_cache()  # the memory that the weights came from
        self.hooks = fp.fence_modules(self.model, self.pool)
        hidden = layout.weights[0][1]
        self.given = torch.randn(1, TOKENS, hidden, dtype=torch.bfloat16, device=device.torch_device)
        self.stamps = Stamps(device)
        self.model[0].register_forward_hook(lambda *_: self.stamps.mark("first_layer"))

    def forward(self) -> torch.Tensor:
        with torch.inference_mode():
            return self.model(self.given)

    def weights(self) -> list[torch.Tensor]:
        return list(self.model.parameters())

    def time_forward(self) -> dict[str, float]:
        """A forward with everything in place."""
        self.device.synchronize()
        self.stamps = Stamps(self.device)
        self.stamps.mark("start")
        self.forward()
        self.stamps.mark("end")
        return {"seconds": self.stamps.since("start")["end"]}

    def cycle(self, index: int, mode: str, hold: float, is_broken: bool) -> dict[str, float]:
        """Change, pause, wait, resume and run; seconds from the call of resume.

        Raises:
            ContentsError: the weights, or what the model answers, are not what they were.
        """
        layered_model.change(self.model, index)
        answer = self.forward().clone()
        if not bool(answer.isfinite().all()):
            raise contents.ContentsError("the model's answers are out of range, and equality says nothing")
        expected = contents.checksums(self.weights())
        fp.pause("layers")
        time.sleep(hold)
        self.device.synchronize()
        self.stamps = Stamps(self.device)
        self.stamps.mark("start")
        start = time.perf_counter()
        resumed = fp.resume("layers", order="context" if mode == "context" else "explicit")
        returned = time.perf_counter() - start
        if mode == "whole, explicit":
            self._wait_for_all(resumed)
        result = self.forward()
        self.stamps.mark("whole_forward")
        seconds = self.stamps.since("start")
        resumed.fence.synchronize(timeout=60)
        if is_broken:
            contents.break_one(self.weights())
        contents.check(self.weights(), expected)
        # Half-restored weights give something else altogether; sums in another order give nearly the same.
        difference = float((result.float() - answer.float()).abs().max() / answer.float().abs().max())
        if not difference <= _SAME:
            raise contents.ContentsError(f"the model's answer changed by {difference:.3g} ({mode})")
        return {
            "index": index,
            "returned": returned,
            "first_layer": seconds["first_layer"],
            "whole_forward": seconds["whole_forward"],
            "answer_difference": difference,
        }

    def _wait_for_all(self, resumed: fp.Resumed) -> None:
        if self.device.is_emulated:
            resumed.fence.synchronize(timeout=60)
        else:
            resumed.fence.wait(torch.cuda.current_stream())


def main(
    device: result_files.DeviceOption = "cuda:0",
    layout: Annotated[str, typer.Option(help="Whose layers: 7b or tiny; by default as the device.")] = "",
    layers: Annotated[int, typer.Option(min=0, help="Number of layers; by default 32, 8 on cpu.")] = 0,
    adopt: Annotated[
        str, typer.Option(help="whole (default on a GPU) or layer: what is adopted at once.")
    ] = "",
    cycles: Annotated[int, typer.Option(min=1, help="Cycles after the first, of each mode.")] = 7,
    hold: Annotated[float, typer.Option(min=0, help="Seconds between pause and resume.")] = 0.3,
    output: result_files.OutputOption = result_files.RESULTS,
    render: result_files.RenderOption = None,
    break_contents: result_files.BreakOption = False,
) -> None:
    """Time the first layer's result and the whole forward's after a resume."""
    console, device = result_files.begin(device, render)
    if device is None:
        return
    is_small = is_emulated(device)
    layout, layers = layout or ("tiny" if is_small else "7b"), layers or (8 if is_small else 32)
    adopt = adopt or ("layer" if is_small else "whole")
    if layout not in LAYOUTS:
        raise typer.BadParameter(f"unknown layout {layout!r}; there are {', '.join(LAYOUTS)}")
    if adopt not in ("whole", "layer"):
        raise typer.BadParameter(f"--adopt is whole or layer, not {adopt!r}")
    each = layered_model.layer_bytes(LAYOUTS[layout])
    if is_small and 2 * layers * each > EMULATED_MEMORY:
        raise typer.BadParameter(f"{layers} layers of {layout} are too large for the emulation")
    facts = {"name": layout, "layers": layers, "bytes": layers * each, "first_layer_bytes": each}
    document = result_files.describe("layers", device, {**facts, "adopt": adopt}, cycles, hold)
    there = Device(device)
    document["link"] = link_speed.measure(there, layers * each, max(3, cycles))
    host_pages.touch(layers * each * 5 // 4)
    bench = Bench(there, layout, layers, adopt == "whole")
    bench.pool.prepare()
    for _ in range(2):
        bench.forward()  # kernels are loaded and chosen
    document["forward"] = [bench.time_forward() for _ in range(cycles + 1)]
    document["modes"] = {mode: [] for mode in MODES}
    path = output / result_files.file_name(document)
    with result_files.kept_if_right(document, path, console):
        for index in range(cycles + 1):
            for mode in MODES:  # in turn, so that what drifts is the same for all
                number = index * len(MODES) + MODES.index(mode)
                with console.status(f"{mode}, cycle {index} of {cycles}"):
                    sample = bench.cycle(number, mode, hold, break_contents)
                document["modes"][mode].append(sample)
            result_files.write(document, path)


if __name__ == "__main__":
    typer.run(main)
