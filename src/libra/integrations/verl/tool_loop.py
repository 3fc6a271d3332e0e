"""verl's tool agent loop, which reports prompts, answers, tools and ends to Libra's router.

Invariant: every trajectory that begins is finished or forgotten, also if its loop raises an exception.
"""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, register
from verl.experimental.agent_loop.tool_agent_loop import AgentData, AgentState, ToolAgentLoop

_FAILURES = ("Error executing tool '", "Unknown function '", "Invalid JSON in arguments for '")  # verl's words


@register("libra_tool_agent")
class LibraToolAgentLoop(ToolAgentLoop):
    """The same turns and tools as `tool_agent`. verl makes one for each trajectory."""

    def __init__(self, *given: Any, **keys: Any) -> None:
        super().__init__(*given, **keys)
        self._router: Any = getattr(self.server_manager, "_load_balancer", None)
        if not hasattr(self._router, "answered"):
            raise TypeError(
                "the agent loop libra_tool_agent needs Libra's router: set actor_rollout_ref.rollout.router_config_path"
                " to a file with router_class: libra.integrations.verl.Router"
            )
        self._id: str | None = None
        self._prompt = self._task = ""
        self._failed = False

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        self._prompt = str(row.get("uid", row.get("index", "")))
        self._task = str(row.get("data_source", ""))
        try:
            output = await super().run(sampling_params, **row)
        except BaseException:
            if self._id is not None:
                self._router.forget.remote(self._id)
            raise
        version = output.extra_fields.get("max_global_steps") or 0
        self._router.finished.remote(self._id, output.reward_score, int(version))
        return output

    async def _handle_pending_state(self, agent_data: AgentData, sampling_params: dict[str, Any]) -> AgentState:
        state = await super()._handle_pending_state(agent_data, sampling_params)
        self._id = agent_data.request_id
        self._router.began.remote(self._id, self._prompt or self._id, self._task)
        return state

    async def _handle_generating_state(self, agent_data: AgentData, *given: Any, **keys: Any) -> AgentState:
        prompt = len(agent_data.prompt_ids)
        state = await super()._handle_generating_state(agent_data, *given, **keys)
        self._router.answered.remote(self._id, prompt, len(agent_data.response_ids))
        return state

    async def _handle_processing_tools_state(self, agent_data: AgentData) -> AgentState:
        self._failed = False
        state = await super()._handle_processing_tools_state(agent_data)
        tool = agent_data.tool_calls[: self.max_parallel_calls][-1].name
        self._router.returned.remote(self._id, tool, "error" if self._failed else "ok")
        return state

    async def _call_tool(self, *given: Any, **keys: Any) -> Any:
        called = await super()._call_tool(*given, **keys)
        self._failed |= (called[0].text or "").startswith(_FAILURES)
        return called
