"""Made-up logs, a few entries in each format that Libra reads."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterable
from typing import Any

SEARCH = {"id": "c1", "type": "function", "function": {"name": "search", "arguments": '{"q": "tides"}'}}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "You answer questions on tides."},
    {"role": "user", "content": "When is high water at Brest?"},
    {"role": "assistant", "content": None, "tool_calls": [SEARCH]},
    {"role": "tool", "tool_call_id": "c1", "content": "high water 05:12 and 17:40"},
    {"role": "assistant", "content": "At 05:12 and at 17:40."},
]


def _lines(entries: Iterable[object]) -> bytes:
    return "".join(json.dumps(entry) + "\n" for entry in entries).encode()


def _table(header: str, rows: Iterable[str]) -> bytes:
    return "\n".join((header, *rows, "")).encode()


AZURE = _table(
    "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens",
    ("2024-10-15 08:00:00.250000,0,700,30", "2024-10-15 08:00:02.750000,2,900,12"),
)
BURSTGPT = _table(
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type",
    (
        "10,a,2.0,GPT-4,50,20,70,Conversation log",
        "11,,1.0,GPT-4,80,8,88,API log",
        "15,a,1.5,GPT-4,100,30,130,Conversation log",
        "16,b,0.0,GPT-4,40,0,40,Conversation log",
    ),
)
VIDUR = _table("arrived_at,num_prefill_tokens,num_decode_tokens", ("0.5,300,40", "1.25,310,41"))
MOONCAKE = _lines(
    {"timestamp": 500 * n, "input_length": 1000 + n, "output_length": 20, "hash_ids": [0, 1, n]} for n in range(3)
)
VLLM_BENCH = json.dumps(
    {
        "backend": "vllm",
        "request_rate": "inf",
        "input_lens": [100, 200, 50],
        "output_lens": [20, 0, 7],
        "ttfts": [0.1, 0.0, 0.2],
    }
).encode()
OPENAI = _lines({"messages": TALK, "usage": {"prompt_tokens": 90 + n, "completion_tokens": 12}} for n in range(2))
VERIFIERS = _lines(
    {
        "example_id": n // 2,
        "prompt": TALK[:2],
        "completion": [{**TALK[2], "tool_calls": [json.dumps(SEARCH)]}, *TALK[3:]],
        "reward": n / 2,
        "timing": {"total_ms": 900},
        "token_usage": {"input_tokens": 160, "output_tokens": 25},
    }
    for n in range(3)
)
VERIFIERS_TRACES = _lines(
    [
        {
            "env": {"id": "tides"},
            "traces": [
                {
                    "id": "t-0",
                    "task": {"key": "brest"},
                    "is_completed": True,
                    "timing": {"start": 100.0},
                    "rewards": {"right": {"score": 1.0, "weight": 0.75}, "brief": {"score": 0.5, "weight": 0.5}},
                    "nodes": [
                        {"message": {"role": "user"}, "parent": None},
                        {"message": {"role": "assistant"}, "parent": 0},
                        {"message": {"role": "tool", "name": "search"}, "parent": 1},
                        {"message": {"role": "assistant"}, "parent": 2},
                    ],
                    "calls": [
                        {
                            "node": 1,
                            "usage": {"prompt_tokens": 60, "completion_tokens": 15},
                            "time": {"start": 100.0, "end": 101.0},
                        },
                        {
                            "node": 3,
                            "usage": {"prompt_tokens": 95, "completion_tokens": 10},
                            "time": {"start": 103.5, "end": 104.0},
                        },
                    ],
                }
            ],
        }
    ]
)
RESPONSE = (
    '<tool_call>\n{"name": "search", "arguments": {"q": "tides"}}\n</tool_call><|im_end|>\n<|im_start|>user\n'
    "<tool_response>\nhigh water 05:12\n</tool_response><|im_end|>\n<|im_start|>assistant\nAt 05:12."
)
VERL = _lines(
    {"input": f"user\nquestion {n}", "output": RESPONSE, "gts": "05:12", "score": 0.5 * n, "step": 7, "num_turns": 4}
    for n in range(2)
)
TRL = _lines(
    {"step": "12", "prompt": "When?", "completion": RESPONSE, "right": 1.0, "brief": -0.25, "advantage": 0.1}
    for _ in range(2)
)
INSPECT_SAMPLE = {
    "id": "brest",
    "epoch": 2,
    "messages": [
        *TALK[:2],
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "function": "bash", "arguments": {"cmd": "x"}}],
        },
        {"role": "tool", "tool_call_id": "c1", "function": "bash", "content": "", "error": {"type": "timeout"}},
        TALK[4],
    ],
    "events": [
        {
            "event": "model",
            "output": {"usage": {"input_tokens": 10, "input_tokens_cache_read": 30, "output_tokens": 9}},
        },
        {"event": "tool", "function": "bash", "working_time": 2.5},
        {"event": "model", "output": {"usage": {"input_tokens": 60, "output_tokens": 8}}},
    ],
    "scores": {"match": {"value": "C"}},
}
INSPECT = json.dumps({"version": 2, "eval": {"task": "tides"}, "samples": [INSPECT_SAMPLE]}, indent=2).encode()
SWE_AGENT = json.dumps(
    {
        "environment": "swe_main",
        "trajectory": [
            {"action": "ls src", "observation": "a.py b.py", "response": "I list the files.", "execution_time": 0.5},
            {"action": "submit", "observation": "done", "response": "I submit.", "execution_time": 0.25},
        ],
        "history": [{"role": "system", "content": "You mend code."}, {"role": "user", "content": "Mend a.py."}],
        "info": {
            "exit_status": "submitted",
            "model_stats": {"tokens_sent": 420, "tokens_received": 50, "api_calls": 2},
        },
    },
    indent=2,
).encode()
WEKA = json.dumps(
    {
        "id": "w-1",
        "block_size": 64,
        "requests": [
            {"t": 0.0, "type": "s", "in": 1000, "out": 50, "api_time": 2.0, "input_types": ["text"]},
            {
                "t": 3.0,
                "type": "subagent",
                "agent_id": "sub",
                "requests": [{"t": 3.0, "type": "n", "in": 200, "out": 10, "api_time": 1.0}],
            },
            {"t": 5.0, "type": "s", "in": 1200, "out": 60, "api_time": 2.0, "input_types": ["tool_result"]},
            {"t": 60.0, "type": "s", "in": 900, "out": 5, "think_time": 53.0, "input_types": ["text"]},
        ],
    }
).encode()
COPILOT = _lines(
    [
        {
            "session_id": "s-1",
            "date": "2026-06-01",
            "turns": [
                {
                    "turn_id": "u1",
                    "llm_calls": [
                        {
                            "message_id": "m1",
                            "timestamp": "2026-06-01T00:00:00.000000000Z",
                            "duration_ms": 1000.0,
                            "tokens": {"prompt": 500, "completion": 20},
                        },
                        {"message_id": "m2", "timestamp": "2026-06-01T00:00:01Z", "tokens": {"prompt": None}},
                        {
                            "message_id": "m3",
                            "timestamp": "2026-06-01T00:00:05Z",
                            "duration_ms": 500.0,
                            "tokens": {"prompt": 640, "completion": 30},
                        },
                    ],
                    "tool_batches": [
                        {
                            "request_id": "m1",
                            "duration_ms": 3000.0,
                            "result": "Success",
                            "function_calls": [{"name": "read_file"}, {"name": "grep"}],
                        }
                    ],
                },
                {
                    "turn_id": "u2",
                    "llm_calls": [
                        {
                            "message_id": "m4",
                            "timestamp": "2026-06-01T00:01:05.500Z",
                            "duration_ms": 500.0,
                            "tokens": {"prompt": 700, "completion": 40},
                        }
                    ],
                    "tool_batches": [],
                },
            ],
        }
    ]
)


def inspect_archive() -> bytes:
    """The sample of `INSPECT` as an `.eval` file."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("header.json", json.dumps({"version": 2, "eval": {"task": "tides"}}))
        archive.writestr("samples/brest_epoch_2.json", json.dumps(INSPECT_SAMPLE))
        archive.writestr("summaries.json", "[]")
    return packed.getvalue()


SAMPLES: dict[str, bytes] = {
    "azure": AZURE,
    "burstgpt": BURSTGPT,
    "vidur": VIDUR,
    "mooncake": MOONCAKE,
    "vllm-bench": VLLM_BENCH,
    "openai": OPENAI,
    "verifiers": VERIFIERS,
    "verifiers-traces": VERIFIERS_TRACES,
    "verl": VERL,
    "trl": TRL,
    "inspect": INSPECT,
    "swe-agent": SWE_AGENT,
    "weka": WEKA,
    "copilot": COPILOT,
}
