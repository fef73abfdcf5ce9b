"""A LoRA adapter beside a resident base: a name a version, level 1 sleep, the right answers."""

import asyncio
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from phasesync.engines.vllm import Lora, VllmEngine

from .conftest import PROMPT, Models, greedy
from .cycle import Fences, colocated_epoch
from .test_llm import asked, tokens


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 100))


@pytest.fixture(scope="module")
def llm(models: Models, engine_options: dict[str, Any]) -> Iterator[Any]:
    from vllm import LLM

    engine = LLM(
        model=models.folders[0], enable_lora=True, max_loras=2, max_lora_rank=8, **engine_options
    )
    yield engine
    engine.llm_engine.engine_core.shutdown()


def adapter(folder: Path, model: Any, seed: int) -> Any:
    """An adapter on every attention and MLP projection, and the model that it makes of `model`."""
    import copy
    import json

    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    merged, tensors = copy.deepcopy(model), {}
    targets = ("q_proj", "v_proj", "o_proj", "down_proj")
    with torch.no_grad():
        for name, layer in merged.named_modules():
            if name.endswith(targets):
                a = torch.randn(4, layer.in_features, generator=generator) * 0.2
                b = torch.randn(layer.out_features, 4, generator=generator) * 0.2
                tensors[f"base_model.model.{name}.lora_A.weight"] = a
                tensors[f"base_model.model.{name}.lora_B.weight"] = b
                layer.weight += 2.0 * (b @ a)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": list(targets),
        "bias": "none", "task_type": "CAUSAL_LM", "base_model_name_or_path": "base",
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return merged


def test_epochs_with_an_adapter_serve_exactly_base_plus_adapter(
    llm: Any, models: Models, tmp_path: Path
) -> None:
    fences = Fences()
    engine = VllmEngine(llm, tickets=fences.rules(), transfer=Lora(name="policy"), level=1)
    folders = [tmp_path / "one", tmp_path / "two"]
    merged = [adapter(folder, models.references[0], seed) for seed, folder in enumerate(folders)]
    right = [greedy(model, PROMPT) for model in merged]
    assert right[0] != right[1] != models.say(0, PROMPT)

    async def story() -> list[list[int]]:
        said = []
        for epoch in range(2):
            await colocated_epoch(engine, fences, epoch, [str(folders[epoch])])
            request = engine.lora_request
            said.append(tokens(await engine.generate(**asked(lora_request=request))))
            assert request.lora_name == f"policy@{epoch + 1}"
        assert await engine.driver._call("list_loras") == {2}  # type: ignore[attr-defined]
        said.append(tokens(await engine.generate(**asked())))
        await engine.close()
        # A leader that takes over makes a port of its own; adapter 2 is still loaded.
        heir = VllmEngine(llm, tickets=fences.rules(), transfer=Lora(name="policy"), level=1)
        for epoch in (2, 3):
            await colocated_epoch(heir, fences, epoch, [str(folders[epoch % 2])])
            asking = asked(lora_request=heir.lora_request)
            said.append(tokens(await heir.generate(**asking)))
        await heir.close()
        return said

    assert run(story()) == [*right, models.say(0, PROMPT), *right]
