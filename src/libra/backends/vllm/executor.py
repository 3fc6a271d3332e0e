"""vLLM's executor for an engine in this process, without a file in the directory for temporary files.

Invariant: an engine leaves no file, however its process ends. Even for a single worker, vLLM makes a rendezvous file
`vllm_dist_*`, which nothing removes. Here it is anonymous memory, which ends with the process and which no other user
can open.
"""

from __future__ import annotations

import os

from vllm.v1.executor.uniproc_executor import UniProcExecutor

_FILE = "file://"


class InProcessExecutor(UniProcExecutor):
    def _distributed_args(self) -> tuple[str, int, int]:
        meeting, rank, local_rank = super()._distributed_args()
        if meeting.startswith(_FILE):
            meeting = f"{_FILE}/proc/self/fd/{os.memfd_create('engine')}"
        return meeting, rank, local_rank
