"""vLLM's OpenAI-compatible server, with the CPU build repaired where that is what is installed.

    python -m drafthead.serving.api_server --model MODEL ...

Everything else is vLLM's own: the flags, the routes, the code.
"""

import runpy

from vllm.platforms import current_platform

from drafthead.serving.cpu_build import repair_cpu_build

if __name__ == "__main__":
    if current_platform.is_cpu():
        repair_cpu_build()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
