"""A real SGLang engine on the CPU, with a real scheduler process and a small random Llama."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

PROMPT = [5, 6, 7, 8]
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.02,
    "torch_dtype": "float32",
    "use_cache": True,
}


def write_model(folder: Path, **changes: Any) -> Path:
    """A model's folder without weights: SGLang makes random ones, from the engine's seed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**_CONFIG, **changes}))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    return folder


def start(folder: Path, model: dict[str, Any] | None = None, **arguments: Any) -> Any:
    """An engine with the memory saver on. ``model`` changes the model's configuration."""
    import sglang

    settings: dict[str, Any] = {
        "model_path": str(write_model(folder, **(model or {}))),
        "device": "cpu",
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_cuda_graph": True,
        "disable_custom_all_reduce": True,
        "max_total_tokens": 4096,
        "max_running_requests": 8,
        "context_length": 512,
        "skip_server_warmup": True,
        "random_seed": 1,
        "log_level": "info",
        "enable_memory_saver": True,
    }
    return sglang.Engine(**{**settings, **arguments})


def tokens(engine: Any, prompt: list[int] = PROMPT, count: int = 8) -> list[int]:
    """What greedy decoding gives for a prompt."""
    sampling = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
    return list(engine.generate(input_ids=prompt, sampling_params=sampling)["output_ids"])


def wake(engine: Any) -> None:
    """Undo what the probe did, and resume every tag."""
    engine.collective_rpc("probe_limit", size=0)
    engine.collective_rpc("probe_slow_restore", bandwidth=0, is_fenced=True)
    engine.collective_rpc("probe_refuse_to_pause", rank=None)
    engine.resume_memory_occupation()


def look(engine: Any, folder: Path) -> list[dict[str, Any]]:
    """What pools and processes of an engine say now, one entry for each rank."""
    for old in folder.glob("*.json"):
        old.unlink()
    engine.collective_rpc("probe_report", folder=str(folder))
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def states(report: dict[str, Any]) -> dict[str, set[str]]:
    """The states of the pools of each tag."""
    found: dict[str, set[str]] = {}
    for pool in report["pools"]:
        found.setdefault(pool["tag"], set()).add(pool["state"])
    return found


def weights(seed: int) -> list[tuple[str, Any]]:
    """All of the model's weights, as a trainer would send them."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    hidden, inner, head = _CONFIG["hidden_size"], _CONFIG["intermediate_size"], _CONFIG["head_dim"]
    queries, keys = _CONFIG["num_attention_heads"] * head, _CONFIG["num_key_value_heads"] * head
    shapes = {"model.embed_tokens.weight": (_CONFIG["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    shapes["lm_head.weight"] = (_CONFIG["vocab_size"], hidden)
    for layer in range(_CONFIG["num_hidden_layers"]):
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
        (name, torch.ones(shape) if len(shape) == 1 else 0.05 * torch.randn(shape, generator=generator))
        for name, shape in shapes.items()
    ]


def settle(engine: Any) -> None:
    """Wait until the scheduler has finished with the last request.

    An update right after a request's last token can find it busy with the results, and SGLang before 0.5.23
    then fails an assertion of its own.
    """
    for _ in range(1000):
        if getattr(engine.flush_cache(), "success", True):
            return
        time.sleep(0.01)
    raise TimeoutError("the scheduler is still busy")


def update(engine: Any, named: list[tuple[str, Any]]) -> tuple[bool, str]:
    """Send weights as tensors; within a session, where the release wants one."""
    settle(engine)
    has_session = hasattr(engine, "begin_weight_update")
    if has_session:
        is_open, message = engine.begin_weight_update()
        if not is_open:
            return is_open, message
    result = engine.update_weights_from_tensor(named)
    if has_session:
        engine.end_weight_update()
    return tuple(result)


def reload(engine: Any) -> tuple[bool, str]:
    """Have the weights read from the engine's folder again."""
    settle(engine)
    is_done, message, *_ = engine.update_weights_from_disk(engine.server_args.model_path)
    return is_done, message
