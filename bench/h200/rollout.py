"""Generation over HTTP with log-probs ÷ the same work of offline vLLM, the Qwen3-4B shape, on one GPU.

    python -m bench.h200.rollout            # one H200: 5 to 8 minutes, of which most are starts of engines
    python -m bench.h200.rollout --tiny     # any machine: a model of three layers, to see that it runs

One wave of N requests at once, each of 256 prompt tokens and 512 sampled ones, temperature 1, a seed each, the log-prob
of every sampled token. Offline: ``vllm.LLM.generate``. Over HTTP: an engine and a router as a run of vime starts them,
and vime's client, from the call to lists of numbers in this process. Engines have the same settings on both sides, and
weights that vLLM draws itself. Waves are repeated; ratios are of medians.

``json``, for comparison: the same engine and requests, with vLLM's own answer of one JSON object a token.

Every part runs in a process of its own with a deadline; a part that fails leaves an error in its place.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from bench.h200.model import QWEN3_4B
from bench.machine import describe
from bench.runner import adopt_orphans, run_command
from vime.types import SamplingParams

PROMPT, RESPONSE, STREAMS, REPEATS = 256, 512, (256, 512), 2
TINY_PROMPT, TINY_RESPONSE, TINY_STREAMS = 32, 64, (16, 32)
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
TINY |= {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 1024, "bos_token_id": 1, "eos_token_id": 2}
DEADLINE_S = 200.0  # of a part: its start, a warm-up and the waves
FLAGS = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "max_num_seqs": max(STREAMS),
    "max_num_batched_tokens": 8192,  # vLLM's default differs between its two sides
    "logprobs_mode": "processed_logprobs",
    "disable_log_stats": True,  # the default of both sides
}

Wave = Callable[[int], Awaitable[int]]
"""N → tokens that were sampled."""


class Work:
    """The requests, the same for every part."""

    def __init__(self, tiny: bool) -> None:
        self.prompt, self.response = (TINY_PROMPT, TINY_RESPONSE) if tiny else (PROMPT, RESPONSE)
        self.streams = TINY_STREAMS if tiny else STREAMS
        self.vocabulary = int(TINY["vocab_size"]) if tiny else int(str(QWEN3_4B["vocab_size"])) - 300

    def token_ids(self, index: int) -> list[int]:
        return [(index * 7919 + i * 104729) % self.vocabulary for i in range(self.prompt)]

    def params(self, index: int) -> SamplingParams:
        return SamplingParams(max_tokens=self.response, temperature=1.0, seed=index, ignore_eos=True)


def engine_flags(tiny: bool, gpu: bool) -> dict[str, Any]:
    flags: dict[str, Any] = {**FLAGS, "max_model_len": 256 if tiny else PROMPT + RESPONSE}
    flags["kv_cache_memory_bytes"] = 64 << 20 if tiny else 64 << 30  # all requests at once
    if not gpu:
        flags |= {"enforce_eager": True, "enable_chunked_prefill": False}
    return flags


def offline(folder: Path, tiny: bool) -> dict[str, Any]:
    """tok/s of ``LLM.generate``, by N."""
    from vime.config.vllm_build import is_cpu_build
    from vime.serving.engine import EngineSpec

    environment = EngineSpec(model=folder, cpu=is_cpu_build()).environment()  # read where vLLM is imported
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)  # LLM would otherwise compute in this process
    os.environ.update(environment)
    from vllm import LLM
    from vllm import SamplingParams as VllmParams

    work = Work(tiny)
    begin = time.perf_counter()
    llm: Any = LLM(model=str(folder), dtype="bfloat16", **engine_flags(tiny, gpu=not is_cpu_build()))
    started = time.perf_counter() - begin

    async def wave(count: int) -> int:
        params = [
            VllmParams(
                max_tokens=p.max_tokens, temperature=1.0, seed=p.seed, ignore_eos=True, logprobs=0, detokenize=False
            )
            for p in map(work.params, range(count))
        ]
        prompts = [{"prompt_token_ids": work.token_ids(i)} for i in range(count)]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return {"start_s": round(started, 1), **asyncio.run(_waves(wave, work.streams))}


def over_http(folder: Path, tiny: bool, servers: int, with_json: bool) -> dict[str, Any]:
    """tok/s of vime's client, router and engine, by N."""
    from vime.config.vllm_build import is_cpu_build
    from vime.serving.engine import EngineServer, EngineSpec

    flags = engine_flags(tiny, gpu=not is_cpu_build()) | {"api_server_count": servers}
    spec = EngineSpec(model=folder, dtype="bfloat16", cpu=is_cpu_build(), flags=flags)
    server = EngineServer(spec, log_dir=folder / f"servers_{servers}", start_timeout_s=DEADLINE_S)
    begin = time.perf_counter()
    url = server.start()
    started = time.perf_counter() - begin
    try:
        result = asyncio.run(_over_http(url, server.pid, folder, Work(tiny), with_json))
    finally:
        server.stop()
    return {"start_s": round(started, 1), **result}


async def _over_http(url: str, pid: int, folder: Path, work: Work, with_json: bool) -> dict[str, Any]:
    from vime.serving.client import RouterClient
    from vime.serving.router import RouterServer

    router = RouterServer(log_dir=folder)
    client = RouterClient(await router.start([url]))

    async def wave(count: int) -> int:
        generations = await asyncio.gather(
            *(client.generate(work.token_ids(i), work.params(i), session_id=f"s{i}") for i in range(count))
        )
        return sum(len(generation.log_probs) for generation in generations)

    try:
        result = await _waves(wave, work.streams)
        result["cpu_us_a_token"] = await _cpu(pid, wave, work.streams[-1])
        if with_json:
            result["json"] = await _json(url, work)
        return result
    finally:
        await client.close()
        router.stop()


async def _json(url: str, work: Work) -> dict[str, Any]:
    """The same requests straight to the engine, answered and read as vLLM does it."""
    import aiohttp

    from bench.rollout import post_directly
    from vime.serving.client import request_body

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def wave(count: int) -> int:
            bodies = [request_body(work.token_ids(i), work.params(i)) for i in range(count)]
            return await post_directly(session, url, bodies)

        return await _waves(wave, work.streams[-1:])


async def _waves(wave: Wave, streams: Sequence[int]) -> dict[str, Any]:
    await wave(streams[0])  # warm-up
    measured: dict[str, list[int]] = {}
    for count in streams:
        for _ in range(REPEATS):
            begin = time.perf_counter()
            tokens = await wave(count)
            measured.setdefault(str(count), []).append(round(tokens / (time.perf_counter() - begin)))
    return {"tokens_per_s": measured}


async def _cpu(pid: int, wave: Wave, count: int) -> dict[str, float]:
    """Microseconds of CPU for each token, of this process and each of the engine's."""
    processes = [psutil.Process(), *psutil.Process(pid).children(recursive=True)]
    before = [sum(process.cpu_times()[:2]) for process in processes]
    tokens = await wave(count)
    spent = [sum(process.cpu_times()[:2]) - start for process, start in zip(processes, before, strict=True)]
    names = ["client", *(" ".join(process.cmdline())[:40].strip() for process in processes[1:])]
    return {f"{name} {i}": round(s / tokens * 1e6, 1) for i, (name, s) in enumerate(zip(names, spent, strict=True))}


def run_part(part: str, folder: Path, tiny: bool, timeout_s: float) -> dict[str, Any]:
    """A part in a process of its own, or {"error": why it gave no result, "log": the last words of its engine}."""
    command = [sys.executable, "-m", "bench.h200.rollout", "--part", part, "--folder", str(folder)]
    result = run_command([*command, *(["--tiny"] if tiny else [])], folder / f"{part}.log", timeout_s)
    if "error" in result:
        logs = folder.glob("servers_*/engine_0.log")
        result["log"] = "\n".join(path.read_text(errors="replace")[-1500:] for path in logs)
    return result


def one_part(part: str, folder: Path, tiny: bool) -> dict[str, Any]:
    if part == "offline":
        return offline(folder, tiny)
    servers = int(part.removeprefix("http_"))
    return over_http(folder, tiny, servers, with_json=servers == 1)


def ratios(parts: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Part → N → tok/s ÷ offline's; empty where that was not measured."""
    base = parts.get("offline", {}).get("tokens_per_s", {})
    sides = {name: part.get("tokens_per_s", {}) for name, part in parts.items() if name != "offline"}
    sides |= {f"{name}_json": part["json"]["tokens_per_s"] for name, part in parts.items() if "json" in part}
    return {
        name: {n: round(statistics.median(v) / statistics.median(base[n]), 3) for n, v in side.items() if n in base}
        for name, side in sides.items()
    }


def machine() -> dict[str, Any]:
    """Where and with what a result was measured."""
    import torch

    return {"device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU", **describe()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--parts", default="offline,http_1,http_2", help="http_2 is an engine with two API servers")
    parser.add_argument("--folder", type=Path, help="for logs; a temporary one otherwise")
    parser.add_argument("--timeout", type=float, default=DEADLINE_S, help="of a part, in seconds")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part:
        output = os.dup(1)
        os.dup2(2, 1)  # whatever libraries print goes to the log
        os.write(output, json.dumps(one_part(given.part, given.folder, given.tiny)).encode() + b"\n")
        return
    adopt_orphans()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="vime-rollout-"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(QWEN3_4B | (TINY if given.tiny else {})))
    parts: dict[str, dict[str, Any]] = {}
    for part in given.parts.split(","):
        parts[part] = run_part(part, folder, given.tiny, given.timeout)
        print(json.dumps({part: parts[part]}), file=sys.stderr, flush=True)  # should a later one never end
    work = Work(given.tiny)
    what = {"prompt": work.prompt, "response": work.response, "streams": work.streams, "tiny": given.tiny}
    print(json.dumps({"work": what, **machine(), "ratio_to_offline": ratios(parts), "parts": parts}), flush=True)


if __name__ == "__main__":
    main()
