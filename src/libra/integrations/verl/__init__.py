"""verl 0.9 with Libra's router, an agent loop that reports tool calls to it, and a schedule policy. With
`VERL_USE_EXTERNAL_MODULES=libra.integrations.verl` every process of verl imports this module, which registers the agent
loop and the schedule policy. The file of `router_config_path` names the router.
"""

from libra.integrations.verl.router import Router
from libra.integrations.verl.schedule import LibraSchedulePolicy
from libra.integrations.verl.tool_loop import LibraToolAgentLoop

__all__ = ["LibraSchedulePolicy", "LibraToolAgentLoop", "Router"]
