"""vLLM's OpenAI-compatible server, with the CPU build repaired where that is what is installed.

    python -m drafthead.engine.api_server --model MODEL ...

Flags and routes are vLLM's own; its engine's process ends with the server, however that ends. The repair stands at the
top level because vLLM starts its engine in a process of its own, which imports this module again as its main module.
"""

import runpy

from vllm.platforms import current_platform

from drafthead.engine.offline import repair_cpu_build
from drafthead.processes import children_end_with_us

if current_platform.is_cpu():
    repair_cpu_build()

if __name__ == "__main__":
    with children_end_with_us():
        # Not alter_sys: the main module has to stay this one.
        runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
