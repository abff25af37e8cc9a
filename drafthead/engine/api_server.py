"""vLLM's OpenAI-compatible server, with the CPU build repaired where that is what is installed.

    python -m drafthead.engine.api_server --model MODEL ...

Flags and routes are vLLM's own; its engine's process ends with the server, however that ends. The repair stands at the
top level because vLLM starts its engine in a process of its own, which imports this module again as its main module.
"""

import multiprocessing
import os
import runpy
from functools import partial

from vllm.platforms import current_platform
from vllm.v1.engine import utils

from drafthead.engine.offline import repair_cpu_build
from drafthead.processes import children_end_with_us

if current_platform.is_cpu():
    repair_cpu_build()
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":  # its engine starts no further process
        # vLLM spawns it on a CPU: it imports everything once more, a third of a server's start.
        utils.get_mp_context = partial(multiprocessing.get_context, "fork")

if __name__ == "__main__":
    with children_end_with_us():
        # Not alter_sys: the main module has to stay this one.
        runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
