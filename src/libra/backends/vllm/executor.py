"""vLLM's executor of an engine in this process, without its file in the directory of temporary files.

Invariant: an engine leaves no file when its process ends, however it ends. Even for a single worker, vLLM makes a
rendezvous file `vllm_dist_*` there, which nothing removes. Here it is memory that ends with the process, and that
no other user can open.
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
