"""A real vLLM on CPU, tiny random models, and a reference that shares no code with vLLM.

`make test-vllm` runs this folder in a virtual environment of its own. Where vLLM is not installed
the tests are skipped, except where CI is set: there a missing engine is a failure.
"""

# ruff: noqa: E402
import importlib.util
import os

try:
    HAS_VLLM = importlib.util.find_spec("vllm._custom_ops") is not None
except ModuleNotFoundError:
    HAS_VLLM = False

# Before anything imports vLLM or torch. With two threads, decoding was 20 to 100 times slower.
for name, value in {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0|1",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}.items():
    if HAS_VLLM:
        os.environ.setdefault(name, value)

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

PROMPT = [5, 9, 13, 40] * 12


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    # Whoever names this folder where CI is set wants a real engine, and a missing one is a failure.
    wanted = os.environ.get("CI") and any("vllm" in Path(arg).parts for arg in config.args)
    return True if not HAS_VLLM and not wanted and collection_path.suffix == ".py" else None


@dataclass(frozen=True, slots=True)
class Models:
    """Three models of one shape: `folders[i]` is what an engine loads, `say(i)` what is right."""

    folders: tuple[str, ...]
    references: tuple[Any, ...]

    def say(self, index: int, prompt: list[int], count: int = 8) -> list[int]:
        """The greedy continuation by a plain forward pass of the trainer's weights."""
        return greedy(self.references[index], prompt, count)


def greedy(model: Any, prompt: list[int], count: int = 8) -> list[int]:
    import torch

    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[-count:]


def tiny(folder: Path, seed: int) -> Any:
    """A random two-layer model, written where an engine can load it."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        initializer_range=0.5,
    )
    model = Qwen2ForCausalLM(config).to(torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.5)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folders = [tmp_path_factory.mktemp(f"model{seed}") for seed in range(3)]
    references = tuple(tiny(folder, seed) for seed, folder in enumerate(folders))
    made = Models(tuple(map(str, folders)), references)
    answers = [made.say(index, PROMPT) for index in range(3)]
    assert answers[0] != answers[1] != answers[2] != answers[0], "the models must differ"
    return made


@pytest.fixture(scope="session")
def engine_options() -> dict[str, Any]:
    return {
        "dtype": "float32",
        "max_model_len": 128,
        "max_num_seqs": 8,
        "enforce_eager": True,
        "block_size": 32,
        "kv_cache_memory_bytes": 64 << 20,
        "disable_log_stats": True,
        "skip_tokenizer_init": True,
        "worker_cls": "tests.vllm.sleepy_worker.SleepyWorker",
        "worker_extension_cls": "tests.vllm.sleepy_worker.Extension",
    }
