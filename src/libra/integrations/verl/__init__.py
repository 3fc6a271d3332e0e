"""verl 0.9 with Libra's router, and an agent loop that tells it of tools, and a schedule policy.

`VERL_USE_EXTERNAL_MODULES=libra.integrations.verl` has every process of verl import this module, which registers the
agent loop and the schedule policy; the file of `router_config_path` names the router.
"""

from libra.integrations.verl.router import Router
from libra.integrations.verl.schedule import LibraSchedulePolicy
from libra.integrations.verl.tool_loop import LibraToolAgentLoop

__all__ = ["LibraSchedulePolicy", "LibraToolAgentLoop", "Router"]
