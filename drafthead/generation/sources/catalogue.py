"""The public data sets that a recipe can name, and what each needs: where it is, how it reads, what it may be for.

Licences are those their publishers state; they are printed with the prompts, and are yours to judge.
"""

from dataclasses import dataclass

from drafthead.generation.sources import adapters
from drafthead.generation.sources.adapters import Adapter

_EVALUATION = 1.0  # benchmarks: every prompt is held out


@dataclass(frozen=True)
class Entry:
    """One public data set.

    Attributes:
        adapter: reads its rows.
        category: workload of rows that name none.
        licence: as published, or what to know about it.
        hub: id on the Hugging Face hub; empty when it is elsewhere.
        files: glob patterns of its files below the repository or folder.
        heldout_files: of its published test split; with one, the others are all for training.
        heldout_share: share of the documents that is never trained on, where no test split is published.
        fetch: without a hub id, the command that downloads it, with {folder} for where it is looked for.
        reminder: printed whenever it is trained on.
        own_category: whether rows name categories of their own.
        throughput_only: no text worth drafting; refused for training.
    """

    adapter: Adapter
    category: str
    licence: str
    hub: str = ""
    files: tuple[str, ...] = ()
    heldout_files: tuple[str, ...] = ()
    heldout_share: float = 0.05
    fetch: str = ""
    reminder: str = ""
    own_category: bool = False
    throughput_only: bool = False


_MLPERF_REMINDER = (
    "mlperf-gpt-oss is the prompts of the MLPerf Inference benchmark itself: a head meant for an official MLPerf "
    "submission must not be trained on them. Their licence is not stated; ask MLCommons before you publish a head."
)

CATALOGUE: dict[str, Entry] = {
    "sharegpt": Entry(
        adapters.sharegpt, "sharegpt", "Apache-2.0 stated; user-shared ChatGPT logs",
        hub="anon8231489123/ShareGPT_Vicuna_unfiltered", files=("ShareGPT_V3_unfiltered_cleaned_split.json",),
    ),
    "mlperf-gpt-oss": Entry(
        adapters.mlperf, "mlperf", "not stated", files=("*perf_eval_ref.parquet",), heldout_share=0.25,
        fetch="mkdir -p {folder} && bash <(curl -s https://raw.githubusercontent.com/mlcommons/r2-downloader/refs/"
        "heads/main/mlc-r2-downloader.sh) -d {folder} "
        "https://inference.mlcommons-storage.org/metadata/gpt-oss-data.uri",
        reminder=_MLPERF_REMINDER,
    ),
    "swe-bench": Entry(
        adapters.swe_bench, "swe-bench", "MIT (SWE-bench); issues of public repositories",
        hub="princeton-nlp/SWE-bench", files=("data/train-*.parquet",), heldout_files=("data/test-*.parquet",),
    ),
    "mt-bench": Entry(
        adapters.turns, "mt-bench", "Apache-2.0", hub="philschmid/mt-bench", files=("*.jsonl", "*.parquet"),
        heldout_share=_EVALUATION, own_category=True,
    ),
    "humaneval": Entry(
        adapters.human_eval, "code", "MIT", hub="openai/openai_humaneval",
        files=("openai_humaneval/test-*.parquet",), heldout_share=_EVALUATION,
    ),
    "gsm8k": Entry(
        adapters.gsm8k, "math", "MIT", hub="openai/gsm8k", files=("main/train-*.parquet",),
        heldout_files=("main/test-*.parquet",),
    ),
    "instruct-coder": Entry(
        adapters.instruct_coder, "code-editing", "MIT", hub="likaixin/InstructCoder",
        files=("train*.json*", "data/train-*.parquet"),
    ),
    "spec-bench": Entry(
        adapters.turns, "spec-bench", "Apache-2.0; questions of six other benchmarks", files=("question.jsonl",),
        fetch="curl --create-dirs -L -o {folder}/question.jsonl "
        "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl",
        heldout_share=_EVALUATION, own_category=True,
    ),
    "creative-writing": Entry(
        adapters.writing_prompts, "creative-writing", "MIT stated; posts of Reddit users",
        hub="euclaise/writingprompts", files=("data/train-*.parquet",), heldout_files=("data/test-*.parquet",),
    ),
    "structured-output": Entry(
        adapters.chat, "structured-output", "Apache-2.0", hub="NousResearch/hermes-function-calling-v1",
        files=("json-mode-singleturn.json",), heldout_share=0.2,
    ),
    "ultrachat-200k": Entry(
        adapters.chat, "chat", "MIT", hub="HuggingFaceH4/ultrachat_200k", files=("data/train_sft-*.parquet",),
        heldout_files=("data/test_sft-*.parquet",),
    ),
    "magpie": Entry(
        adapters.magpie, "magpie", "Llama 3.1 community licence", hub="Magpie-Align/Magpie-Llama-3.1-Pro-300K-Filtered",
        files=("data/train-*.parquet",), own_category=True,
    ),
    "nemotron-v2": Entry(
        adapters.chat, "nemotron", "CC-BY-4.0; gated: accept its terms on the hub first",
        hub="nvidia/Nemotron-Post-Training-Dataset-v2",
        files=("data/stem-*.parquet", "data/chat-*.parquet", "data/math-*.parquet", "data/code-*.parquet"),
        own_category=True,
    ),
    "perfect-blend": Entry(
        adapters.chat, "perfect-blend", "Apache-2.0", hub="mlabonne/open-perfectblend", files=("data/train-*.parquet",),
        own_category=True,
    ),
    "burstgpt": Entry(
        adapters.burst_gpt, "throughput-only", "CC-BY-4.0", files=("*.csv",), heldout_share=_EVALUATION,
        fetch="curl --create-dirs -L -o {folder}/BurstGPT_1.csv "
        "https://raw.githubusercontent.com/HPMLL/BurstGPT/main/data/BurstGPT_1.csv",
        throughput_only=True,
    ),
}  # fmt: skip

LOCAL = Entry(adapters.anything, "all", "yours", own_category=True)  # a name that is not above, with a path
