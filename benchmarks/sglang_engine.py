"""Release and resume of a real SGLang engine on a GPU, fencepool beside torch_memory_saver.

Every scenario starts an engine of its own in a process of its own: a random Llama of 2.1 GiB (or 28 MiB),
Triton attention, CUDA graphs, SGLang's memory saver. SGLang has to be installed; the plug-in is found by
its entry point. With ``--saver-path`` a torch_memory_saver elsewhere is used for the peer only, so that
fencepool's engines show that they need none.

    python benchmarks/sglang_engine.py --cycles 20 --saver-path /path/with/torch_memory_saver
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from reporting import panels, pictures

TITLE = "A real SGLang engine: release and resume"
SCENARIOS = {
    # name: (memory saver, settings of the engine and the tags that take turns)
    "fencepool/backup": {"saver": "fencepool", "backup": True, "tags": ["kv_cache", "weights"]},
    "fencepool/graphs": {"saver": "fencepool", "backup": True, "tags": ["kv_cache", "weights", "cuda_graph"]},
    "fencepool/update": {"saver": "fencepool", "backup": False, "tags": ["kv_cache", "weights"]},
    "fencepool/misuse": {
        "saver": "fencepool",
        "backup": True,
        "tags": ["kv_cache", "weights"],
        "small": True,
    },
    "torch_memory_saver/backup": {
        "saver": "torch_memory_saver",
        "backup": True,
        "tags": ["kv_cache", "weights"],
    },
}
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
MIB = 1 << 20


def model_config(is_small: bool) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 2048 if is_small else 32000,
        "hidden_size": 512 if is_small else 2048,
        "intermediate_size": 1024 if is_small else 8192,
        "num_hidden_layers": 4 if is_small else 16,
        "num_attention_heads": 8 if is_small else 32,
        "num_key_value_heads": 4 if is_small else 8,
        "head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def weights_of(config: dict[str, Any], seed: int) -> list[tuple[str, Any]]:
    """Every weight under its checkpoint's name, as a trainer would send it."""
    import torch

    torch.manual_seed(seed)
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config["vocab_size"], hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.self_attn.q_proj.weight": (queries, hidden),
            f"{at}.self_attn.k_proj.weight": (keys, hidden),
            f"{at}.self_attn.v_proj.weight": (keys, hidden),
            f"{at}.self_attn.o_proj.weight": (hidden, queries),
            f"{at}.mlp.gate_proj.weight": (inner, hidden),
            f"{at}.mlp.up_proj.weight": (inner, hidden),
            f"{at}.mlp.down_proj.weight": (hidden, inner),
            f"{at}.input_layernorm.weight": (hidden,),
            f"{at}.post_attention_layernorm.weight": (hidden,),
        }
    return [
        (
            name,
            (torch.ones(shape) if len(shape) == 1 else 0.05 * torch.randn(shape, device="cuda")).to(
                "cuda", torch.bfloat16
            ),
        )
        for name, shape in shapes.items()
    ]


def start_engine(folder: Path, scenario: dict[str, Any]) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model_config(scenario.get("small", False))))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    import dataclasses

    import sglang
    from sglang.srt.server_args import ServerArgs

    wanted = {
        "model_path": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "enable_memory_saver": True,
        "enable_weights_cpu_backup": scenario["backup"],
        "disable_custom_all_reduce": True,
        "context_length": 2048,
        "max_total_tokens": 200_000,
        "max_running_requests": 8,
        "chunked_prefill_size": 2048,
        "mem_fraction_static": 0.5,
        "random_seed": 7,
        "skip_server_warmup": True,
        "log_level": "warning",
        "cuda_graph_max_bs_decode": 2,
        "disable_prefill_cuda_graph": True,
        "disable_piecewise_cuda_graph": True,
        "disable_flashinfer_autotune": True,
    }
    known = set(
        getattr(ServerArgs, "__struct_fields__", None) or (f.name for f in dataclasses.fields(ServerArgs))
    )
    return sglang.Engine(**{name: value for name, value in wanted.items() if name in known})


class Run:
    """One engine and what was measured on it."""

    def __init__(self, name: str, cycles: int) -> None:
        self.scenario = SCENARIOS[name]
        self.cycles = cycles
        self.result: dict[str, Any] = {"scenario": name, "samples": [], "events": []}

    def tokens(self) -> list[int]:
        sampling = {"max_new_tokens": 16, "temperature": 0.0, "ignore_eos": True}
        return list(self.engine.generate(input_ids=PROMPT, sampling_params=sampling)["output_ids"])

    def run(self, folder: Path) -> dict[str, Any]:
        began = time.perf_counter()
        self.engine = start_engine(folder, self.scenario)
        self.result["seconds_up"] = time.perf_counter() - began
        self.tokens()
        if not self.scenario["backup"]:
            self.update()
        expected = self.tokens()
        time.sleep(0.5)
        if "misuse" in self.result["scenario"]:
            self.misuse(expected)
        else:
            for cycle in range(self.cycles):
                self.cycle(cycle, expected)
            self.empty_release()
        self.engine.shutdown()
        return self.result

    def update(self) -> None:
        named = weights_of(model_config(self.scenario.get("small", False)), seed=3)
        is_done, message = self.engine.update_weights_from_tensor(named)
        if not is_done:
            raise RuntimeError(f"the weights could not be sent: {message}")

    def cycle(self, number: int, expected: list[int]) -> None:
        sample: dict[str, Any] = {"used_before": used_bytes()}
        release = [tag for tag in ("kv_cache", "weights", "cuda_graph") if tag in self.scenario["tags"]]
        sample["release_ms"] = milliseconds(lambda: self.engine.release_memory_occupation(tags=release))
        sample["used_released"] = used_bytes()
        stages = [[tag for tag in release if tag != "kv_cache"], ["kv_cache"]]
        if number % 2:  # both tags at once in every other cycle
            stages = [release]
        sample["stages"] = len(stages)
        sample["resume_ms"] = 0.0
        for stage in stages:
            sample["resume_ms"] += milliseconds(
                lambda tags=stage: self.engine.resume_memory_occupation(tags=tags)
            )
            if "weights" in stage and not self.scenario["backup"]:
                self.update()
        sample["used_resumed"] = used_bytes()
        sample["is_same"] = self.tokens() == expected
        self.result["samples"].append(sample)
        time.sleep(0.3)

    def empty_release(self) -> None:
        """SGLang's own time for a release and a resume that have nothing to do."""
        if self.scenario["saver"] != "fencepool":
            return  # the peer ends the process when something is released twice
        tags = self.scenario["tags"]
        self.engine.release_memory_occupation(tags=tags)
        self.result["empty_release_ms"] = [
            milliseconds(lambda: self.engine.release_memory_occupation(tags=tags)) for _ in range(5)
        ]
        self.engine.resume_memory_occupation(tags=tags)
        self.result["empty_resume_ms"] = [
            milliseconds(lambda: self.engine.resume_memory_occupation(tags=tags)) for _ in range(5)
        ]

    def misuse(self, expected: list[int]) -> None:
        engine = self.engine

        def attempt(what: str, call: Any) -> None:
            try:
                answer = call()
                said = "" if answer is None else str(answer)
            except Exception as error:  # whatever it is, the engine has to live
                said = f"{type(error).__name__}: {error}"
            engine.resume_memory_occupation()
            is_alive = self.tokens() == expected
            self.result["events"].append({"what": what, "said": said[:300], "is_alive": is_alive})
            time.sleep(0.3)

        def while_released(tags: list[str], call: Any) -> Any:
            engine.release_memory_occupation(tags=tags)
            return call()

        named = weights_of(model_config(is_small=True), seed=3)[:1]
        attempt(
            "update_weights_from_tensor while the weights are released",
            lambda: while_released(["kv_cache", "weights"], lambda: engine.update_weights_from_tensor(named)),
        )

        def half_awake() -> Any:
            engine.release_memory_occupation(tags=["kv_cache", "weights"])
            engine.resume_memory_occupation(tags=["weights"])
            return self.tokens()

        attempt("a request while the KV cache is still released", half_awake)

        def twice() -> None:
            engine.release_memory_occupation(tags=["kv_cache"])
            engine.release_memory_occupation(tags=["kv_cache"])

        attempt("release of the KV cache twice", twice)

        def overlapping() -> None:
            engine.release_memory_occupation(tags=["kv_cache", "weights"])
            engine.resume_memory_occupation(tags=["weights"])
            engine.resume_memory_occupation(tags=["kv_cache", "weights"])

        attempt("resume of the weights, then of both", overlapping)
        attempt("release of an unknown tag", lambda: engine.release_memory_occupation(tags=["nothing"]))


def milliseconds(call: Any) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e3


def used_bytes() -> int:
    import torch

    free, total = torch.cuda.mem_get_info()
    return total - free


def child(name: str, cycles: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        result = Run(name, cycles).run(Path(folder) / "model")
    import sglang
    import torch

    result["versions"] = {"sglang": sglang.__version__, "torch": torch.__version__}
    result["gpu"] = torch.cuda.get_device_name()
    print("RESULT " + json.dumps(result), flush=True)


def run_scenario(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    environment = dict(os.environ)
    if "cuda_graph" in SCENARIOS[name]["tags"]:
        environment["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = "1"
    if SCENARIOS[name]["saver"] == "torch_memory_saver":
        environment["SGLANG_PLUGINS"] = "none-of-them"
        if arguments.saver_path:
            environment["PYTHONPATH"] = f"{arguments.saver_path}:{environment.get('PYTHONPATH', '')}"
    command = [sys.executable, __file__, "--child", name, "--cycles", str(arguments.cycles)]
    try:
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=arguments.limit,
            check=False,
        )
        output = done.stdout + done.stderr
    except subprocess.TimeoutExpired as error:
        output = f"{error.stdout or b''!r}\n{error.stderr or b''!r}\nstopped after {arguments.limit} s"
    for line in output.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    return {"scenario": name, "failure": output[-4000:]}


def median(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})" if values else ""


def row_of(result: dict[str, Any]) -> str:
    samples = result["samples"]
    freed = [(sample["used_before"] - sample["used_released"]) / MIB for sample in samples]
    # From the second cycle on: the first one makes the backup.
    growth = (samples[-1]["used_resumed"] - samples[min(1, len(samples) - 1)]["used_resumed"]) / MIB
    cells = [
        result["scenario"],
        f"{samples[0]['release_ms']:.0f}",
        median([sample["release_ms"] for sample in samples[1:]]),
        median([sample["resume_ms"] for sample in samples[1:]]),
        median(result.get("empty_release_ms", [])),
        f"{sum(sample['is_same'] for sample in samples)} of {len(samples)}",
        f"{statistics.median(freed):.0f}",
        f"{growth:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def report(results: list[dict[str, Any]]) -> str:
    done = [result for result in results if "failure" not in result]
    lines = [f"# {TITLE}", ""]
    if done:
        versions = ", ".join(f"{name} {version}" for name, version in done[0]["versions"].items())
        lines += [f"- {datetime.now(timezone.utc):%Y-%m-%d}, {done[0]['gpu']}, {versions}"]
    lines += [
        "- every other cycle is resumed in stages; milliseconds, medians after the first cycle",
        "- fencepool answers a resume while its copies still run; later work on the device waits for them",
        "",
        "| scenario | first release | later releases | resume | empty release | same tokens | MiB released "
        "| growth, MiB |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [row_of(result) for result in done if result["samples"]]
    for result in done:
        if result["events"]:
            lines += ["", "| misuse | what the engine said | alive, same tokens |", "| --- | --- | --- |"]
        for event in result["events"]:
            said = event["said"].replace("|", "/").replace("\n", " ")
            lines.append(f"| {event['what']} | {said} | {'yes' if event['is_alive'] else 'NO'} |")
    for result in results:
        if "failure" in result:
            lines += ["", f"{result['scenario']} failed:", "", "```", result["failure"][-1500:], "```"]
    return "\n".join(lines) + "\n"


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """The picture, where there is something to draw and matplotlib to draw it."""
    shown = [panel for panel in panels.sglang_engine(results) if panel.rows]
    if shown and pictures.is_possible():
        pictures.draw(shown, TITLE, path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scenarios", default=",".join(SCENARIOS), help="which, comma-separated")
    parser.add_argument("--cycles", type=int, default=20)
    parser.add_argument(
        "--saver-path", default="", help="where torch_memory_saver is, for the peer's engine only"
    )
    parser.add_argument("--limit", type=float, default=300, help="seconds an engine may take")
    parser.add_argument("--output", default=str(Path(__file__).parent / "results"))
    parser.add_argument(
        "--render", nargs="+", default=[], help="print the tables of these JSON files again, and draw them"
    )
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child, arguments.cycles)
        return 0
    if arguments.render:
        results = [result for name in arguments.render for result in json.loads(Path(name).read_text())]
        print(report(results))
        draw(results, Path(arguments.render[0]).with_suffix(".png"))
        return 0
    names = arguments.scenarios.split(",")
    unknown = [name for name in names if name not in SCENARIOS]
    if unknown:
        parser.error(f"unknown scenarios {unknown}; there are {list(SCENARIOS)}")
    results = []
    output = Path(arguments.output)
    output.mkdir(parents=True, exist_ok=True)
    stem = output / f"sglang_engine-{datetime.now(timezone.utc):%Y-%m-%dT%H%M%S}"
    for name in names:
        results.append(run_scenario(name, arguments))
        stem.with_suffix(".json").write_text(json.dumps(results, indent=1))
        stem.with_suffix(".md").write_text(report(results))
    draw(results, stem.with_suffix(".png"))
    print(stem.with_suffix(".md").read_text())
    return int(any("failure" in result for result in results))


if __name__ == "__main__":
    sys.exit(main())
