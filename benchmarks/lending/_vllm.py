"""vLLM in this process, for benchmarks that step their engines themselves. It is imported as an engine is made."""

from __future__ import annotations

from typing import Any


def make_engine(model: str, *, max_model_len: int, scheduler: Any = None, **more: Any) -> Any:
    """vLLM's `LLMEngine` of the model in a directory. `scheduler` None is vLLM's own; `more` are its arguments."""
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    usual: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "async_scheduling": False,
        "disable_log_stats": True,
        "seed": 0,
    }
    return LLMEngine.from_engine_args(
        EngineArgs(model=model, max_model_len=max_model_len, scheduler_cls=scheduler, **(usual | more))
    )


def ask(engine: Any, name: str, prompt: list[int], tokens: int, temperature: float = 1.0) -> None:
    """Ask for this number of tokens after the prompt, told as they come."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine.add_request(
        name,
        {"prompt_token_ids": prompt},
        SamplingParams(
            max_tokens=tokens,
            ignore_eos=True,
            temperature=temperature,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        ),
    )
