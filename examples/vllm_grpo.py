"""A colocated GRPO-like loop on a CPU: a tiny trainer and a real vLLM, one weight sync a step."""

import asyncio
import os
import tempfile

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from phasesync.engines.actions import engine_actions
from phasesync.engines.base import KV_CACHE, WEIGHTS
from phasesync.engines.tickets import TicketRules
from phasesync.engines.vllm import Rpc, VllmEngine
from phasesync.runtime import RankRunner, Turn
from phasesync.trainer import ModuleOffloader, TorchDevice
from vllm import LLM, SamplingParams

PROMPT, FOLDER = [5, 9, 13, 40], tempfile.mkdtemp()
answers: list[list[int]] = []
shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
model = Qwen2ForCausalLM(Qwen2Config(**shape, num_attention_heads=2, num_key_value_heads=2))
model.save_pretrained(FOLDER)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
offloader = ModuleOffloader(model, TorchDevice("cpu"))
llm = LLM(FOLDER, dtype="float32", enforce_eager=True, max_model_len=64, disable_log_stats=True,
          kv_cache_memory_bytes=32 << 20, skip_tokenizer_init=True)  # fmt: skip
engine = VllmEngine(llm, tickets=TicketRules(run="grpo", scope="replica/0"), transfer=Rpc())


def train() -> None:
    if answers:  # Even tokens are good; an answer counts by how far it beats its group.
        rewards = torch.tensor([sum(t % 2 == 0 for t in answer) / 16 for answer in answers])
        tokens = torch.tensor([PROMPT + answer for answer in answers])
        chosen = model(tokens).logits[:, 3:-1].log_softmax(-1).gather(-1, tokens[:, 4:, None])
        (-(rewards - rewards.mean()) * chosen.sum((1, 2))).mean().backward()
        optimizer.step()


async def serve(turn: Turn) -> None:
    params = SamplingParams(n=8, max_tokens=16, ignore_eos=True, detokenize=False)
    told = await engine.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    answers[:] = [list(output.token_ids) for output in told[0].outputs]


async def main() -> None:
    await engine.pause()
    await engine.release((WEIGHTS, KV_CACHE))
    own = {"load_back": offloader.onload, "train": train, "trim_cache": offloader.device.release,
           "stage": lambda: model.save_pretrained(FOLDER), "offload": offloader.offload,
           "empty_cache": offloader.device.release, "reset": offloader.offload}  # fmt: skip
    ready = engine_actions(engine, buckets=lambda _: [{"weights_path": FOLDER}], serve=serve)
    async with RankRunner("colocated", rank=0, ranks=1, options={"replica_size": 1}, run="grpo",
                          actions=ready | own) as runner:  # fmt: skip
        for _ in range(3):
            print(f"version {(await runner.run_epoch()).version} answers {answers[0]}")


asyncio.run(main())
